"""A kernel around another one, which computes; subclasses change the parts that they are for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.attention.geometry.tiles import Band
from engine.attention.kernels import BackwardInputs, Gradients, Kernel, KernelProblem, WholeInputs


@dataclass(frozen=True)
class AroundKernel:
    """A `Kernel` that is `kernel` in every part that a subclass does not define."""

    kernel: Kernel

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def writes_input_dtype(self) -> bool:
        return self.kernel.writes_input_dtype

    @property
    def takes_delta(self) -> bool:
        return self.kernel.takes_delta

    @property
    def takes_output(self) -> bool:
        return self.kernel.takes_output

    def unsupported_reason(self) -> str | None:
        return self.kernel.unsupported_reason()

    def refuse(self, problem: KernelProblem) -> str | None:
        return self.kernel.refuse(problem)

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(q_BLND, k_BMKD, v_BMKD, band, scale)

    def backward(self, given: BackwardInputs, band: Band, scale: float, deterministic: bool) -> Gradients:
        return self.kernel.backward(given, band, scale, deterministic)

    def backward_of_whole(self, given: WholeInputs, band: Band, scale: float, deterministic: bool) -> Gradients:
        return self.kernel.backward_of_whole(given, band, scale, deterministic)
