"""RMSNorm: of any number of tokens, and joined with the sums of the residual stream around it.

torch's fused CUDA kernels find a row at block index x row length, in torch 2.11 in 32 bits (pytorch issue 181555):
rows that begin 2^32 elements or more into a tensor are wrong, without an error. 1M tokens on one rank times an
embedding of 4096 reach that. A tensor that large is normalised in runs of tokens, with one more copy of it.

    total = x + branch        normed = RMSNorm(total)
    dx = dresidual + gradient of the norm

Computed apart, the sum is written and read again by the norm, and in backward the norm's gradient is written, read,
added to the residual's and written once more. Shape letters: T tokens, E features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.ops.autograd import accumulation_dtype, kernels_for
from engine.ops.copies import computed

MAX_ELEMENTS = 1 << 31  # in one call of torch's kernel; half of what it can address
KERNELS = "engine.ops.norm_triton"


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        weight_E = computed(self.weight)
        if x.numel() <= MAX_ELEMENTS:
            return F.rms_norm(x, self.normalized_shape, weight_E, self.eps)
        runs = x.flatten(0, -2).split(MAX_ELEMENTS // x.shape[-1])
        return torch.cat([F.rms_norm(run, self.normalized_shape, weight_E, self.eps) for run in runs]).view_as(x)


def add_norm(x_TE: Tensor, branch_TE: Tensor, weight_E: Tensor, eps: float | None, total_TE: Tensor) -> Tensor:
    """Writes x + branch into `total_TE`; returns its RMSNorm. No autograd."""
    found = kernels(x_TE)
    if found is not None and x_TE.is_contiguous() and branch_TE.is_contiguous():
        return found.add_norm(x_TE, branch_TE, weight_E, epsilon(x_TE, eps), total_TE)
    torch.add(x_TE, branch_TE, out=total_TE)
    return F.rms_norm(total_TE, weight_E.shape, weight_E, eps)


def norm_gradients(
    x_TE: Tensor,
    weight_E: Tensor,
    eps: float | None,
    dnormed_TE: Tensor,
    *,
    residual_TE: Tensor | None = None,
    dx_TE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight of RMSNorm(x), the weight's in fp32 or wider. No autograd.

    `residual_TE` is added to that of x, which is written into `dx_TE` where that is given.
    """
    found = kernels(x_TE)
    if found is not None:
        dx_TE = torch.empty_like(x_TE, memory_format=torch.contiguous_format) if dx_TE is None else dx_TE
        return dx_TE, found.norm_gradients(x_TE, weight_E, epsilon(x_TE, eps), dnormed_TE, residual_TE, dx_TE)
    with torch.enable_grad():
        leaves = x_TE.detach().requires_grad_(), weight_E.detach().requires_grad_()
        normed_TE = F.rms_norm(leaves[0], weight_E.shape, leaves[1], eps)
    found_TE, dweight_E = torch.autograd.grad(normed_TE, leaves, dnormed_TE)
    dweight_E = dweight_E.to(accumulation_dtype(weight_E.dtype))
    if residual_TE is None and dx_TE is None:
        return found_TE, dweight_E
    dx_TE = found_TE if dx_TE is None else dx_TE
    if residual_TE is None:
        return dx_TE.copy_(found_TE), dweight_E
    return torch.add(residual_TE, found_TE, out=dx_TE), dweight_E


def epsilon(x: Tensor, eps: float | None) -> float:
    """The norm's epsilon; None is torch's default."""
    return torch.finfo(x.dtype).eps if eps is None else eps


def kernels(x_TE: Tensor, module: str = KERNELS) -> Any:
    """The kernels of `module`, or None where the reference runs: a row that one program cannot hold is left to it."""
    found = kernels_for(x_TE, module)
    return found if found is not None and x_TE.shape[-1] <= found.WIDEST else None
