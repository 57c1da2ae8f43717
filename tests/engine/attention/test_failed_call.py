"""A call that fails on one rank between two messages: it raises there, the others' wait ends, no later call hangs."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel, burst_attention
from engine.attention.algorithms.ulysses import UlyssesPlan
from engine.attention.comm.p2p import BrokenContext, CallOrder, PeerLost, timeout_of
from engine.attention.kernels import Kernel
from engine.attention.masks import Full
from engine.attention.op import AttentionPlan, run_attention
from engine.attention.resolve import plan_attention
from tests.ranks import run_on_ranks

FAILING_RANK = 1


@dataclass
class RunsOutOfMemory:
    """A kernel whose second call of one kind fails."""

    kernel: Kernel
    kind: str  # forward or backward
    calls: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def forward(self, *inputs: Any) -> Any:
        return self._call("forward", inputs)

    def backward(self, *inputs: Any) -> Any:
        return self._call("backward", inputs)

    def _call(self, kind: str, inputs: tuple[Any, ...]) -> Any:
        self.calls += kind == self.kind
        if self.calls == 2:
            raise torch.OutOfMemoryError("no memory left for a tile")
        return getattr(self.kernel, kind)(*inputs)


def with_kernel(plan: AttentionPlan, kind: str) -> AttentionPlan:
    """The plan with a kernel that fails."""
    if isinstance(plan, UlyssesPlan):
        return replace(plan, inner=replace(plan.inner, kernel=RunsOutOfMemory(plan.inner.kernel, kind)))
    return replace(plan, kernel=RunsOutOfMemory(plan.kernel, kind))


def raised(call: Callable[[], object]) -> tuple[str, str]:
    """Type and words of what a call raises."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def failures(kind: str, choices: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What a call raises in which one rank fails, what it raises once more, and what the backward of an earlier call
    and the gathering of a result raise then."""
    group = dist.new_group()
    shards = [torch.randn(1, 8, 4, 8, requires_grad=True) for _ in range(3)]
    started = time.perf_counter()
    burst_attention(*shards, mask=Full(), cp=ContextParallel(group), kernel="reference", **choices).sum().backward()
    slowest = torch.tensor([time.perf_counter() - started])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    # As long as this machine takes for a few calls, connections included: a rank that is slow has not failed.
    group = dist.new_group(timeout=datetime.timedelta(seconds=1 + 10 * slowest.item()))
    cp = ContextParallel(group)
    plan = plan_attention(*shards[:2], mask=Full(), cp=cp, kernel="reference", **choices)
    earlier = run_attention(plan, *shards)
    failing = with_kernel(plan, kind) if dist.get_rank() == FAILING_RANK else plan

    def call() -> None:
        run_attention(failing, *shards).sum().backward()

    return {
        "call": raised(call),
        "next call": raised(lambda: burst_attention(*shards, mask=Full(), cp=cp, kernel="reference", **choices)),
        "backward": raised(lambda: earlier.sum().backward()),
        "unshard": raised(lambda: cp.unshard(earlier)),
    }


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        ("forward", {"exchange": "direct"}),
        ("backward", {"exchange": "relay"}),
        ("forward", {"schedule": "ulysses", "num_head_chunks": 2}),
    ],
)
def test_after_a_call_that_failed_halfway_no_rank_hangs(kind, choices) -> None:
    for rank, found in enumerate(run_on_ranks(2, failures, kind, choices)):
        error, words = found.pop("call")
        if rank == FAILING_RANK:
            assert (error, words) == ("OutOfMemoryError", "no memory left for a tile")
        else:
            assert error == "PeerLost"
            assert words.startswith(f"rank {rank} exchanged tensors with rank")
            assert "another rank failed or ended: find the first error of all ranks" in words
        for error, words in found.values():
            assert error == "BrokenContext"
            assert "an earlier attention call failed on this rank between two messages" in words
            assert ("no memory left for a tile" in words) == (rank == FAILING_RANK)
            assert "make a new process group and a new ContextParallel on all of them" in words


def refused_then_right() -> tuple[str, bool]:
    """What a refusal before the first message raises, and whether the next call has a result."""
    cp = ContextParallel()
    wrong, right = torch.zeros(1, 5, 2, 8), torch.zeros(1, 8, 2, 8)
    unsupported_reason = raised(lambda: burst_attention(wrong, wrong, wrong, cp=cp))[0]
    return unsupported_reason, torch.isfinite(burst_attention(right, right, right, cp=cp)).all().item()


def test_a_call_that_is_refused_before_any_message_breaks_nothing() -> None:
    assert run_on_ranks(2, refused_then_right) == [("ValueError", True)] * 2


def test_a_single_rank_can_call_again_after_a_failure() -> None:
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    plan = plan_attention(q, q, mask=Full(), cp=ContextParallel.single(), kernel="reference")
    failing = with_kernel(plan, "forward")
    run_attention(failing, q, q, q)
    with pytest.raises(torch.OutOfMemoryError):
        run_attention(failing, q, q, q)
    assert torch.isfinite(run_attention(plan, q, q, q)).all()


def timeouts() -> set[float]:
    """Timeouts, in seconds, of the groups that a context makes out of one of 77."""
    cp = ContextParallel(dist.new_group(timeout=datetime.timedelta(seconds=77)), node_size=1)
    q = torch.zeros(1, 8, 2, 8)
    before = set(dist.distributed_c10d._world.pg_map)
    for schedule in ("ring", "double_ring", "ulysses"):
        burst_attention(q, q, q, cp=cp, schedule=schedule)
    made = set(dist.distributed_c10d._world.pg_map) - before
    assert made
    return {timeout_of(group).total_seconds() for group in made}


def test_the_groups_of_a_context_have_the_timeout_of_its_group() -> None:
    assert run_on_ranks(2, timeouts) == [{77.0}] * 2


def test_the_first_failure_is_reported_also_for_an_interrupt() -> None:
    order = CallOrder()
    with pytest.raises(KeyboardInterrupt), order.kept(), order.kept():
        raise KeyboardInterrupt
    for _ in range(2):
        with pytest.raises(BrokenContext, match="KeyboardInterrupt: no message"), order.kept():
            raise AssertionError("steps after a failure do not run")
    assert issubclass(PeerLost, RuntimeError)
