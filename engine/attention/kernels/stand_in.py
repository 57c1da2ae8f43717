"""An output that was never sent, rebuilt well enough for a backward kernel that asks for it.

FlashAttention-style backward kernels read O for one purpose: delta = rowsum(dO * O). Any O' with that row sum gives the
same gradients, and O' = dO * delta / |dO|^2 has it by construction, from what the ring carries anyway.

A gradient of LSE enters by delta alone, and may leave a row with a delta that its dO is too small for: no O' of the
dtype has that row sum. `AnyDelta` takes such rows' delta in a second call, so that dO, and with it dV, stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.accumulate.accumulators import ROWWISE_KERNELS
from engine.attention.geometry.tiles import Band
from engine.attention.kernels import BackwardInputs, Gradients, Kernel, Problem
from engine.ops.autograd import accumulation_dtype
from engine.ops.triton_kernels import kernels_for

# Largest entry of an O', far above any output's and in the range of fp16: |delta| beyond it times |dO| goes alone.
_MAX_ENTRY = 2.0**15


def output_stand_in(dout_BLND: Tensor, delta_BNL: Tensor) -> Tensor:
    """O' of `dout`'s shape and dtype with rowsum(dO * O') = delta; rows where dO is all zero (ignored labels) give 0.

    Rows are scaled by their largest entry first: gradients of a mean over millions of tokens are so small that their
    squares would underflow in fp32.
    """
    kernels = kernels_for(dout_BLND, ROWWISE_KERNELS)
    if kernels is not None:
        rebuilt_BLND: Tensor = kernels.output_stand_in(dout_BLND, delta_BNL)
        return rebuilt_BLND
    dout = dout_BLND.to(accumulation_dtype(dout_BLND.dtype))
    largest = dout.abs().amax(dim=-1, keepdim=True)
    safe = largest.where(largest > 0, 1)
    unit = dout / safe
    delta_BLN1 = delta_BNL.transpose(1, 2).unsqueeze(-1)
    factor = delta_BLN1 / safe / unit.square().sum(dim=-1, keepdim=True).clamp_min(1)
    return (unit * factor).to(dout_BLND.dtype)


@dataclass(frozen=True)
class AnyDelta:
    """A kernel whose backward forms delta from dO and an O, made to take the delta of a row whatever its dO.

    Gradients are linear in (dO, delta) together, dV does not depend on delta at all, and dQ and dK depend on V through
    dO V^T alone. So rows whose delta no O' can carry give it up in a first call, and have it in a second one in which
    V is 0 and dO any value that carries it: dQ and dK of the two are added, dV is the first one's.

    The second call costs as much as the first, and in memory another V, dO, dQ and dK of the tile. It is made where a
    tile has such a row, which the processor has to know: on a GPU every tile's backward waits for the answer.
    """

    kernel: Kernel
    takes_delta = True

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def writes_input_dtype(self) -> bool:
        return self.kernel.writes_input_dtype

    def unsupported_reason(self) -> str | None:
        return self.kernel.unsupported_reason()

    def refuse(self, problem: Problem) -> str | None:
        return self.kernel.refuse(problem)

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(q_BLND, k_BMKD, v_BMKD, band, scale)

    def backward(self, given: BackwardInputs, band: Band, scale: float, deterministic: bool) -> Gradients:
        dout_BLND, delta_BNL, v_BMKD = given.dout_BLND, given.delta_BNL, given.v_BMKD
        largest_BLN = torch.linalg.vector_norm(dout_BLND, torch.inf, dim=-1).to(delta_BNL.dtype)
        alone_BNL = delta_BNL.abs() > largest_BLN.transpose(1, 2) * _MAX_ENTRY
        if not alone_BNL.any():
            return self.kernel.backward(given, band, scale, deterministic)
        carried = given._replace(delta_BNL=delta_BNL.masked_fill(alone_BNL, 0))
        dq_BLND, dk_BMKD, dv_BMKD = self.kernel.backward(carried, band, scale, deterministic)
        rest_BNL = delta_BNL.where(alone_BNL, 0)
        rest = given._replace(
            dout_BLND=_carrier(rest_BNL, dout_BLND), delta_BNL=rest_BNL, v_BMKD=torch.zeros_like(v_BMKD)
        )
        rest_dq_BLND, rest_dk_BMKD, _ = self.kernel.backward(rest, band, scale, deterministic)
        return dq_BLND + rest_dq_BLND, dk_BMKD + rest_dk_BMKD, dv_BMKD


def _carrier(delta_BNL: Tensor, like_BLND: Tensor) -> Tensor:
    """A dO for any delta: a power of 2 in a row's first entry, with half of delta's exponent, so that what is left for
    O' has the other half and delta may be as far out of the dtype's range as its square."""
    _, exponent_BNL = torch.frexp(delta_BNL)
    half_BNL = exponent_BNL.div(2, rounding_mode="floor").to(delta_BNL.dtype).exp2()
    dout_BLND = torch.zeros_like(like_BLND)
    dout_BLND[..., 0] = half_BNL.where(delta_BNL != 0, 0).transpose(1, 2)
    return dout_BLND
