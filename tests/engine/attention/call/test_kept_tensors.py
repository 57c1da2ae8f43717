"""What a forward holds on to: nothing for a backward that will not come, and no shard longer than it is used."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch

from engine import ContextParallel, burst_attention
from engine.attention.algorithms.ulysses import UlyssesPlan
from engine.attention.comm.p2p import PointToPoint
from engine.attention.kernels import Kernel
from engine.attention.masks import Full
from engine.attention.op import AttentionPlan, run_attention
from tests.plans import plan_attention
from tests.ranks import run_on_ranks

WITHOUT_GRADIENT: dict[str, tuple[bool, Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "no_grad": (True, torch.no_grad),
    "inference_mode": (True, torch.inference_mode),
    "inputs that want none": (False, contextlib.nullcontext),
}


@dataclass
class Watching:
    """A kernel that counts, at each forward, which keys of its earlier calls are still somewhere in memory."""

    kernel: Kernel
    alive: list[int] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def forward(self, q: torch.Tensor, k: torch.Tensor, *others: Any) -> Any:
        self._seen[k.untyped_storage()._cdata] = weakref.ref(k.untyped_storage())
        self.alive.append(sum(reference() is not None for reference in self._seen.values()))
        return self.kernel.forward(q, k, *others)


def watched(plan: AttentionPlan) -> tuple[AttentionPlan, Watching]:
    """The plan with a kernel that watches."""
    inner = plan.inner if isinstance(plan, UlyssesPlan) else plan
    kernel = Watching(inner.kernel)
    ring = replace(inner, kernel=kernel)
    return (replace(plan, inner=ring) if isinstance(plan, UlyssesPlan) else ring), kernel


def shards_alive(choices: dict[str, Any]) -> dict[str, list[int]]:
    """By how the call is made: at each kernel call, how many shards of keys that the kernel has had are in memory."""
    cp = ContextParallel(layout="contiguous")
    found = {}
    for case, (wanted, around) in ({"gradient": (True, contextlib.nullcontext)} | WITHOUT_GRADIENT).items():
        q, k, v = (torch.randn(1, 8, 4, 8, requires_grad=wanted) for _ in range(3))
        plan, kernel = watched(plan_attention(q, k, mask=Full(), cp=cp, kernel="reference", **choices))
        with around():
            out = run_attention(plan, q, k, v)
        assert out.requires_grad == (case == "gradient")
        found[case] = kernel.alive
        del out
        gc.collect()
    return found


def test_received_heads_are_saved_only_for_a_backward() -> None:
    for alive in run_on_ranks(2, shards_alive, {"schedule": "ulysses", "num_head_chunks": 2}):
        assert alive.pop("gradient") == [1, 2]
        assert alive == {case: [1, 1] for case in WITHOUT_GRADIENT}


def received_alive(exchange: str) -> list[int]:
    """Each time a transfer of a ring's forward starts: how many tensors that were received before are in memory."""
    cp = ContextParallel(layout="contiguous")
    q, k, v = (torch.randn(1, 8, 4, 8, requires_grad=True) for _ in range(3))
    received: list[Any] = []
    alive: list[int] = []
    start = PointToPoint.start

    def counted(transport: PointToPoint, *arguments: Any) -> Any:
        alive.append(sum(reference() is not None for reference in received))
        transfer = start(transport, *arguments)
        received.extend(weakref.ref(tensor.untyped_storage()) for tensor in transfer.received)
        return transfer

    with mock.patch.object(PointToPoint, "start", counted):
        burst_attention(q, k, v, mask=Full(), cp=cp, kernel="reference", exchange=exchange)
    return alive


@pytest.mark.parametrize("exchange", ["relay", "direct"])
def test_a_shard_that_was_used_is_gone_before_memory_for_another_is_taken(exchange) -> None:
    for alive in run_on_ranks(5, received_alive, exchange):
        assert alive == [0, 2, 2, 2]  # K and V of the shard that is used while the next is received
