"""The sum of a weight's gradient over tiles of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def add_product(dweight_OI: Tensor, dout_TO: Tensor, in_TI: Tensor) -> None:
    """dweight += dout^T @ in, summed in the dtype of `dweight`.

    That is fp32 for operands in bf16, so that many tiles round no more than one. T tokens of the tile, O outputs and I
    inputs of the weight.
    """
    if dweight_OI.dtype == in_TI.dtype:
        dweight_OI.addmm_(dout_TO.T, in_TI)
    elif in_TI.is_cuda:
        # bf16 operands, fp32 sum inside the matmul: no temporary of the weight's size, no bf16 rounding per tile.
        torch.ops.aten.addmm.dtype_out(dweight_OI, dout_TO.T, in_TI, dweight_OI.dtype, out=dweight_OI)
    else:
        dweight_OI += dout_TO.T @ in_TI
