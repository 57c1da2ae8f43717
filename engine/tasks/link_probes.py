"""The link between nodes as a trial found it: measured before its warm-up, among its measured steps, and after them.

On shared machines the speed drifts within seconds, so a single measurement says little about the steps beside it; three
show by how much it drifted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.attention.context import ContextParallel
from engine.distributed import World
from engine.settings import Steps

MOMENTS = ("before", "between", "after")
MESSAGE_BYTES = 64 << 20  # at most, where no tensor is given: large enough for a link's full speed
LATENCY_BYTES = 4096  # of the message whose time is the link's latency


class LinkProbes:
    """Measures the link around the steps of one trial. Where a sequence's ranks are on one node it does nothing.

    A measurement receives one message beside the tensors that exist between steps. A step holds more than that at its
    fullest, so no peak rises: the message is Q, or no larger than `message_bytes`, the size of Q, which a step has in
    memory several times over.
    """

    def __init__(
        self, world: World, cp: ContextParallel, steps: Steps, *, message: Tensor | None = None, message_bytes: int = 0
    ) -> None:
        self._world, self._cp, self._steps = world, cp, steps
        self._message, self._message_bytes = message, min(message_bytes, MESSAGE_BYTES)
        self._seconds_per_gib = dict.fromkeys(MOMENTS, 0.0)  # 0 where it was not measured

    def before_step(self, index: int) -> None:
        """Measure where it is time: before the first step, and in the middle of the measured ones. Collective.

        A single measured step has no middle: then between the warm-up and that step.
        """
        if index == 0:
            self._measure("before")
        if index == self._steps.warmup + self._steps.measured // 2:
            self._measure("between")

    def figures(self) -> dict[str, Any]:
        """Extras of the record, after one last measurement: GiB/s of the slowest replica, and seconds of a small
        message. Collective."""
        self._measure("after")
        latency = self._seconds(self._bytes(LATENCY_BYTES)) * LATENCY_BYTES / (1 << 30)
        *slowest, latency = self._world.slowest([*self._seconds_per_gib.values(), latency])
        if not all(slowest):
            return {}
        speeds = {moment: 1 / seconds for moment, seconds in zip(MOMENTS, slowest, strict=True)}
        return {
            "link_gib_per_second": speeds,
            "across_gib_per_second": speeds["after"],
            "link_latency_seconds": latency,
        }

    def _measure(self, moment: str) -> None:
        message = self._message
        self._seconds_per_gib[moment] = self._seconds(self._bytes(self._message_bytes) if message is None else message)

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._world.device)

    def _seconds(self, message: Tensor) -> float:
        """Per GiB, with messages of this size; 0 where the ranks are on one node."""
        if self._cp.node_size == self._cp.size:
            return 0.0
        across = self._cp.measure_link(message)
        return 0.0 if across is None else 1 / across
