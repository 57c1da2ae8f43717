"""An output that was never sent, rebuilt well enough for a backward kernel that asks for it.

FlashAttention-style backward kernels read O for one purpose: delta = rowsum(dO * O). Any O' with that row sum gives the
same gradients, and O' = dO * delta / |dO|^2 has it by construction, from what the ring carries anyway.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.merge import rowwise_twins


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
