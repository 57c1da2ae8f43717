"""Tiles of packed documents become few kernel calls, and each kernel computes such a call as it computes its tiles."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.attention import kernels
from engine.attention.geometry.layout import LAYOUTS
from engine.attention.geometry.tiles import CAUSAL, FULL, NO_LIMIT, Band, Call, VarlenGroup, calls_of, trim
from engine.attention.kernels import KERNELS, BackwardInputs, KernelProblem, WholeInputs, choose_kernel, kernel_named
from engine.attention.masks import Documents
from engine.attention.masks.pairs import pair_table
from tests.engine.attention.kernels.flash_attention import flash_attention
from tests.engine.attention.planning.test_fast_plans import cut

REFERENCE = kernel_named("reference")


def sequences(band: Band, lengths: list[tuple[int, int, int, int]]) -> VarlenGroup:
    """Each with queries, keys, and how many queries and keys before it are in no sequence."""
    at = np.zeros(2, dtype=np.int64)
    bounds = []
    for rows, columns, no_rows, no_columns in lengths:
        start = at + np.array((no_rows, no_columns))
        at = start + np.array((rows, columns))
        bounds.append((start[0], at[0], start[1], at[1]))
    return VarlenGroup(band, *np.array(bounds).T)


CALLS = [
    sequences(CAUSAL, [(5, 5, 0, 0), (1, 1, 0, 0), (20, 20, 0, 0), (7, 7, 0, 0)]),
    sequences(CAUSAL, [(5, 5, 0, 0), (9, 9, 1, 2), (3, 3, 0, 1)]),
    sequences(FULL, [(3, 8, 0, 0), (1, 2, 0, 0), (6, 1, 0, 0)]),
    sequences(FULL, [(3, 8, 0, 0), (4, 2, 3, 0), (1, 1, 0, 5)]),
    sequences(Band(-3, 0), [(5, 5, 0, 0), (2, 2, 0, 0), (12, 12, 0, 0)]),
    sequences(Band(-2, 4), [(5, 7, 0, 0), (2, 4, 2, 1), (6, 8, 0, 0)]),
    sequences(Band(0, None), [(4, 4, 0, 0), (1, 1, 1, 1)]),
    sequences(CAUSAL, [(1, 1, 0, 0)] * 6),
]


def inputs(call: VarlenGroup, batch: int, heads: int, kv_heads: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    rows, columns = int(call.q_stops[-1]), int(call.k_stops[-1])
    shapes = [(batch, rows, heads, 16), *[(batch, columns, kv_heads, 16)] * 2, (batch, rows, heads, 16)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 4, 2), (2, 3, 3)])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.band} {len(call.tiles)}")
@pytest.mark.parametrize("name", ["cpu", "reference", "fa2", "fa4"])
def test_a_call_of_several_sequences_equals_its_tiles(monkeypatch, name, call, batch, heads, kv_heads) -> None:
    if name == "fa2" and call.kind == "band":
        pytest.skip("knows no bands")
    if name in ("fa2", "fa4"):
        flash_attention(monkeypatch)
    kernel = kernel_named(name)
    q, k, v, dout = inputs(call, batch, heads, kv_heads, torch.float64)
    out, lse = kernel.forward(q, k, v, call, 0.25)
    expected_out, expected_lse = torch.zeros_like(q), torch.full((batch, heads, q.shape[1]), -torch.inf).double()
    for tile in call.tiles:
        expected_out[:, tile.q], expected_lse[:, :, tile.q] = REFERENCE.forward(
            q[:, tile.q], k[:, tile.k], v[:, tile.k], tile.band, 0.25
        )
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    # As in a ring: the rows see more keys elsewhere, and queries of no sequence here are not idle.
    whole_lse = lse.nan_to_num(neginf=0) + 0.5
    delta = 0.6 * (dout * out).sum(-1).transpose(1, 2)
    given = BackwardInputs(q, dout, whole_lse, delta, k, v)
    expected = [torch.zeros_like(each) for each in (q, k, v)]
    for tile in call.tiles:
        parts = REFERENCE.backward(given.tokens(tile.q, tile.k), tile.band, 0.25, False)
        for whole, part, tokens in zip(expected, parts, (tile.q, tile.k, tile.k), strict=True):
            whole[:, tokens] = part
    torch.testing.assert_close(kernel.backward(given, call, 0.25, False), tuple(expected))
    if kernel.takes_output:
        whole = WholeInputs(q, 0.6 * out, dout, whole_lse, k, v)
        torch.testing.assert_close(kernel.backward_of_whole(whole, call, 0.25, False), tuple(expected))


def test_the_lengths_of_a_call_are_placed_once(monkeypatch) -> None:
    library = flash_attention(monkeypatch)
    call, kernel = CALLS[0], kernel_named("fa4")
    q, k, v, _ = inputs(call, 1, 2, 2, torch.float64)
    for _ in range(3):
        kernel.forward(q, k, v, call, 0.25)
    first, *others = library.bounds
    assert others
    assert all(each is first for each in others)


def visible(calls: tuple[Call, ...], rows: int, columns: int) -> torch.Tensor:
    """How often each pair is shown."""
    shown = torch.zeros(rows, columns, dtype=torch.int64)
    for tile in (tile for call in calls for tile in call.tiles):
        offset = torch.arange(tile.columns) - torch.arange(tile.rows)[:, None]
        low, high = (-NO_LIMIT if tile.band.lo is None else tile.band.lo), tile.band.hi
        shown[tile.q, tile.k] += (offset >= low) & (offset <= (NO_LIMIT if high is None else high))
    return shown


@pytest.mark.parametrize("seed", range(40))
def test_calls_show_each_pair_of_their_tiles_once(seed: int) -> None:
    chance = random.Random(seed)
    corners, bands, at_row, at_key = [], [], 0, 0
    for _ in range(chance.randrange(1, 30)):
        at_row, at_key = at_row + chance.choice((0, 0, 2)), at_key + chance.choice((0, 0, 3))
        rows, columns = chance.randrange(1, 9), chance.randrange(1, 9)
        kind, limit = chance.choice(("full", "causal", "band")), chance.choice((2, 4))
        tile = trim(rows, rows if kind == "causal" else columns, None, None)
        if kind != "full":
            tile = trim(rows, rows, None if kind == "causal" else -limit, 0)
        assert tile is not None
        corners.append((at_row, at_row + tile.rows, at_key, at_key + tile.columns))
        bands.append(tile.band)
        if chance.random() < 0.9:  # else the next tile has the same queries or keys
            at_row += tile.rows
        if chance.random() < 0.9:
            at_key += tile.columns
    lo = np.array([-NO_LIMIT if band.lo is None else band.lo for band in bands])
    hi = np.array([NO_LIMIT if band.hi is None else band.hi for band in bands])
    calls = calls_of(np.array(corners).T, lo, hi)
    sizes = max(corner[1] for corner in corners), max(corner[3] for corner in corners)
    single = tuple(
        Call(slice(*corner[:2]), slice(*corner[2:]), band) for corner, band in zip(corners, bands, strict=True)
    )
    assert torch.equal(visible(calls, *sizes), visible(single, *sizes))
    for call in calls:
        if not isinstance(call.visible, VarlenGroup):
            continue
        shown = call.visible
        assert (shown.q_starts[1:] >= shown.q_stops[:-1]).all()
        assert (shown.k_starts[1:] >= shown.k_stops[:-1]).all()
        longer = shown.k_stops - shown.k_starts - shown.q_stops + shown.q_starts
        assert shown.kind == "full" or (longer == shown.longer).all()


@pytest.mark.parametrize(("layout", "most"), [("contiguous", 1), ("zigzag", 3), ("striped", 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_a_step_of_a_thousand_documents_is_a_few_calls(layout: str, causal: bool, most: int) -> None:
    lengths = (*cut(random.Random(1), (1 << 16) - 30, 970), *(1 for _ in range(30)))
    table = pair_table(Documents(lengths, causal), LAYOUTS[layout], 1 << 16, 4)
    assert max(len(table.calls(q, k)) for q in range(4) for k in range(4)) <= most


def test_far_apart_tiles_stay_calls_of_their_own() -> None:
    corners = np.array([(0, 9000, 0, 9000), (20000, 29000, 20000, 29000)]).T
    assert len(calls_of(corners, np.full(2, -NO_LIMIT), np.zeros(2, dtype=np.int64))) == 2
    near = np.array([(0, 90, 0, 90), (91, 190, 91, 190)]).T
    assert len(calls_of(near, np.full(2, -NO_LIMIT), np.zeros(2, dtype=np.int64))) == 1


def test_auto_takes_a_kernel_that_computes_documents_in_one_call(monkeypatch) -> None:
    able = {"cudnn": None, "fa2": None}
    monkeypatch.setattr(kernels, "unsupported_reason", lambda kernel, problem: able.get(kernel.name, "absent"))
    facts = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "heads": 4, "kv_heads": 4, "head_dim": 64}
    for sequences, name in ((False, "cudnn"), (True, "fa2")):
        assert choose_kernel("auto", KernelProblem(**facts, sequences=sequences)).name == name
    able.pop("fa2")
    assert choose_kernel("auto", KernelProblem(**facts, sequences=True)).name == "cudnn"
    table = pair_table(Documents((10, 10, 44)), LAYOUTS["contiguous"], 64, 2)
    assert table.has_sequences
    assert not pair_table(Documents((64,)), LAYOUTS["contiguous"], 64, 2).has_sequences


def test_every_kernel_is_compared() -> None:
    assert set(KERNELS) - {"cpu", "reference", "fa2", "fa4"} == {"cudnn", "flex"}  # loops, as the reference does
