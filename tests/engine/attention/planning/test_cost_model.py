"""The cost model weighs bytes, compute and launches the way they are: pure arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from engine import ContextParallel, burst_attention
from engine.attention.comm_plan import RingTraffic, ring_traffic
from engine.attention.comm_volume import GradientWidths, RingVolume, Shards
from engine.attention.cost import (
    Estimate,
    HardwareModel,
    Workload,
    choose_num_head_chunks,
    choose_schedule,
    estimate,
    ring_backward,
)
from engine.attention.geometry.layout import Ring, layout_named
from engine.attention.masks import BlockSparse, Causal, Documents, Full, SlidingWindow, Strided
from engine.attention.problem import Problem, schedule_unsupported_reason
from engine.attention.resolve import cheaper_backward
from tests.plans import plan_attention
from tests.ranks import run_on_ranks


def share(tokens: int, *, cp_size: int = 4, node_size: int = 4, heads: int = 32, kv_heads: int = 32) -> Workload:
    """Causal bf16 attention of `tokens` tokens with heads of 128."""
    return Workload(
        cp_size=cp_size,
        node_size=node_size,
        heads=heads,
        kv_heads=kv_heads,
        query_bytes=tokens // cp_size * heads * 128 * 2,
        output_bytes=tokens // cp_size * heads * 128 * 2,
        key_side_bytes=2 * (tokens // cp_size) * kv_heads * 128 * 2,
        gradient_factor=2.0,
        forward_flops=2.0 * tokens**2 * heads * 128 / cp_size,
        backward_flops=5.0 * tokens**2 * heads * 128 / cp_size,
        rows=tokens // cp_size,
    )


def test_two_gpus_take_the_ring_and_more_trade_heads_while_shards_are_short() -> None:
    for tokens in (16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10):
        assert choose_schedule(share(tokens, cp_size=2, node_size=2), "zigzag").best == "ring"
    for cp_size in (4, 8):
        for tokens in (16 << 10, 32 << 10):
            problem = share(tokens, cp_size=cp_size, node_size=cp_size)
            assert choose_schedule(problem, "zigzag").best == "ulysses"
    assert choose_schedule(share(32 << 10, kv_heads=2), "zigzag").best == "ring"  # heads that four ranks cannot divide


def test_what_a_ring_step_adds_is_a_smaller_share_of_longer_shards() -> None:
    def added(tokens: int) -> float:
        problem = share(tokens)
        ring = estimate("ring", problem, HardwareModel(merge_seconds=0.0, ring_step_seconds=0.0))
        return ring / estimate("ring", problem, HardwareModel(merge_seconds=0.0, ring_step_seconds=0.0, step_tail=0.0))

    shares = [added(tokens << 10) - 1 for tokens in (16, 32, 64, 128)]
    assert shares[0] > 0.01
    assert shares == sorted(shares, reverse=True)
    for short, twice in itertools.pairwise(shares):  # a tile's time grows with the length, the work with its square
        assert twice < 0.6 * short


def test_the_host_is_the_bound_of_short_calls_whatever_the_links() -> None:
    for schedule in ("ring", "ulysses"):
        usual, faster = (estimate(schedule, share(8 << 10), HardwareModel(inside_gib=gib)) for gib in (346.0, 1e6))
        assert faster == pytest.approx(usual, rel=0.03)
        assert faster >= min(4 * HardwareModel().ring_step_seconds, HardwareModel().head_call_seconds)


def test_longer_shards_are_cut_into_more_head_chunks_and_few_tiles_into_fewer() -> None:
    parts = [choose_num_head_chunks("ulysses", share(tokens << 10)) for tokens in (8, 32, 64, 256)]
    assert parts == [1, 1, 1, 2]


def test_each_further_head_chunk_adds_the_end_of_a_kernel() -> None:
    def added(problem: Workload, schedule: str, chunks: int) -> float:
        """Seconds that a tail of half a tile adds, where nothing else counts."""
        fast = {"inside_gib": 1e9, "spanning_gib": 1e9, "across_gib": 1e9, "memory_gib": 1e9, "together_share": 0.0}
        with_tail, without = (
            estimate(
                schedule,
                problem,
                HardwareModel(step_tail=tail, forward_tflops=600, backward_tflops=600, **fast),
                chunks,
            )
            for tail in (0.5, 0.0)
        )
        return with_tail - without

    for tokens, chunks in itertools.product((256 << 10, 512 << 10), (1, 2, 4)):
        problem = share(tokens)
        compute = 3.5 * problem.forward_flops / 600e12
        tiles = problem.rows * problem.heads / 128  # of a call; each of the 132 multiprocessors works on one at a time
        one = compute * 132 / tiles
        assert added(problem, "ulysses", chunks) == pytest.approx((chunks - 1) * 0.5 * one, abs=1e-9)
    # The kernels of a ring inside the exchange have tiles as many times shorter as there are steps. It counts the ends
    # of all but one of them by itself, in each chunk.
    for schedule, problem in (
        ("usp", share(256 << 10, cp_size=16, node_size=8)),
        ("usp_transposed", share(256 << 10, cp_size=8, node_size=4)),
    ):
        steps = problem.nodes if schedule == "usp" else problem.node_size
        tile = 3.5 * problem.forward_flops / 600e12 * 132 / (problem.rows * problem.heads / 128) / steps
        kernels = 2 * steps
        assert added(problem, schedule, 2) == pytest.approx((kernels - 1) * 0.5 * tile, rel=0.02)


def test_the_schedules_of_one_node_cost_the_same_where_only_compute_counts() -> None:
    (_, best), (_, other) = choose_schedule(share(1 << 20), "zigzag").seconds
    assert best <= other < 1.1 * best


def test_between_nodes_the_slow_link_decides() -> None:
    two_nodes = choose_schedule(share(64 << 10, node_size=2), "zigzag")
    seconds = dict(two_nodes.seconds)
    assert set(seconds) == {"ring", "double_ring", "ulysses", "usp", "usp_transposed"}
    assert seconds["ring"] > 2 * seconds["double_ring"]
    # Few KV heads make a ring's shards small; an exchange moves Q and O all the same.
    grouped = dict(choose_schedule(share(64 << 10, node_size=2, kv_heads=4), "zigzag").seconds)
    assert min(grouped["double_ring"], grouped["usp"]) < grouped["ulysses"]


def test_a_faster_link_never_makes_a_schedule_slower() -> None:
    for name in ("ring", "double_ring", "ulysses", "usp", "usp_transposed"):
        slow, fast = (
            estimate(name, share(64 << 10, node_size=2), HardwareModel(across_gib=across)) for across in (3.0, 30.0)
        )
        assert fast <= slow


def test_the_given_link_speed_decides() -> None:
    def found(kv_heads: int, across: float) -> Estimate:
        problem = share(256 << 10, node_size=2, kv_heads=kv_heads)
        return choose_schedule(problem, "zigzag", HardwareModel(across_gib=across))

    for slow in (1.0, 2.0):
        assert found(8, slow).best == "usp"  # few KV heads: shards around a ring between nodes
        assert found(32, slow).best in ("ulysses", "usp_transposed")
    # Where bytes cost nothing only merges and launches tell schedules of long shards apart.
    for kv_heads in (8, 32):
        (_, least), *_, (_, most) = found(kv_heads, 1e5).seconds
        assert most < 1.02 * least


def test_bytes_inside_a_node_are_slow_in_an_all_to_all_that_spans_nodes() -> None:
    problem = share(64 << 10, node_size=2)
    for name, slower in (("ulysses", True), ("usp_transposed", False), ("usp", False)):
        as_measured, as_if_apart = (estimate(name, problem, HardwareModel(spanning_gib=gib)) for gib in (46.0, 315.0))
        assert (as_measured > as_if_apart) == slower
    assert estimate("ulysses", share(64 << 10), HardwareModel(spanning_gib=1.0)) == estimate(
        "ulysses", share(64 << 10), HardwareModel()
    )


def test_a_short_window_leaves_a_ring_little_to_send_and_an_exchange_of_heads_everything() -> None:
    tokens, window = 64 << 10, 4095
    left = ring_traffic(SlidingWindow(window), layout_named("contiguous"), Ring(cp_size=4, node_size=4), tokens)
    assert left.steps == 2 / 4
    assert left.near == pytest.approx(window / (3 * tokens / 4))
    work = 4.0 * 32 * 128 * (window + 1) * tokens / 4
    windowed = replace(share(tokens), forward_flops=work, left=left)
    assert choose_schedule(windowed, "contiguous").best == "ring"
    across = ring_traffic(SlidingWindow(window), layout_named("contiguous"), Ring(cp_size=4, node_size=2), tokens)
    assert across.far == pytest.approx(window / (tokens / 4))


def test_a_full_mask_leaves_a_ring_everything() -> None:
    left = ring_traffic(Full(), layout_named("zigzag"), Ring(cp_size=4, node_size=2), 4096)
    assert left == RingTraffic(1.0, 1.0, 1.0)


def test_documents_count_as_few_launches_and_scattered_blocks_as_many() -> None:
    tokens, ring = 64 << 10, Ring(cp_size=4, node_size=4)
    documents = ring_traffic(Documents((64,) * 1024), layout_named("striped"), ring, tokens)
    assert documents.calls <= 2
    assert documents.whole_calls == 1
    blocks = ring_traffic(BlockSparse(Strided(8), 256, causal=True), layout_named("contiguous"), ring, tokens)
    assert min(blocks.calls, blocks.whole_calls) > 10
    short = share(tokens)
    idle = replace(short, forward_flops=1.0, left=blocks)
    launches = (blocks.calls - 1) * HardwareModel().call_seconds
    assert estimate("ring", idle, HardwareModel()) > 4 * blocks.steps * launches
    assert estimate("ulysses", idle, HardwareModel()) > (blocks.whole_calls - 1) * HardwareModel().call_seconds
    alone = replace(idle, cp_size=1, node_size=1)
    assert estimate("ring", alone, HardwareModel()) >= (blocks.whole_calls - 1) * HardwareModel().call_seconds


def test_heads_that_cannot_be_shared_out_leave_only_rings() -> None:
    few = share(8 << 10, heads=6, kv_heads=3)
    assert [name for name, _ in choose_schedule(few, "zigzag").seconds] == ["ring"]
    assert "query heads among 4 ranks and 6 do not divide" in (
        schedule_unsupported_reason("ulysses", few, "zigzag") or ""
    )


def test_striped_shards_do_not_run_an_all_to_all() -> None:
    assert [name for name, _ in choose_schedule(share(8 << 10), "striped").seconds] == ["ring"]
    assert "choose zigzag or contiguous" in (schedule_unsupported_reason("usp", share(8 << 10), "striped") or "")
    # Also where the all-to-all has a single rank: the steps after it need runs of consecutive tokens all the same.
    assert "choose zigzag" in (schedule_unsupported_reason("usp", share(8 << 10, node_size=1), "striped") or "")


def test_a_single_rank_has_nothing_to_choose() -> None:
    assert choose_schedule(share(8 << 10, cp_size=1, node_size=1), "zigzag").best == "ring"


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    q = torch.zeros(1, 8, 4, 16)
    with pytest.raises(ValueError, match="schedule 'spiral' is unknown; choose one of auto, ring, double_ring"):
        burst_attention(q, q, q, schedule="spiral")


def test_without_a_gpu_auto_is_a_ring_and_claims_no_estimate() -> None:
    q = torch.zeros(1, 8, 4, 16)
    chosen = plan_attention(q, q, mask=Causal(), cp=ContextParallel()).resolved()
    assert chosen["schedule"] == "ring"
    assert "estimate" not in chosen


def test_an_estimate_reads_as_milliseconds_by_schedule() -> None:
    words = str(choose_schedule(share(32 << 10), "zigzag"))
    assert words.startswith("ulysses ")
    assert " ms, ring " in words


def test_the_backward_side_of_the_estimate_is_the_one_that_the_plan_takes_by_its_bytes() -> None:
    seen = set()
    for cp_size, kv_heads, name, mask in itertools.product(
        (2, 4, 8), (1, 4, 8, 16, 24, 32), ("zigzag", "contiguous", "striped"), (Causal(), Full(), SlidingWindow(255))
    ):
        layout, sizes = layout_named(name), {"batch": 1, "heads": 32, "kv_heads": kv_heads, "head_dim": 128}
        workload = Workload.of(
            Problem(mask=mask, layout=layout, cp_size=cp_size, node_size=cp_size, seq_len=4096, input_bytes=2, **sizes)
        )
        as_written = GradientWidths(unreduced=2, summed=4)  # as kernels for GPUs write bf16
        shards = Shards(tokens=4096 // cp_size, input_bytes=2, intra_node=as_written, inter_node=as_written, **sizes)
        volume = RingVolume(ring=Ring(cp_size=cp_size, node_size=cp_size), node_size=cp_size, exchange="copy_engine")
        planned = cheaper_backward(mask, layout, volume, 4096, shards, HardwareModel())
        assert ring_backward(workload, 1.0).side == planned, (cp_size, kv_heads, name, mask)
        seen.add(planned)
    assert seen == {"query", "key_value"}


def choice_on_a_rank(mask_first: int, layout: str) -> str:
    """The estimate of a whole, long problem, from this rank's own context."""
    cp = ContextParallel(layout=layout, node_size=2)
    workload = Workload.of(
        Problem(
            mask=SlidingWindow(mask_first), layout=cp.layout, cp_size=cp.size, node_size=cp.node_size,
            seq_len=64 << 10, batch=1, heads=32, kv_heads=8, head_dim=128, input_bytes=2,
        )
    )  # fmt: skip
    found = choose_schedule(workload, cp.layout.name)
    return f"{cp.rank != 0} {found.seconds} {[choose_num_head_chunks(name, workload) for name, _ in found.seconds]}"


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_every_rank_estimates_and_chooses_the_same(layout: str) -> None:
    # A window gives the first and the last rank of a contiguous layout other work than the rest.
    said = run_on_ranks(4, choice_on_a_rank, 4095, layout)
    assert len({each.partition(" ")[2] for each in said}) == 1
    assert {each.partition(" ")[0] for each in said} == {"True", "False"}  # ranks of their own


def test_given_head_chunks_count_in_the_choice_of_a_schedule() -> None:
    problem = share(64 << 10)
    for chunks in (1, 2, 8):
        given = dict(choose_schedule(problem, "zigzag", num_head_chunks=chunks).seconds)
        assert given["ulysses"] == estimate("ulysses", problem, HardwareModel(), chunks)
        assert given["ring"] == estimate("ring", problem, HardwareModel())
