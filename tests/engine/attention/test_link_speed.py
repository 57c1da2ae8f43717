"""The link between nodes is measured alike on all ranks, and a plan asks for it where it decides something, once."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from engine import ContextParallel
from engine.attention.comm.link_speed import across_gib_per_second
from engine.attention.masks import Causal
from engine.attention.op import AttentionPlan, plan_attention
from tests.ranks import run_on_ranks


def measured() -> float:
    return across_gib_per_second(dist.group.WORLD, 2, torch.ones(1, 64, 4, dtype=torch.bfloat16, requires_grad=True))


def test_every_rank_finds_the_same_speed() -> None:
    speeds = run_on_ranks(4, measured)
    assert speeds[0] > 0
    assert set(speeds) == {speeds[0]}


def kept_by_context() -> tuple[list[float | None], int]:
    nodes, node = ContextParallel(node_size=2), ContextParallel(node_size=4)
    found = [nodes.link(torch.device("cpu")) for _ in range(2)]
    speeds = [link.gib for link in found if link is not None and link.measured]
    return [*speeds, node.link(torch.device("cpu"))], nodes.traffic.sent_bytes


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
        with mock.patch("engine.attention.context.across_gib_per_second", return_value=link) as measure:
            for case, changes in cases:
                tensor_type = torch.Tensor if changes.pop("on_cpu", False) else OnGpu
                plan: AttentionPlan = plan_attention(
                    q.as_subclass(tensor_type), k, mask=Causal(), cp=cp, kernel="reference", **changes
                )
                chosen = plan.chosen()
                seen[f"{label} {case}"] = (measure.call_count, chosen.get("link"), chosen["schedule"])

    plans(
        "slow",
        2.0,
        2,
        ("cpu", {"on_cpu": True}),
        ("cpu heads", {"on_cpu": True, "schedule": "heads_across"}),
        ("ring", {"schedule": "double_ring"}),
        ("fixed parts", {"schedule": "heads_across", "head_parts": 1}),
        ("ring's switch", {"backward": "query"}),
        ("deterministic", {"deterministic": True}),
        ("deterministic open parts", {"deterministic": True, "schedule": "heads_across"}),
        ("auto", {}),
        ("auto again", {"replayed": True}),
        ("open parts", {"schedule": "heads_across"}),
        ("ring afterwards", {"schedule": "double_ring"}),
        ("deterministic afterwards", {"deterministic": True}),
    )
    plans("fast", 1e5, 2, ("deterministic", {"deterministic": True}), ("auto", {}))
    plans("node", 2.0, 4, ("auto", {}))
    return seen


def test_a_plan_asks_for_the_link_where_it_decides_something_and_once() -> None:
    seen = run_on_ranks(4, asked)
    slow, fast = "2.00 GiB/s between nodes", "100000.00 GiB/s between nodes"
    assumed = "2.90 GiB/s between nodes, assumed: deterministic"
    assert seen[0] == {
        "slow cpu": (0, None, "double_ring"),
        "slow cpu heads": (0, None, "heads_across"),
        "slow ring": (0, None, "double_ring"),
        "slow fixed parts": (0, None, "heads_across"),
        "slow ring's switch": (0, None, "double_ring"),
        "slow deterministic": (0, assumed, "heads_inside"),
        "slow deterministic open parts": (0, assumed, "heads_across"),
        "slow auto": (1, slow, "heads_inside"),
        "slow auto again": (1, slow, "heads_inside"),
        "slow open parts": (1, slow, "heads_across"),
        "slow ring afterwards": (1, None, "double_ring"),
        "slow deterministic afterwards": (1, assumed, "heads_inside"),
        "fast deterministic": (0, assumed, "heads_inside"),
        "fast auto": (1, fast, "head_exchange"),
        "node auto": (0, None, "head_exchange"),
    }
    assert seen == 4 * [seen[0]]
