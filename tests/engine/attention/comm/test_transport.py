"""When transfers start and are waited for, and what the process group's own owe to NCCL, as far as it can be seen
without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel
from engine.attention.accumulate.accumulators import TensorSpec
from engine.attention.algorithms.ring import KEY_SIDE_DIMS, ring_steps
from engine.attention.comm import p2p as transport
from engine.attention.comm.exchange import RemoteChunk
from engine.attention.comm.p2p import PointToPoint, Traffic
from engine.attention.masks import Full
from tests.plans import plan_attention
from tests.ranks import run_on_ranks

NOTHING: tuple[TensorSpec, ...] = ()


class Calls:
    """Stands in for torch.distributed: notes every call that forms a communicator or a message."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: torch.device | None) -> None:
        self.noted: list[str] = []
        monkeypatch.setattr(transport, "gpu_of", lambda group: device)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2])
        monkeypatch.setattr(dist, "P2POp", lambda op, tensor, peer, group, tag: tensor)
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: self.note("messages", []))
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: self.note("call of all ranks", None))

    def note(self, call, result):
        self.noted.append(call)
        return result


CPU = torch.device("cpu")  # stands in for a GPU


@pytest.mark.parametrize("first", [(), (TensorSpec((2,), torch.float32),)])
def test_all_ranks_form_the_communicator_before_the_first_message_also_a_rank_without_one(monkeypatch, first) -> None:
    calls = Calls(monkeypatch, CPU)
    route = PointToPoint(object(), Traffic())
    for expected in (first, (TensorSpec((3,), torch.bfloat16),)):
        route.start((), 1, expected, 2)
    assert calls.noted == ["call of all ranks", *["messages"] * (1 + len(first))]


def test_gloo_needs_no_call_of_all_ranks_before_the_first_message(monkeypatch) -> None:
    calls = Calls(monkeypatch, None)
    PointToPoint(object(), Traffic()).start((torch.zeros(2),), 1, NOTHING, 2)
    assert calls.noted == ["messages"]


def without_a_gpu() -> bool:
    return transport.gpu_of(dist.group.WORLD) is None


def test_gloo_receives_on_the_cpu() -> None:
    assert run_on_ranks(1, without_a_gpu) == [True]


@pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_group_with_nccl_receives_on_the_gpu_also_beside_gloo(monkeypatch, backends) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert transport.gpu_of(object()) == torch.device("cuda", 3)


def order_of_events() -> list[str]:
    """Ring steps as outer step and inner step, and when transfers between nodes start and are waited for; three nodes
    of two."""
    cp = ContextParallel(node_size=2)
    k = torch.zeros(1, 8, 2, 8)
    plan = plan_attention(k, k, mask=Full(), cp=cp, schedule="double_ring")
    across, events = plan.comms.inter_node, []
    start = across.start

    def started(*message):
        transfer = start(*message)
        events.append("starts")
        return SimpleNamespace(wait=lambda: events.append("waits") or transfer.wait())

    across.start = started
    for step, _chunk in ring_steps(plan, RemoteChunk((k, k), KEY_SIDE_DIMS), plan.comm_plan(sends_queries=False)):
        events.append(f"{step.outer_step}.{step.inner_step}")
    return events


def test_a_transfer_between_nodes_has_a_whole_inner_ring_to_finish() -> None:
    expected = ["starts", "0.0", "0.1", "waits", "starts", "1.0", "1.1", "waits", "2.0", "2.1"]
    assert run_on_ranks(6, order_of_events) == 6 * [expected]
