"""A stand-in for O, which is not sent in backward, for kernels that read it.

FlashAttention-style backward kernels read O for one purpose: delta = rowsum(dO * O). Any O' with that row sum gives the
same gradients, and O' = dO * delta / |dO|^2 has it by construction, from tensors that the ring sends anyway.

A gradient of LSE is part of delta, which may then be too large for a row's dO: no O' of the dtype has that row sum.
`StandInKernel` then gives such rows' delta to a second call, so that dO, and with it dV, stays unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.accumulate.accumulators import ROWWISE_KERNELS
from engine.attention.geometry.tiles import Visible
from engine.attention.kernels import BackwardInputs, Gradients, Kernel, WholeInputs
from engine.ops.autograd import accumulation_dtype, kernels_for

# Largest entry of an O', far above any output's and in the range of fp16: rows with |delta| beyond it times |dO| need a
# second call.
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
class StandInKernel(Kernel):
    """A kernel whose own backward forms delta from dO and O: a subclass gives that as `backward_of_whole`.

    With `takes_delta`, backward takes any delta. Gradients are linear in (dO, delta) together, dV does not depend on
    delta at all, and dQ and dK depend on V through dO V^T alone. So rows whose delta no O' can represent have delta 0
    in a first call. A second call has V = 0 and, for these rows, a dO that can represent delta: dQ and dK of the two
    calls are added, dV is the first one's.

    The second call takes as long as the first, and the memory of another V, dO, dQ and dK of the tile. It is made only
    for a tile with such a row, which the host has to know: on a GPU every tile's backward waits for the answer.
    """

    takes_delta: bool = False
    takes_output = True

    def backward(self, given: BackwardInputs, visible: Visible, scale: float, deterministic: bool) -> Gradients:
        if not self.takes_delta:
            return self._by_stand_in(given, visible, scale, deterministic)
        dout_BLND, delta_BNL, v_BMKD = given.dout_BLND, given.delta_BNL, given.v_BMKD
        largest_BLN = torch.linalg.vector_norm(dout_BLND, torch.inf, dim=-1).to(delta_BNL.dtype)
        oversized_BNL = delta_BNL.abs() > largest_BLN.transpose(1, 2) * _MAX_ENTRY
        if not oversized_BNL.any():
            return self._by_stand_in(given, visible, scale, deterministic)
        first = given._replace(delta_BNL=delta_BNL.masked_fill(oversized_BNL, 0))
        dq_BLND, dk_BMKD, dv_BMKD = self._by_stand_in(first, visible, scale, deterministic)
        rest_BNL = delta_BNL.where(oversized_BNL, 0)
        rest = given._replace(
            dout_BLND=_dout_for(rest_BNL, dout_BLND), delta_BNL=rest_BNL, v_BMKD=torch.zeros_like(v_BMKD)
        )
        rest_dq_BLND, rest_dk_BMKD, _ = self._by_stand_in(rest, visible, scale, deterministic)
        return dq_BLND + rest_dq_BLND, dk_BMKD + rest_dk_BMKD, dv_BMKD

    def _by_stand_in(self, given: BackwardInputs, visible: Visible, scale: float, deterministic: bool) -> Gradients:
        q_BLND, dout_BLND, lse_BNL, delta_BNL, k_BMKD, v_BMKD = given
        if not self.writes_input_dtype:  # computes in the accumulation dtype: O' is not rounded to the inputs' first
            dout_BLND = dout_BLND.to(accumulation_dtype(dout_BLND.dtype))
        out_BLND = output_stand_in(dout_BLND, delta_BNL)
        whole = WholeInputs(q_BLND, out_BLND, dout_BLND, lse_BNL, k_BMKD, v_BMKD)
        return self.backward_of_whole(whole, visible, scale, deterministic)


def _dout_for(delta_BNL: Tensor, like_BLND: Tensor) -> Tensor:
    """A dO for any delta: a power of 2 in a row's first entry, with half of delta's exponent, so that O' has
    the other half and delta may be as large as the square of the dtype's range."""
    _, exponent_BNL = torch.frexp(delta_BNL)
    half_BNL = exponent_BNL.div(2, rounding_mode="floor").to(delta_BNL.dtype).exp2()
    dout_BLND = torch.zeros_like(like_BLND)
    dout_BLND[..., 0] = half_BNL.where(delta_BNL != 0, 0).transpose(1, 2)
    return dout_BLND
