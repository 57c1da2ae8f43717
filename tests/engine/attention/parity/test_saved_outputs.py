"""The head of the sequence is recomputed and the tail saved: shares of every rank, and the bytes that are sent."""

from __future__ import annotations

import re
from itertools import pairwise, product

import pytest
import torch

from engine import ContextParallel, burst_attention, prepare_attention
from engine.attention.algorithms.saved import SavedOutput, made_by_lse, save_suffix
from engine.attention.geometry.layout import (
    LAYOUTS,
    Segment,
    SplitZigzag,
    Zigzag,
    layout_named,
    split_unsupported_reason,
    tail_cut,
)
from engine.attention.masks import (
    BlockSparse,
    Causal,
    Documents,
    Full,
    SlidingWindow,
    Strided,
    imbalance,
    kept_share,
    rank_areas,
    recompute_share,
)
from engine.attention.masks.mask import FirstRows
from engine.attention.reference import visibility
from engine.attention.resolve import choose_layout
from engine.burst import METHOD
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from tests.engine.attention.parity.test_parity import problem
from tests.positions import rank_pair_tiles, shard_positions
from tests.ranks import run_on_ranks

TAILS = (0.0, 0.1, 0.25, 0.37, 0.5, 0.9, 1.0)
CP_SIZES = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_split_zigzag_deals_head_and_tail_evenly_and_balances_both(cp_size: int, tail: float) -> None:
    layout = SplitZigzag(tail)
    for chunks in (1, 2, 3, 7):
        seq_len = 2 * cp_size * chunks
        cut = tail_cut(tail, seq_len, cp_size)
        shards = [shard_positions(layout, seq_len, cp_size, rank) for rank in range(cp_size)]
        assert sorted(position for shard in shards for position in shard) == list(range(seq_len))
        assert all(first < second for shard in shards for first, second in pairwise(shard))
        assert {len(shard) for shard in shards} == {seq_len // cp_size}
        assert {sum(position < cut for position in shard) for shard in shards} == {cut // cp_size}
        assert len(set(rank_areas(Causal(), layout, seq_len, cp_size))) == 1
        assert len(set(rank_areas(FirstRows(Causal(), cut), layout, seq_len, cp_size))) == 1
        segments = [layout.segments(seq_len, cp_size, rank) for rank in range(cp_size)]
        assert all(a.start + a.count < b.start for held in segments for a, b in pairwise(held))  # touching runs are one


@pytest.mark.parametrize("tail", [0.0, 1.0])
def test_without_a_head_or_without_a_tail_split_zigzag_is_zigzag(tail: float) -> None:
    for cp_size in CP_SIZES:
        for rank in range(cp_size):
            found, expected = (layout.segments(48 * cp_size, cp_size, rank) for layout in (SplitZigzag(tail), Zigzag()))
            assert found == expected


def test_split_zigzag_needs_few_kernel_calls() -> None:
    calls = [len(rank_pair_tiles(Causal(), SplitZigzag(0.3), 640, 4, q, k)) for q, k in product(range(4), repeat=2)]
    assert max(calls) == 2


def test_split_zigzag_is_made_from_its_tail_and_refuses_lengths_like_zigzag() -> None:
    with pytest.raises(ValueError, match=r"pass SplitZigzag\(tail=FRACTION\)"):
        layout_named("split_zigzag")
    assert "8 equal split_zigzag chunks; the nearest lengths that do: 96 and 104" in (
        split_unsupported_reason(SplitZigzag(0.5), 100, 4) or ""
    )
    assert split_unsupported_reason(SplitZigzag(0.5), 104, 4) is None


@pytest.mark.parametrize(
    ("tail", "seq_len", "cp_size", "cut"),
    [
        (0.25, 1024, 4, 768),
        (0.3, 1024, 4, 720),  # 307.2 tokens to the nearest multiple of 8
        (0.3, 1024, 1, 717),
        (0.5, 12, 4, 4),  # 12 tokens are 4 chunks, not 8; 1.5 of them round to 2
        (0.5, 7, 2, 3),  # no layout splits that; a position all the same
        (0.001, 1024, 4, 1024),
        (1.0, 10, 2, 0),
    ],
)
def test_the_tail_begins_at_a_whole_chunk(tail: float, seq_len: int, cp_size: int, cut: int) -> None:
    assert tail_cut(tail, seq_len, cp_size) == cut


@pytest.mark.parametrize("tail", [-0.1, 1.5])
def test_a_tail_is_a_fraction(tail: float) -> None:
    with pytest.raises(ValueError, match="give a fraction of the sequence from 0 to 1"):
        tail_cut(tail, 1024, 4)


@pytest.mark.parametrize("step", [1, 3])
def test_positions_before_a_cut_are_counted_exactly(step: int) -> None:
    for start, count, cut in product(range(5), range(1, 5), range(20)):
        segment = Segment(start, count, step)
        assert segment.count_before(cut) == sum(position < cut for position in segment.positions())


MASKS = (
    Causal(),
    Full(),
    SlidingWindow(5),
    SlidingWindow(3, 4),
    SlidingWindow(4, global_tokens=6),
    Documents((7, 1, 20, 20)),
    BlockSparse(Strided(3), 5, causal=True),
    BlockSparse(Strided(2), 4),
)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS.values(), SplitZigzag(0.37)], ids=lambda layout: layout.name)
def test_the_first_rows_see_the_same_keys_and_the_others_none(layout, mask) -> None:
    seen = visibility(mask, 48)
    for cp_size, cut in product((1, 2, 4), (0, 1, 18, 30, 48)):
        first = FirstRows(mask, cut)
        areas = []
        for q_rank in range(cp_size):
            queries, area = shard_positions(layout, 48, cp_size, q_rank), 0
            for k_rank in range(cp_size):
                keys = shard_positions(layout, 48, cp_size, k_rank)
                counts = torch.zeros(len(queries), len(keys), dtype=torch.int64)
                for tile in rank_pair_tiles(first, layout, 48, cp_size, q_rank, k_rank):
                    distance = torch.arange(tile.columns)[None] - torch.arange(tile.rows)[:, None]
                    inside = torch.ones_like(distance, dtype=torch.bool)
                    if tile.band.lo is not None:
                        inside &= distance >= tile.band.lo
                    if tile.band.hi is not None:
                        inside &= distance <= tile.band.hi
                    counts[tile.q, tile.k] += inside
                expected = seen[queries][:, keys] & (torch.tensor(queries) < cut)[:, None]
                assert torch.equal(counts, expected.long())
                area += int(counts.sum())
            areas.append(area)
        assert rank_areas(first, layout, 48, cp_size) == areas
        assert first.area(48) == sum(areas)


def test_a_causal_shard_against_itself_stays_one_kernel_call() -> None:
    for layout in (SplitZigzag(0.25), LAYOUTS["zigzag"], LAYOUTS["striped"]):
        assert len(rank_pair_tiles(FirstRows(Causal(), 48), layout, 64, 4, 1, 1)) == 1


@pytest.mark.parametrize("tail", [0.25, 0.5, 0.75])
def test_saved_rows_and_recomputed_work_follow_the_formulas(tail: float) -> None:
    seq_len, cp_size = 1 << 14, 8
    cut = tail_cut(tail, seq_len, cp_size)
    layout = SplitZigzag(tail)
    assert kept_share(layout, seq_len, cp_size, cut) == tail
    assert recompute_share(Causal(), layout, seq_len, cp_size, cut) == pytest.approx((1 - tail) ** 2, rel=1e-3)
    assert recompute_share(Full(), layout, seq_len, cp_size, cut) == pytest.approx(1 - tail)
    assert recompute_share(SlidingWindow(64), layout, seq_len, cp_size, cut) == pytest.approx(1 - tail, rel=0.05)


def test_the_worst_rank_of_an_uneven_layout_is_reported() -> None:
    seq_len, cp_size, cut = 1 << 14, 4, 3 << 12
    assert kept_share(LAYOUTS["contiguous"], seq_len, cp_size, cut) == 1.0  # the last rank holds all of the tail
    assert kept_share(LAYOUTS["zigzag"], seq_len, cp_size, cut) == 0.5  # two of four ranks do
    assert kept_share(LAYOUTS["striped"], seq_len, cp_size, cut) == 0.25
    contiguous, split = (
        recompute_share(Causal(), layout, seq_len, cp_size, cut)
        for layout in (LAYOUTS["contiguous"], SplitZigzag(0.25))
    )
    assert contiguous == pytest.approx(4 * 5 / 16, rel=1e-3)  # rank 2 attends for the third quarter: 5 of 16 areas
    assert split == pytest.approx(9 / 16, rel=1e-3)


@pytest.mark.parametrize(
    ("mask", "tail", "layout"),
    [
        (Causal(), 0.25, "split_zigzag"),
        (Causal(), 0.5, "split_zigzag"),  # zigzag keeps evenly here, but its last rank attends for most of the head
        (Causal(), 0.0, "zigzag"),
        (Causal(), 1.0, "zigzag"),
        (Full(), 0.5, "zigzag"),  # even as it is
        (Full(), 0.25, "split_zigzag"),
        (SlidingWindow(64), 0.25, "split_zigzag"),
    ],
    ids=str,
)
def test_auto_resolves_to_a_layout_that_is_even_before_and_after_the_cut(mask, tail, layout) -> None:
    seq_len, cp_size = 4096, 4
    chosen = choose_layout(mask, seq_len, cp_size, tail)
    assert chosen.name == layout
    if 0 < tail < 1:
        cut = tail_cut(tail, seq_len, cp_size)
        assert kept_share(chosen, seq_len, cp_size, cut) == pytest.approx(tail, rel=0.05)
        assert imbalance(FirstRows(mask, cut), chosen, seq_len, cp_size) < 1.05


def test_the_settings_decide_whether_the_tail_counts() -> None:
    shape = ModelShape(name="s", layers=1, hidden=8, ffn=8, heads=2, kv_heads=2, head_dim=4, vocab=256)

    def layout(**changes) -> object:
        values = {"task": "train", "method": "burst", "model": shape, "seq_len": 4096, "cp_size": 4}
        return METHOD.layout(TrialSettings(**values | {"checkpoint": Checkpoint(tail=0.25)} | changes))

    assert layout() == layout(layout="split_zigzag") == SplitZigzag(0.25)
    assert layout(task="attention") == LAYOUTS["zigzag"]
    assert layout(checkpoint=Checkpoint(every=0, tail=0.25)) == LAYOUTS["zigzag"]
    assert layout(layout="contiguous") == "contiguous"
    unsupported_reason = METHOD.refuse(TrialSettings(
        task="train", method="burst", model=shape, seq_len=100, cp_size=4, layout="split_zigzag"
    ))  # fmt: skip
    assert "nearest lengths" in (unsupported_reason or "")


def test_a_trial_records_the_saved_and_recomputed_shares_of_its_worst_rank() -> None:
    shape = ModelShape(name="s", layers=1, hidden=8, ffn=8, heads=2, kv_heads=2, head_dim=4, vocab=256)

    def chosen(**changes) -> dict[str, str]:
        values = {"task": "train", "method": "burst", "model": shape, "seq_len": 64, "dtype": "fp32"}
        fn = METHOD.attention(ContextParallel.single(), TrialSettings(**values | changes))
        fn(*(torch.randn(1, 64, 2, 4) for _ in range(3)))
        return fn.resolved()

    quarter = chosen(checkpoint=Checkpoint(tail=0.25))
    assert (quarter["kept_share"], quarter["recompute_share"]) == ("0.2500", f"{48 * 49 / (64 * 65):.4f}")
    whole = chosen()
    assert (whole["kept_share"], whole["recompute_share"]) == ("1.0000", "0.0000")
    for changes in ({"task": "attention"}, {"checkpoint": Checkpoint(every=0)}):
        assert "kept_share" not in chosen(**changes)


def bytes_of_replays(routes: list[tuple[str, str]], tails: tuple[float, ...]) -> list[list[int]]:
    """Bytes this rank sends on each route for one whole forward and for the recomputation from each tail, causal."""
    cps = [ContextParallel(layout=SplitZigzag(tail)) for tail in tails]
    found = []
    for schedule, exchange in routes:
        sent = []
        for tail, cp in zip(tails, cps, strict=True):
            q, k, v = (cp.shard(tensor, 1) for tensor in problem(64, 4, 4)[:3])
            choices = {"cp": cp, "schedule": schedule, "exchange": exchange, "kernel": "reference"}
            cp.traffic.reset()
            out, lse = burst_attention(q, k, v, return_lse=True, **choices)
            if not sent:
                sent.append(cp.traffic.sent_bytes)
            saved = save_suffix(out, lse, cp, tail)
            cp.traffic.reset()
            burst_attention(q, k, v, saved=saved, **choices)
            sent.append(cp.traffic.sent_bytes)
        found.append(sent)
    return found


def test_a_recomputation_sends_the_share_of_the_sequence_that_it_computes() -> None:
    routes, tails = [("ring", "relay"), ("ring", "direct"), ("ulysses", "auto")], (0.0, 0.25, 0.5, 1.0)
    per_rank = run_on_ranks(4, bytes_of_replays, routes, tails)
    for index, (_, exchange) in enumerate(routes):
        whole, *recomputed = (sum(ranks) for ranks in zip(*(routes[index] for routes in per_rank), strict=True))
        assert whole > 0
        if exchange == "direct":  # leaves out what the receiver does not see, which is less of a layout in more runs
            assert [one <= (1 - tail) * whole for one, tail in zip(recomputed, tails, strict=True)] == [True] * 4
            assert recomputed[1] > 0.6 * whole
        else:
            assert recomputed == [(1 - tail) * whole for tail in tails]


def test_the_saved_output_is_a_copy_of_only_the_tails_rows() -> None:
    out, lse = torch.randn(1, 64, 2, 4), torch.randn(1, 2, 64)
    saved = save_suffix(out, lse, ContextParallel.single(), 0.25)
    assert saved is not None
    assert saved.cut == 48
    assert torch.equal(saved.out_BLND, out[:, 48:])
    assert torch.equal(saved.lse_BNL, lse[:, :, 48:])
    assert saved.out_BLND.untyped_storage().nbytes() == out.untyped_storage().nbytes() // 4
    assert saved.lse_BNL.untyped_storage().nbytes() == lse.untyped_storage().nbytes() // 4
    assert save_suffix(out, lse, ContextParallel.single(), 0.0) is None
    whole = save_suffix(out, lse, ContextParallel.single(), 1.0)
    assert whole is not None
    assert whole.out_BLND.data_ptr() == out.data_ptr()  # no copy where everything is kept


@pytest.mark.parametrize(
    ("batch", "rows", "heads", "width"), [(1, 10, 2, 4), (1, 16, 1, 4), (1, 16, 4, 4), (2, 16, 2, 4), (1, 16, 2, 8)]
)
def test_rows_saved_of_other_shards_are_refused(batch, rows, heads, width) -> None:
    q, k, v = (torch.randn(1, 64, 2, 4) for _ in range(3))
    saved = SavedOutput(torch.randn(batch, rows, heads, width), torch.randn(batch, heads, rows), cut=48)
    words = (
        f"saved holds out ({batch}, {rows}, {heads}, {width}) and lse ({batch}, {heads}, {rows}) from position 48 on, "
        "and this call has (1, 16, 2, 4) and (1, 2, 16) there; pass what save_suffix returned for these shards"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        burst_attention(q, k, v, saved=saved)


@pytest.mark.parametrize("tail", [0.25, 1.0])
def test_a_saved_result_of_another_dtype_is_refused(tail) -> None:
    q, cp = torch.randn(1, 64, 2, 4), ContextParallel.single()
    saved = save_suffix(*burst_attention(q, q, q, cp=cp, return_lse=True), cp, tail)
    words = (
        "saved holds out in torch.float32, and this call has q in torch.bfloat16; pass saved to a call in the same "
        "dtype"
    )
    low = q.bfloat16()
    for attend in (burst_attention, torch.compile(burst_attention, backend="eager")):
        with pytest.raises(ValueError, match=re.escape(words)):
            attend(low, low, low, cp=cp, saved=saved)


@pytest.mark.parametrize("tail", [0.25, 1.0])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD", "THD"])
def test_a_saved_result_of_another_mask_or_factor_is_refused(layout, tail) -> None:
    shape = {"BSHD": (1, 64, 2, 4), "BHSD": (1, 2, 64, 4), "THD": (64, 2, 4)}[layout]
    q, cp, named = torch.randn(shape), ContextParallel.single(), {"tensor_layout": layout, "kernel": "reference"}
    given = {"mask": SlidingWindow(9), "scale": 0.5, "softcap": 20.0, "sinks_N": torch.zeros(2)}
    attend = prepare_attention(q, q, cp=cp, return_lse=True, mask=given["mask"], scale=0.5, softcap=20.0, **named)
    results = (
        burst_attention(q, q, q, cp=cp, return_lse=True, **given, **named),
        attend(q, q, q, sinks_N=torch.zeros(2)),
    )
    others = {
        "mask": (Causal(), "causal"),
        "scale": (2.0, "2.0"),
        "softcap": (None, "None"),
        "sinks_N": (None, "False"),
    }
    for out, lse in results:
        saved = save_suffix(out, lse, cp, tail, layout)
        burst_attention(q, q, q, cp=cp, saved=saved, **{**given, "mask": SlidingWindow(9)}, **named)
        for name, (other, found) in others.items():
            field = name.removesuffix("_N")
            words = f"saved is of a call with {field} .*, and this one has {field} {found}; pass saved to a call with"
            with pytest.raises(ValueError, match=words):
                burst_attention(q, q, q, cp=cp, saved=saved, **{**given, name: other}, **named)


def test_a_call_is_remembered_for_as_long_as_its_lse() -> None:
    q, before = torch.randn(1, 8, 2, 4), len(made_by_lse)
    lse = burst_attention(q, q, q, return_lse=True)[1]
    assert len(made_by_lse) == before + 1
    del lse
    assert len(made_by_lse) == before
