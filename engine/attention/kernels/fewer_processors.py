"""A kernel that leaves some multiprocessors of its GPU to NCCL's kernels while these have something to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from engine.attention.geometry.tiles import Band
from engine.attention.kernels import BackwardInputs, Gradients, WholeInputs
from engine.attention.kernels.around import AroundKernel
from engine.cuda.green import Part

Results = TypeVar("Results", bound="tuple[Tensor, ...]")


@dataclass(frozen=True)
class FewerProcessors(AroundKernel):
    """`kernel`, launched on the multiprocessors of `part` while `needed()`, else on all.

    A launch on the part has a stream of its own, one for each stream that callers have; it waits for the caller's and
    the caller's waits for it. Results are memory of that stream; once they are freed, the allocator reuses it only
    after the caller's stream has done the work that was enqueued before.
    """

    part: Part
    needed: Callable[[], bool]
    _streams: dict[int, torch.cuda.ExternalStream] = field(default_factory=dict)  # by handle of the caller's

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self._launched(lambda: self.kernel.forward(q_BLND, k_BMKD, v_BMKD, band, scale))

    def backward(self, given: BackwardInputs, band: Band, scale: float, deterministic: bool) -> Gradients:
        return self._launched(lambda: self.kernel.backward(given, band, scale, deterministic))

    def backward_of_whole(self, given: WholeInputs, band: Band, scale: float, deterministic: bool) -> Gradients:
        return self._launched(lambda: self.kernel.backward_of_whole(given, band, scale, deterministic))

    def _launched(self, launch: Callable[[], Results]) -> Results:
        if not self.needed():
            return launch()
        caller = torch.cuda.current_stream(self.part.device)
        if caller.cuda_stream not in self._streams:
            self._streams[caller.cuda_stream] = self.part.stream()
        stream = self._streams[caller.cuda_stream]
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            results = launch()
        caller.wait_stream(stream)
        for result in results:
            result.record_stream(caller)
        return results
