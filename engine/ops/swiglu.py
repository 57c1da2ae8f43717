"""SwiGLU's product, silu(gate) x up (arXiv:2002.05202), and its gradients.

With s = sigmoid(gate), so that silu(gate) = gate s:

    d up = dhidden gate s        d gate = dhidden up s (1 + gate (1 - s))

The kernels form this in fp32 and round each result once; the reference implementation rounds after every operation. All
tensors have one shape, any, and one dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.autograd import kernels_for

KERNELS = "engine.ops.elementwise_triton"


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) x up. Where a kernel computes it, only `gate` and `up` are saved for backward."""
    if kernels_for(gate, KERNELS) is None:
        return F.silu(gate) * up
    return _SwiGLU.apply(gate, up)


def swiglu_again(dhidden: Tensor, gate: Tensor, up: Tensor, *, saved: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, dgate, dup): the product recomputed, and its gradients. No autograd.

    The results may overwrite the arguments, but for a `gate` and `up` that are `saved`: these stay as they are.
    """
    kernels = kernels_for(gate, KERNELS)
    if kernels is not None:
        return kernels.swiglu_again(dhidden, gate, up, saved=saved)
    silu = F.silu(gate)
    hidden = silu * up
    dgate = torch.ops.aten.silu_backward(up * dhidden if saved else up.mul_(dhidden), gate)
    return hidden, dgate, silu.mul_(dhidden)


def swiglu_gradients(dhidden: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate, dup), with all arguments left as they are. No autograd."""
    kernels = kernels_for(gate, KERNELS)
    if kernels is not None:
        return kernels.swiglu_gradients(dhidden, gate, up)
    dgate = torch.ops.aten.silu_backward(up * dhidden, gate)
    return dgate, F.silu(gate).mul_(dhidden)


class _SwiGLU(torch.autograd.Function):
    """(gate, up) -> silu(gate) x up, by the kernels."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return kernels_for(gate, KERNELS).swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, dhidden: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():  # this backward will be differentiated itself, which takes torch's operations
            s = torch.sigmoid(gate)
            return dhidden * up * s * (1 + gate * (1 - s)), dhidden * gate * s
        return swiglu_gradients(dhidden, gate, up)
