"""The link between nodes as a trial found it: measured before its warm-up, among its measured steps, and after them.

On shared machines the speed drifts within seconds, so a single measurement says little about the steps beside it; three
show by how much it drifted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.comm.link_speed import GIB, LATENCY_BYTES, MESSAGE_BYTES
from engine.attention.context import ContextParallel
from engine.distributed import World
from engine.measurement import LINK, Extra
from engine.settings import Steps

MOMENTS = ("before", "between", "after")
PATTERNS = ("one_peer", "all_peers")  # that each rank sends to at once
TENSOR_BYTES = 128 << 20  # at most of a tensor that is given


class LinkProbes:
    """Measures the link around the steps of one trial. Where a sequence's ranks are on one node it does nothing.

    Each measurement takes both patterns in which schedules send between nodes, one peer for each rank and all peers at
    once, and keeps the faster: the speed of the slower one is no bound for schedules that send in the other.

    A measurement receives one message beside the tensors that exist between steps. A step holds more than that at its
    fullest, so no peak rises: the message is Q, or no larger than `message_bytes`, the size of Q, which a step has in
    memory several times over.
    """

    def __init__(
        self, world: World, cp: ContextParallel, steps: Steps, *, message: Tensor | None = None, message_bytes: int = 0
    ) -> None:
        self._world, self._cp, self._steps = world, cp, steps
        self._spans_nodes = cp.node_size < cp.size
        self._message_bytes = min(message_bytes, MESSAGE_BYTES)
        self._message = None if message is None else message.detach().flatten()[: TENSOR_BYTES // message.itemsize]
        self._patterns = dict.fromkeys(PATTERNS, 0.0)  # GiB/s, the fastest of all moments
        self._seconds_per_gib = dict.fromkeys(MOMENTS, 0.0)  # 0 where it was not measured

    def before_step(self, index: int) -> None:
        """Measure where it is time: before the first step, and in the middle of the measured ones. Collective.

        A single measured step has no middle: then between the warm-up and that step.
        """
        if index == 0:
            self._measure("before")
        if index == self._steps.warmup + self._steps.measured // 2:
            self._measure("between")

    def figures(self) -> Extra:
        """Extras of the record, after one last measurement: GiB/s of the slowest replica, and seconds of a small
        message. Collective."""
        self._measure("after")
        latency = 0.0
        if self._spans_nodes:
            latency = LATENCY_BYTES / GIB / self._speed(self._bytes(LATENCY_BYTES), PATTERNS[0])
        *slowest, latency = self._world.slowest([*self._seconds_per_gib.values(), latency])
        if not all(slowest):
            return {}
        speeds = {moment: 1 / seconds for moment, seconds in zip(MOMENTS, slowest, strict=True)}
        return {
            LINK: speeds,
            "across_gib_per_second": speeds["after"],
            "link_by_pattern": {pattern: speed for pattern, speed in self._patterns.items() if speed},
            "link_latency_seconds": latency,
        }

    def _measure(self, moment: str) -> None:
        if not self._spans_nodes:
            return
        message = self._bytes(self._message_bytes) if self._message is None else self._message
        patterns = PATTERNS if self._cp.node_size > 1 else PATTERNS[:1]  # nodes of one rank: both are the same
        speeds = {pattern: self._speed(message, pattern) for pattern in patterns}
        for pattern, speed in speeds.items():
            self._patterns[pattern] = max(self._patterns[pattern], speed)
        self._seconds_per_gib[moment] = 1 / max(speeds.values())

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._world.device)

    def _speed(self, message: Tensor, pattern: str) -> float:
        """GiB per second of messages of this size. The ranks are on several nodes. Collective."""
        across = self._cp.comms.measure_link(message, spread=pattern == "all_peers")
        assert across is not None, "several nodes have a group"
        return across
