"""The link between nodes is measured alike on all ranks, and a plan asks for it where it decides something, once."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel
from engine.attention.comm.link_speed import REPEATS, across_gib_per_second
from engine.attention.masks import Causal
from engine.attention.op import AttentionPlan
from tests.plans import plan_attention
from tests.ranks import run_on_ranks


def measured(spread: bool) -> float:
    message = torch.ones(1, 65, 5, dtype=torch.bfloat16, requires_grad=True)
    return across_gib_per_second(dist.group.WORLD, 2, message, spread=spread)


@pytest.mark.parametrize("spread", [False, True])
def test_every_rank_finds_the_same_speed(spread) -> None:
    hardware = run_on_ranks(4, measured, spread)
    assert hardware[0] > 0
    assert set(hardware) == {hardware[0]}


def sent_to_whom() -> list[tuple[int, int]]:
    """Receiver and bytes of every message of one measurement to all peers, but for the one that opens connections."""
    seen, operation = [], dist.P2POp

    def noted(kind, tensor, peer, group):
        if kind is dist.isend:
            seen.append((peer, tensor.nbytes))
        return operation(kind, tensor, peer, group)

    with mock.patch("torch.distributed.P2POp", noted):
        measured(spread=True)
    return seen[len(seen) // (REPEATS + 1) :]


def test_spread_every_rank_sends_an_equal_part_to_each_rank_of_other_nodes() -> None:
    found = run_on_ranks(6, sent_to_whom)
    for rank, sent in enumerate(found):
        others = [peer for peer in range(6) if peer // 2 != rank // 2]
        assert sent == [(peer, 2 * (65 * 5 // 4)) for peer in others] * REPEATS


def kept_by_context() -> tuple[list[float | None], int]:
    nodes, node = ContextParallel(node_size=2), ContextParallel(node_size=4)
    found = [nodes.comms.across_gib(torch.device("cpu")) for _ in range(2)]
    return [*found, node.comms.measure_link(torch.empty(64))], nodes.traffic.sent_bytes


def test_a_context_measures_once_and_counts_no_bytes_of_it() -> None:
    found = run_on_ranks(4, kept_by_context)
    (first, second, one_node), sent_bytes = found[0]
    assert first == second > 0
    assert one_node is None
    assert sent_bytes == 0
    assert found == 4 * [found[0]]


class OnGpu(torch.Tensor):
    """Calls itself a GPU's, for the choices that are made on GPUs alone."""

    is_cuda = True


def asked() -> dict[str, tuple[int, str | None, str]]:
    """For some plans: how often the link had been measured after each, the link it records, and its schedule."""
    seen: dict[str, tuple[int, str | None, str]] = {}

    def plans(label: str, link: float, node_size: int, *cases: tuple[str, dict[str, object]]) -> None:
        cp = ContextParallel(node_size=node_size)
        q, k = (torch.empty(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, 64 << 10, heads, 128) for heads in (32, 8))
        with mock.patch("engine.attention.comm.communicators.across_gib_per_second", return_value=link) as measure:
            for case, changes in cases:
                tensor_type = torch.Tensor if changes.pop("on_cpu", False) else OnGpu
                plan: AttentionPlan = plan_attention(
                    q.as_subclass(tensor_type), k, mask=Causal(), cp=cp, kernel="reference", **changes
                )
                chosen = plan.resolved()
                seen[f"{label} {case}"] = (measure.call_count, chosen.get("link"), chosen["schedule"])

    plans(
        "slow",
        2.0,
        2,
        ("cpu", {"on_cpu": True}),
        ("cpu heads", {"on_cpu": True, "schedule": "usp_transposed"}),
        ("ring", {"schedule": "double_ring"}),
        ("fixed parts", {"schedule": "usp_transposed", "num_head_chunks": 1}),
        ("ring's switch", {"backward": "query"}),
        ("deterministic", {"deterministic": True}),
        ("deterministic open parts", {"deterministic": True, "schedule": "usp_transposed"}),
        ("auto", {}),
        ("auto again", {"recompute": True}),
        ("open parts", {"schedule": "usp_transposed"}),
        ("ring afterwards", {"schedule": "double_ring"}),
        ("deterministic afterwards", {"deterministic": True}),
    )
    plans("fast", 1e5, 2, ("deterministic", {"deterministic": True}), ("auto", {}))
    plans("node", 2.0, 4, ("auto", {}))
    return seen


def test_a_plan_measures_the_link_once_and_only_where_it_decides_the_schedule() -> None:
    seen = run_on_ranks(4, asked)
    slow, fast = "2.00 GiB/s between nodes", "100000.00 GiB/s between nodes"
    assumed = "2.90 GiB/s between nodes, assumed: deterministic"
    assert seen[0] == {
        "slow cpu": (0, None, "double_ring"),
        "slow cpu heads": (0, None, "usp_transposed"),
        "slow ring": (0, None, "double_ring"),
        "slow fixed parts": (0, None, "usp_transposed"),
        "slow ring's switch": (0, None, "double_ring"),
        "slow deterministic": (0, assumed, "usp"),
        "slow deterministic open parts": (0, assumed, "usp_transposed"),
        "slow auto": (1, slow, "usp"),
        "slow auto again": (1, slow, "usp"),
        "slow open parts": (1, slow, "usp_transposed"),
        "slow ring afterwards": (1, None, "double_ring"),
        "slow deterministic afterwards": (1, assumed, "usp"),
        "fast deterministic": (0, assumed, "usp"),
        "fast auto": (1, fast, "double_ring"),
        "node auto": (0, None, "ring"),
    }
    assert seen == 4 * [seen[0]]
