"""Unequal head dims for operations that take one for all: zeros up to the wider one, which change nothing.

Scores are sums over the head dim of Q and K, and O has a column for each of V's, so columns of zeros add nothing to the
first and are cut from the second; likewise in backward. The cost is that of a call with the wider dim: at 192 and 128 a
fifth more work in forward, less than any other kernel that has to be taken instead.

Shape letters as in `engine.attention.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from engine.attention.geometry.tiles import Visible
from engine.attention.kernels import Gradients, Kernel, WholeInputs


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with zeros up to the widest head dim."""
    width = max(tensor.shape[-1] for tensor in tensors)
    return tuple(F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in tensors)


def padded_forward(
    kernel: Kernel, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, visible: Visible, scale: float
) -> tuple[Tensor, Tensor]:
    """`kernel.forward` of tensors with unequal head dims."""
    value_dim = v_BMKD.shape[-1]
    q_BLND, k_BMKD, v_BMKD = _widened(q_BLND, k_BMKD, v_BMKD)
    out_BLND, lse_BNL = kernel.forward(q_BLND, k_BMKD, v_BMKD, visible, scale)
    return out_BLND[..., :value_dim], lse_BNL


def padded_backward(given: WholeInputs, whole: Callable[[WholeInputs], Gradients]) -> Gradients:
    """The backward `whole` of tensors with unequal head dims."""
    q_BLND, out_BLND, dout_BLND, lse_BNL, k_BLKD, v_BLKD = given
    queries, values = q_BLND.shape[-1], v_BLKD.shape[-1]
    q_BLND, out_BLND, dout_BLND, k_BLKD, v_BLKD = _widened(q_BLND, out_BLND, dout_BLND, k_BLKD, v_BLKD)
    dq_BLND, dk_BLKD, dv_BLKD = whole(WholeInputs(q_BLND, out_BLND, dout_BLND, lse_BNL, k_BLKD, v_BLKD))
    return dq_BLND[..., :queries], dk_BLKD[..., :queries], dv_BLKD[..., :values]
