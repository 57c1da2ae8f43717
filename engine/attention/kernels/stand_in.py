"""An output that was never sent, rebuilt well enough for a backward kernel that asks for it.

FlashAttention-style backward kernels read O for one purpose: delta = rowsum(dO * O). Any O' with that row sum gives the
same gradients, and O' = dO * delta / |dO|^2 has it by construction, from what the ring carries anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.merge import accumulation_dtype, rowwise_twins

# Least share of delta that a row's dO has to be for O' to exist. Powers of 2 far below what the dtype rounds (fp16
# reaches no farther), so that what they add to dV and dP is lost in rounding, and O' is still in range.
_LEAST_SHARE = {torch.float64: 2.0**-100, torch.float16: 2.0**-10}
_LEAST_SHARE_ELSE = 2.0**-40


def output_stand_in(dout_BLND: Tensor, delta_BNL: Tensor) -> Tensor:
    """O' of `dout`'s shape and dtype with rowsum(dO * O') = delta; rows where dO is all zero (ignored labels) give 0.

    Rows are scaled by their largest entry first: gradients of a mean over millions of tokens are so small that their
    squares would underflow in fp32.
    """
    fused = rowwise_twins(dout_BLND)
    if fused is not None:
        rebuilt_BLND: Tensor = fused.output_stand_in(dout_BLND, delta_BNL)
        return rebuilt_BLND
    dout = dout_BLND if dout_BLND.itemsize >= 4 else dout_BLND.float()
    largest = dout.abs().amax(dim=-1, keepdim=True)
    safe = largest.where(largest > 0, 1)
    unit = dout / safe
    delta_BLN1 = delta_BNL.transpose(1, 2).unsqueeze(-1)
    factor = delta_BLN1 / safe / unit.square().sum(dim=-1, keepdim=True).clamp_min(1)
    return (unit * factor).to(dout_BLND.dtype)


def with_room_for_delta(dout_BLND: Tensor, delta_BNL: Tensor) -> Tensor:
    """dO with something in every row that has a delta, so that some O' has that row sum with it.

    A gradient of LSE enters by delta alone: a row that only LSE was used of has dO = 0 and a delta all the same. Such
    rows get a negligible share of delta in their first entry; all others stay as they are.
    """
    delta_BLN = delta_BNL.transpose(1, 2)
    share = _LEAST_SHARE.get(dout_BLND.dtype, _LEAST_SHARE_ELSE)
    wide = accumulation_dtype(dout_BLND.dtype)
    lacking_BLN = dout_BLND.abs().amax(dim=-1).to(wide) <= delta_BLN.abs() * share
    roomy_BLND = dout_BLND.clone()
    roomy_BLND[..., 0] = torch.where(lacking_BLN, (delta_BLN * share).to(dout_BLND.dtype), dout_BLND[..., 0])
    return roomy_BLND
