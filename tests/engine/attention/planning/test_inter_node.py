"""What must cross between nodes is never more than what the engine's plans, its methods and baselines send."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import pytest
import torch

from engine import ContextParallel
from engine.attention.comm_volume import SentBytes, least_inter_node_bytes
from engine.attention.geometry.layout import Layout, SplitZigzag, layout_named
from engine.attention.masks import Causal, Documents, Full, Mask, SlidingWindow, parse_mask
from engine.attention.problem import GRAD_COMM_DTYPES, RING_SCHEDULES, ULYSSES_SCHEDULES, Problem
from tests.engine.attention.planning.test_comm_volume import MASKS, TOKENS, WritesInputs, choices
from tests.plans import plan_attention
from tests.ranks import run_on_ranks
from tests.slow import combinations

SCHEDULES = RING_SCHEDULES + ULYSSES_SCHEDULES
HEADS = ((8, 8), (16, 8), (12, 4), (6, 3))  # the last divide by no number of ranks


def problem(
    mask: Mask,
    layout: Layout,
    cp_size: int,
    node_size: int,
    heads: tuple[int, int] = (8, 8),
    tokens: int = TOKENS,
    input_bytes: int = 2,
    **changes: int,
) -> Problem:
    """Shards of `tokens` tokens, with heads of 3 and batches of 2 as in the plans below."""
    return Problem(
        cp_size=cp_size, node_size=node_size, heads=heads[0], kv_heads=heads[1], mask=mask, layout=layout,
        seq_len=tokens * cp_size, batch=changes.get("batch", 2), head_dim=changes.get("head_dim", 3),
        input_bytes=input_bytes,
    )  # fmt: skip


def planned(node_size: int, layout: str) -> list[tuple[str, dict[str, Any], SentBytes]]:
    """(case, choices, bytes sent in forward and backward) of this rank's plan of every mask, heads and schedule."""
    cp, kernel, chance, found = (
        ContextParallel(layout=layout, node_size=node_size),
        WritesInputs(),
        random.Random(1),
        [],
    )
    for (heads, kv_heads), mask, choice in itertools.product(HEADS, MASKS, choices(SCHEDULES, layout)):
        members = {"ulysses": cp.size, "usp": node_size, "usp_transposed": cp.size // node_size}
        shared_by = members.get(choice["schedule"], 1)
        chunked, comm_dtype, gathered = chance.choice((1, 2)), chance.choice(GRAD_COMM_DTYPES), chance.random() < 0.5
        if kv_heads % shared_by:
            continue
        exchanges_heads = choice["schedule"] in ULYSSES_SCHEDULES
        chunks = chunked if exchanges_heads and kv_heads // shared_by % chunked == 0 else 1
        q, k = (torch.empty(2, TOKENS, n, 3, dtype=torch.bfloat16) for n in (heads, kv_heads))
        with mock.patch("engine.attention.plan.choose_kernel", return_value=kernel):
            plan = plan_attention(q, k, mask=mask, cp=cp, grad_comm_dtype=comm_dtype, num_head_chunks=chunks, **choice)
        sent = plan.choice.sent(plan.cp.rank, gathered=gathered)
        # Where nothing is left open that costs bytes, the plan sends what is counted as the least.
        least = comm_dtype != "fp32" and gathered and chunks == 1
        case = {"heads": (heads, kv_heads), "mask": mask, "least": least} | choice
        found.append((str(case), case, sent.forward + sent.backward))
    return found


@combinations({"world_size, node_size": [(4, 2), (2, 1), (4, 1)], "layout": ["contiguous", "zigzag", "striped"]})
def test_no_plan_of_the_engine_sends_less_between_nodes_than_is_needed(world_size, node_size, layout) -> None:
    ranks = run_on_ranks(world_size, planned, node_size, layout)
    tight: dict[str, int] = {}
    for same in zip(*ranks, strict=True):
        assert len({name for name, _, _ in same}) == 1
        case = same[0][1]
        far = [sent.far for _, _, sent in same]
        node = max(sum(far[first : first + node_size]) for first in range(0, world_size, node_size))
        least = least_inter_node_bytes(
            problem(case["mask"], layout_named(layout), world_size, node_size, case["heads"])
        )
        schedule = case["schedule"]
        assert min(each.total for each in least.values()) <= least[schedule].total <= node, case
        tight[schedule] = tight.get(schedule, 0) + (case["least"] and least[schedule].total == node)
    assert set(tight) == {name for name in SCHEDULES if layout != "striped" or name in RING_SCHEDULES}
    assert all(tight.values())  # and each schedule somewhere sends just that


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_window_over_contiguous_shards_needs_far_less_than_a_causal_mask(layout) -> None:
    window, causal = (
        min(each.total for each in least_inter_node_bytes(case).values())
        for case in (
            problem(mask, layout_named(layout), 8, 4, tokens=1 << 12) for mask in (SlidingWindow(64), Causal())
        )
    )
    assert 0 < window < causal / 20


def test_documents_that_end_with_a_node_need_no_byte_of_another_on_a_ring_and_all_heads_of_an_all_to_all() -> None:
    least = least_inter_node_bytes(problem(Documents((2 * TOKENS,), repeat=True), layout_named("contiguous"), 4, 2))
    assert least["double_ring"].total == 0
    assert least["ulysses"].total > 0
    assert next(iter(least)) in ("ring", "double_ring", "usp")  # fewest bytes first


def test_the_bytes_are_those_of_the_formulas() -> None:
    """Two nodes of two ranks under a full mask, 32 heads of 128 in bf16; Q of a rank is 1/8 GiB."""
    shape = {"tokens": 1 << 14, "batch": 1, "head_dim": 128}
    q, nodes, per_node = (1 << 14) * 32 * 128 * 2, 2, 2
    rows = (1 << 14) * 32 * 4  # LSE, and delta, of a rank

    equal = least_inter_node_bytes(problem(Full(), layout_named("zigzag"), 4, 2, (32, 32), **shape))
    assert equal["double_ring"].forward == (nodes - 1) * 2 * q * per_node
    assert equal["double_ring"].backward == (nodes - 1) * (3 * q + 2 * rows) * per_node
    assert equal["usp_transposed"].forward == (4 * q + rows) // 2 * per_node
    assert equal["usp_transposed"].backward == (4 * q + rows) // 2 * per_node
    grouped = least_inter_node_bytes(problem(Full(), layout_named("zigzag"), 4, 2, (32, 8), **shape))
    assert grouped["double_ring"].forward == (nodes - 1) * 2 * q // 4 * per_node
    assert grouped["double_ring"].backward == (nodes - 1) * 4 * q // 4 * per_node
    assert next(iter(grouped)) in ("double_ring", "usp")
    assert next(iter(equal)) in ("ulysses", "usp_transposed")


def test_heads_that_do_not_divide_leave_the_rings() -> None:
    assert set(least_inter_node_bytes(problem(Causal(), layout_named("zigzag"), 8, 2, (6, 3)))) == set(RING_SCHEDULES)


def test_of_many_ranks_three_nodes_are_counted_and_need_no_more_than_all() -> None:
    case = problem(parse_mask("sliding_window:64"), layout_named("contiguous"), 40, 2, tokens=64)
    sampled = least_inter_node_bytes(case)
    with mock.patch("engine.attention.comm_volume.ALL_COUNTED", 40):
        whole = least_inter_node_bytes.__wrapped__(case)
    assert sampled.keys() == whole.keys()
    assert all(0 < sampled[name].total <= whole[name].total for name in whole)


def test_the_layout_of_selective_checkpointing_counts_too() -> None:
    assert least_inter_node_bytes(problem(Causal(), SplitZigzag(0.5), 4, 2, tokens=64))["double_ring"].total > 0
