"""The simulated schedules: limits that hold by construction, and bytes as the engine's plans count them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.comm_plan import comm_plan
from engine.attention.comm_volume import GradientWidths, RingVolume, Shards
from engine.attention.geometry.layout import Ring, layout_named
from engine.attention.masks import parse_mask
from engine.attention.problem import Problem
from engine.attention.resolve import Choices, HardwareModel, resolve
from harness.metrics.hardware import HardwareSpeeds
from harness.metrics.throughput import GIB, TERA
from harness.predict.attention import LayerAttention, Pass, attention_passes

FAST = HardwareSpeeds(
    gemm_tflops=200, attention_forward_tflops=200, attention_backward_tflops=180, memory_gib=1e6, inside_gib=1e9,
    across_gib=1e9, across_default_gib=1e9, ring_step_seconds=1e-12,
)  # fmt: skip
SCHEDULES = ("ring", "double_ring", "all_gather", "ulysses", "usp", "usp_transposed")


def problem(cp_size: int = 8, node_size: int = 4, seq_len: int = 1 << 14, **changes: object) -> Problem:
    base = Problem(
        mask=parse_mask("causal"), layout=layout_named("zigzag"), seq_len=seq_len, batch=1, heads=16, kv_heads=16,
        head_dim=64, input_bytes=2, cp_size=cp_size, node_size=node_size,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def attention(one: Problem, schedule: str, side: str = "query") -> LayerAttention:
    side = "key_value" if schedule == "all_gather" else side
    choices = Choices(schedule=schedule, backward=side, grad_comm_dtype="input", num_head_chunks=1)
    return LayerAttention(resolved=resolve(one, HardwareModel(), choices))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_links_of_no_cost_every_schedule_takes_the_kernels_time(schedule: str) -> None:
    one = problem(seq_len=1 << 18)  # of chunks on which kernels have their full speed
    forward, backward = attention_passes(attention(one, schedule), FAST)
    flops = one.pair_flops * one.mask.area(one.seq_len) / one.cp_size
    assert forward.seconds == pytest.approx(flops / (200 * TERA), rel=0.01)
    assert backward.seconds == pytest.approx(2.5 * flops / (180 * TERA), rel=0.01)


@pytest.mark.parametrize(
    ("mask", "half_as_fast"), [("causal", 900), ("sliding_window:450", 1 << 20), ("documents:900,...", 900 * 512)]
)
def test_where_tokens_see_few_others_a_kernel_is_slower_by_the_tokens_of_a_causal_tile_that_sees_as_many(
    mask: str, half_as_fast: int
) -> None:
    """Half the speed of an endless tile with 900 tokens, which is 0.527 of that with 16K, where speeds are measured."""
    one = problem(cp_size=1, node_size=1, seq_len=half_as_fast, mask=parse_mask(mask))
    forward, _ = attention_passes(attention(one, "ring"), FAST)
    flops = one.pair_flops * one.mask.area(one.seq_len)
    assert forward.seconds == pytest.approx(flops / (0.5 * (1 + 900 / 16384) * 200 * TERA), rel=2e-3)


@pytest.mark.parametrize(
    ("schedule", "side", "expected"),
    [("ring", "query", (7, 1)), ("ring", "key_value", (7, 22)), ("ulysses", "query", (0, 1)), ("usp", "query", (1, 1))],
)
def test_expanding_what_others_sent_of_a_latent_takes_the_time_of_its_products(schedule, side, expected) -> None:
    """Once for one's own tokens is among the layer's products, and so are the two products of its gradients."""
    one = problem(value_dim=32)
    latent = dataclasses.replace(one, latent_dim=128, shared_key_dim=16)
    once = 2 * 16 * (64 - 16 + 32) * 128 * one.seq_len / 8 / (200 * TERA)
    for times, plain, found in zip(
        expected, *(attention_passes(attention(each, schedule, side), FAST) for each in (one, latent)), strict=True
    ):
        assert found.kernels - plain.kernels == pytest.approx(times * once)


@pytest.mark.parametrize("side", ["query", "key_value"])
def test_with_a_slow_link_between_nodes_a_double_ring_takes_the_time_of_the_bytes_that_cross(side: str) -> None:
    one, slow = problem(), dataclasses.replace(FAST, across_gib=1e-4)
    widths = GradientWidths(unreduced=2, summed=2)
    shards = Shards(
        batch=1, tokens=one.seq_len // 8, heads=16, kv_heads=16, head_dim=64, input_bytes=2, intra_node=widths,
        inter_node=widths,
    )  # fmt: skip
    ring = Ring(cp_size=8, node_size=4)
    volume = RingVolume(ring=ring, node_size=4, exchange="direct")
    passes = attention_passes(attention(one, "double_ring", side), slow)
    for backward, found in zip((False, True), passes, strict=True):
        queries = backward and side == "query"
        most = 0
        for rank in (0, 4, 7):
            work = comm_plan(one.mask, one.layout, ring, one.seq_len, rank, queries)
            sent = volume.chunks(work, rank, shards.tokens, shards.sent_side(queries) if backward else shards.key_side)
            if backward:
                sent += volume.gradients(work, rank, shards, queries)
            most = max(most, sent.far)
        assert found.seconds == pytest.approx(most / (1e-4 * GIB), rel=0.02)
        assert found.across > 0.98 * found.seconds


def test_two_links_that_are_as_slow_name_the_one_that_is_waited_for() -> None:
    slow = dataclasses.replace(FAST, inside_gib=1e-3)
    forward, _ = attention_passes(attention(problem(node_size=8), "ring"), slow)
    assert forward.inside > 0.9 * forward.seconds
    assert forward.across == 0


def test_a_flat_ring_over_nodes_waits_for_the_link_between_them_at_every_step() -> None:
    slow = dataclasses.replace(FAST, across_gib=1e-3, across_default_gib=1e-3)
    flat, double = (attention_passes(attention(problem(), name), slow)[0] for name in ("ring", "double_ring"))
    assert flat.seconds > 4 * double.seconds
    assert flat.inside == 0


def test_a_window_over_contiguous_shards_computes_and_sends_little() -> None:
    local = problem(mask=parse_mask("sliding_window:512"), layout=layout_named("contiguous"))
    whole, windowed = (attention_passes(attention(each, "ring"), FAST)[0] for each in (problem(), local))
    assert windowed.seconds < 0.3 * whole.seconds


def test_defaults_of_nccl_are_slower_where_the_machine_says_so() -> None:
    speeds = dataclasses.replace(FAST, across_gib=0.01, across_default_gib=0.005)
    tuned, default = (
        attention_passes(dataclasses.replace(attention(problem(), "double_ring"), tuned_links=each), speeds)[0]
        for each in (True, False)
    )
    assert default.seconds == pytest.approx(2 * tuned.seconds, rel=0.05)


@given(
    schedule=st.sampled_from(SCHEDULES),
    side=st.sampled_from(["query", "key_value"]),
    inside=st.floats(0.01, 100),
    across=st.floats(0.001, 10),
    step=st.floats(1e-6, 1e-2),
)
@settings(max_examples=60, deadline=None)
def test_nothing_is_ever_faster_on_a_slower_machine(schedule, side, inside, across, step):
    speeds = dataclasses.replace(FAST, inside_gib=inside, across_gib=min(inside, across), ring_step_seconds=step)
    found = attention(problem(), schedule, side)
    before = attention_passes(found, speeds)
    for name, factor in (
        ("inside_gib", 0.5), ("across_gib", 0.5), ("ring_step_seconds", 2.0), ("attention_forward_tflops", 0.5),
        ("attention_backward_tflops", 0.5),
    ):  # fmt: skip
        slower = dataclasses.replace(speeds, **{name: getattr(speeds, name) * factor})
        after = attention_passes(found, slower)
        for one, other in zip(before, after, strict=True):
            assert other.seconds >= one.seconds * (1 - 1e-9), name
    for each in before:
        assert each.seconds == pytest.approx(each.kernels + each.inside + each.across + each.steps)
        assert min(each.kernels, each.inside, each.across, each.steps) >= 0


def test_heads_in_chunks_are_as_many_bytes_of_which_one_chunk_is_waited_for() -> None:
    def in_chunks(schedule: str, chunks: int) -> tuple[Pass, Pass]:
        whole = attention(problem(), schedule)
        cut = dataclasses.replace(whole.resolved, num_head_chunks=chunks)
        return attention_passes(dataclasses.replace(whole, resolved=cut), slow)

    slow = dataclasses.replace(FAST, inside_gib=1e-3, across_gib=1e-3)
    for once, twice in zip(in_chunks("ulysses", 1), in_chunks("ulysses", 2), strict=True):
        assert (twice.inside, twice.across) == (pytest.approx(once.inside / 2), pytest.approx(once.across / 2))
    slow = dataclasses.replace(FAST, across_gib=1e-3)  # of usp, only the ring sends between nodes
    for once, twice in zip(in_chunks("usp", 1), in_chunks("usp", 2), strict=True):
        assert twice.across == pytest.approx(once.across)
