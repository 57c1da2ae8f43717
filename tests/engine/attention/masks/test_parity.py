"""Masks on real ranks: out, lse, dq, dk, dv equal dense float64, blind rows included."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine import ContextParallel, burst_attention
from engine.attention import masks
from engine.attention.geometry.layout import LAYOUTS
from engine.attention.masks import (
    BlockSparse,
    Causal,
    Documents,
    DocumentsOfBatch,
    Full,
    LocalGlobal,
    SlidingWindow,
    Strided,
    parse_mask,
)
from engine.attention.masks.mask import FirstRows
from engine.attention.reference import visibility
from tests.engine.attention.parity.test_parity import dense, distributed, problem
from tests.positions import rank_pair_tiles
from tests.ranks import run_on_ranks
from tests.slow import slow

SEQ_LEN = 48
BLIND = ((1, 0, 0, 1), (0, 0, 0, 0), (0, 1, 1, 0), (1, 0, 0, 0))  # the second quarter sees nothing; key block 2 of 4
MASKS = (
    Documents((7, 1, 20, 20)),
    Documents((24, 24), causal=False),
    Documents((12, 12, 12, 12)),  # contiguous on 4 ranks: no ring step has any tile
    Documents((5,), repeat=True),
    Documents((7, 1, 20, 20), left=6),
    Documents((1, 30, 17), causal=False, left=4),
    Documents((20, 4, 24), spans=((2, 9), (12, 18), (24, 25), (30, 47))),
    Documents((3, 45), left=5, spans=((0, 3), (10, 24))),
    BlockSparse(BLIND, 12),
    BlockSparse(BLIND, 12, causal=True),  # rows of the third quarter see key block 1, and half of their own
    BlockSparse([[False] * 4] * 4, 12),  # no query sees a key
    BlockSparse([[False, True], [False, False]], 24, causal=True),  # only the future, which is hidden
    BlockSparse(Strided(3), 5, causal=True),
    BlockSparse(LocalGlobal(1, 1), 4),
    SlidingWindow(6, global_tokens=3),
    SlidingWindow(5, 2, global_tokens=14),  # on 4 ranks, all of the first shard and some of the second
    FirstRows(Causal(), 20),  # later queries see nothing, and are rows of the result all the same
    FirstRows(SlidingWindow(6, 3), 1),
)


@pytest.mark.parametrize("mask", [*MASKS, Full(), Causal(), SlidingWindow(3), SlidingWindow(0, 1)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, SEQ_LEN])
def test_a_mask_says_whether_it_shows_later_keys(mask: masks.Mask, tokens: int) -> None:
    if mask.unsupported_reason(tokens) is None:
        seen = visibility(mask, tokens)
        assert mask.shows_later_keys(tokens) == bool(seen.triu(1).any())


def error(found, expected) -> float:
    """Largest difference; NaN anywhere, or an lse that is infinite in only one of the two, is an infinite one."""
    for f, e in zip(found, expected, strict=True):
        if f.isnan().any() or not torch.equal(f.isinf(), e.isinf()):
            return float("inf")
    return max((f - e).nan_to_num(0).abs().max().item() for f, e in zip(found, expected, strict=True))


def mask_errors(node_size: int | None, dtype: torch.dtype, kernel: str, exchange: str, routes: int) -> dict[str, float]:
    """Error of every layout and mask, by their names, under one backward route in turn or both."""
    errors = {}
    contexts = [ContextParallel(layout=layout, node_size=node_size) for layout in LAYOUTS]
    whole = [tensor.to(dtype).double() for tensor in problem(SEQ_LEN, 4, 2, batch=1)]
    for mask in MASKS:
        expected = dense(*whole, mask)
        for cp, _ in itertools.product(contexts, range(routes)):
            route = ("query", "key_value")[len(errors) % 2]
            found = distributed(cp, whole, mask, dtype, backward=route, kernel=kernel, exchange=exchange)
            errors[f"{cp.layout.name} {mask} {route}"] = error(found, expected)
    return errors


@pytest.mark.parametrize(
    ("world_size", "node_size", "exchange", "routes"),
    [
        (2, None, "relay", 1),
        (4, 2, "direct", 1),
        *slow((1, None, "auto", 2), (2, None, "relay", 2), (3, None, "direct", 2), (4, None, "direct", 2)),
        *slow((4, 2, "relay", 2), (4, 2, "direct", 2)),
    ],
)
def test_block_masks_equal_dense_float64(world_size, node_size, exchange, routes) -> None:
    for errors in run_on_ranks(world_size, mask_errors, node_size, torch.float64, "reference", exchange, routes):
        assert len(errors) == routes * len(MASKS) * len(LAYOUTS)
        assert {case: worst for case, worst in errors.items() if not worst < 1e-10} == {}


def test_block_masks_equal_dense_with_the_cpu_kernel() -> None:
    for errors in run_on_ranks(2, mask_errors, None, torch.float32, "cpu", "auto", 1):
        assert {case: worst for case, worst in errors.items() if not worst < 2e-5} == {}


def test_every_mask_offered_is_one_that_a_setting_describes() -> None:
    offered = {name for name in masks.__all__ if hasattr(getattr(masks, name), "tiles")} - {"Mask"}
    examples = (Full(), Causal(), DocumentsOfBatch(), *MASKS[:-2])
    assert offered == {type(mask).__name__ for mask in examples}
    assert all(parse_mask(str(mask)) == mask for mask in examples)


def test_the_oracle_knows_which_rows_see_no_key() -> None:
    seen = visibility(BlockSparse(BLIND, 12), SEQ_LEN).any(dim=1)
    assert seen.tolist() == [True] * 12 + [False] * 12 + [True] * 24
    assert not visibility(BlockSparse([[False, True], [False, False]], 24, causal=True), SEQ_LEN).any()


def blind_rows() -> list[tuple[int, float, float, float]]:
    """(position, lse, largest |out|, largest |dq|) of each of this rank's tokens whose block sees nothing."""
    found = []
    for layout in LAYOUTS:
        cp = ContextParallel(layout=layout)
        q, k, v, dout = (cp.shard(t, 1) for t in problem(SEQ_LEN, 4, 2, batch=1))
        q.requires_grad_()
        out, lse = burst_attention(q, k, v, mask=BlockSparse(BLIND, 12), cp=cp, return_lse=True)
        (out * dout).sum().backward()
        found += [
            (p, lse[0, :, i].max().item(), out[0, i].abs().max().item(), q.grad[0, i].abs().max().item())
            for i, p in enumerate(cp.positions(SEQ_LEN).tolist())
            if 12 <= p < 24
        ]
    return found


def test_a_query_that_sees_no_key_gives_zero_and_gets_no_gradient() -> None:
    rows = [row for rank in run_on_ranks(4, blind_rows) for row in rank]
    assert sorted(rows) == sorted((position, -torch.inf, 0.0, 0.0) for position in range(12, 24) for _ in LAYOUTS)


OWN = Documents((12, 12, 12, 12))
SHARED = Documents((6, 12, 12, 12, 6))  # all but the outer two lie on two neighbours


def bytes_sent() -> tuple[int, int, int]:
    """Bytes this rank posted forward and backward for OWN and for SHARED, and those of one shard of K."""
    sent = []
    for mask in (OWN, SHARED):
        cp = ContextParallel(layout="contiguous")
        q, k, v, dout = (cp.shard(t, 1) for t in problem(SEQ_LEN, 4, 4, batch=1))
        q.requires_grad_()
        burst_attention(q, k, v, mask=mask, cp=cp, exchange="direct").backward(dout)
        sent.append(cp.traffic.sent_bytes)
    return sent[0], sent[1], k.numel() * k.itemsize


def test_steps_without_tiles_send_nothing() -> None:
    for own, shared, shard in run_on_ranks(4, bytes_sent):
        assert own == 0
        # Forward half of K and V to the next rank; backward half of Q, dO, LSE, delta to the one before, dQ back.
        assert 0 < shared < 4 * shard


LONELY = BlockSparse([[False] * 4, [False] * 4, [True, False, False, False], [False] * 4], 12)


def lonely_errors() -> list[float]:
    """Errors where some ranks have no query that sees anything and the keys of others are seen by none."""
    whole = problem(SEQ_LEN, 4, 2, batch=1)
    expected = dense(*whole, LONELY)
    return [
        error(distributed(ContextParallel(layout=layout), whole, LONELY, torch.float64, kernel="reference"), expected)
        for layout in LAYOUTS
    ]


def test_ranks_without_any_work_take_part() -> None:
    work = [
        (q, k) for q in range(4) for k in range(4) if rank_pair_tiles(LONELY, LAYOUTS["contiguous"], SEQ_LEN, 4, q, k)
    ]
    assert work == [(2, 0)]
    assert max(max(errors) for errors in run_on_ranks(4, lonely_errors)) < 1e-10
