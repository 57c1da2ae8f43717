"""SwiGLU's product, silu(gate) x up (arXiv:2002.05202), and rotary positions (arXiv:2104.09864), with their gradients.

With s = sigmoid(gate), so that silu(gate) = gate s:

    d up = dhidden gate s        d gate = dhidden up s (1 + gate (1 - s))

The kernels form this in fp32 and round each result once; the reference implementation rounds after every operation. All
tensors of SwiGLU have one shape, any, and one dtype.

A rotation turns the pairs (x[i], x[i + D/2]) by their position's angles: halves are paired as in Hugging Face's Llama.
Its gradient is the inverse rotation of the gradient. Shape letters: B batch, L tokens held here, T tokens of one
sequence, N heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.autograd import kernels_for

KERNELS = "engine.ops.elementwise_triton"


def swiglu(gate: Tensor, up: Tensor, largest: Tensor | None = None) -> Tensor:
    """silu(gate) x up. Where a kernel computes it, only `gate` and `up` are saved for backward, and the largest value
    is left in `largest` (`engine.ops.float8_triton.raise_largest`)."""
    if kernels_for(gate, KERNELS) is None:
        return F.silu(gate) * up
    return _SwiGLU.apply(gate, up, largest)


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
    """(gate, up, where to leave the largest value or None) -> silu(gate) x up, by the kernels."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, largest: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        return kernels_for(gate, KERNELS).swiglu(gate, up, largest)

    @staticmethod
    def backward(ctx: Any, dhidden: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():  # this backward will be differentiated itself, which takes torch's operations
            s = torch.sigmoid(gate)
            return dhidden * up * s * (1 + gate * (1 - s)), dhidden * gate * s, None
        return *swiglu_gradients(dhidden, gate, up), None


def rotate(x_BLND: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE, return the dtype of x.

    `rotary` is (cos_LD, sin_LD) over half of the head dim, fp32 or wider; its precision is that of the arithmetic.
    """
    return _Rotate.apply(x_BLND, *rotary, False)


def rotate_into(out_TND: Tensor, x_TND: Tensor, rotary: tuple[Tensor, Tensor], *, inverse: bool = False) -> None:
    """Write the rotation of `rotate`, or its inverse, into `out_TND`, which is not x and has unit stride over D.
    No autograd.

    T tokens of one sequence; `rotary` holds their angles.
    """
    kernels = kernels_for(x_TND, KERNELS)
    cos_TD, sin_TD = rotary
    if kernels is not None:
        kernels.rotate(x_TND[None], cos_TD, sin_TD, inverse, out_TND[None])
    else:
        _rotated(x_TND, cos_TD, -sin_TD if inverse else sin_TD, out_TND)


class _Rotate(torch.autograd.Function):
    """(x_BLND, cos_LD, sin_LD, whether backwards) -> the rotated x. Its own function because autograd would keep fp32
    copies of q and k."""

    @staticmethod
    def forward(ctx: Any, x_BLND: Tensor, cos_LD: Tensor, sin_LD: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(cos_LD, sin_LD)
        ctx.inverse = inverse
        kernels = kernels_for(x_BLND, KERNELS)
        if kernels is not None:
            return kernels.rotate(x_BLND, cos_LD, sin_LD, inverse)
        return _rotated(x_BLND, cos_LD, -sin_LD if inverse else sin_LD, torch.empty_like(x_BLND))

    @staticmethod
    def backward(ctx: Any, grad_BLND: Tensor) -> tuple[Tensor, None, None, None]:
        return _Rotate.apply(grad_BLND, *ctx.saved_tensors, not ctx.inverse), None, None, None


def _rotated(x_LND: Tensor, cos_LD: Tensor, sin_LD: Tensor, out_LND: Tensor) -> Tensor:
    """The reference implementation in torch, of one sequence or several; returns `out_LND`."""
    first, second = x_LND.chunk(2, dim=-1)
    cos, sin = cos_LD[:, None], sin_LD[:, None]  # over heads; fp32, so each product below is formed in fp32
    out_first, out_second = out_LND.chunk(2, dim=-1)
    out_first.copy_((first * cos).sub_(second * sin))
    out_second.copy_((second * cos).add_(first * sin))
    return out_LND
