"""Matrices, the embedding and norms that every part of the decoder is made of."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.lora import Lora
from engine.ops.copies import computed
from engine.ops.products import PLAIN, Products, linear

Norm: TypeAlias = "nn.RMSNorm | None"  # none: the identity


class Linear(nn.Linear):
    """A matrix that may have a copy in the dtype of the computation (`engine.ops.copies`), or adapters
    (`engine.lora`). `products` says in which numbers it is multiplied."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)
        self.lora_scale = 1.0
        self.products: Products = PLAIN

    def adapt(self, lora: Lora, dtype: torch.dtype) -> None:
        """Add adapters in `dtype`, without values."""
        device, self.lora_scale = self.weight.device, lora.scale
        self.lora_A = nn.Parameter(torch.empty(lora.rank, self.in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, lora.rank, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        biases = [] if self.bias is None else [self.bias]
        if self.lora_A is None:
            return linear(x, [self.weight], biases, self.products)
        # The adapters' product first, and the frozen one added to it in place: a recomputation ends with the last
        # tensor that backward needs, which is the frozen matrix itself, so that its product is not repeated.
        x_TI = x.flatten(0, -2)
        out_TO = self._adapters(x_TI, biases)
        return out_TO.addmm_(x_TI, self.weight.t()).unflatten(0, x.shape[:-1])

    def for_gradients(self, x: Tensor) -> Tensor:
        """A tensor like `forward(x)` and with its gradients, whose numbers mean nothing: the product with a frozen
        matrix, which no gradient needs, is not formed."""
        if self.weight.requires_grad:
            return self(x)
        x_TI = x.flatten(0, -2)
        if self.lora_A is None:
            out_TO = x.new_zeros(()).expand(x_TI.shape[0], self.out_features)
        else:
            out_TO = self._adapters(x_TI, [])
        return _Unformed.apply(out_TO, x_TI, self.weight).unflatten(0, x.shape[:-1])

    def _adapters(self, x_TI: Tensor, biases: list[nn.Parameter]) -> Tensor:
        return linear(linear(x_TI, [self.lora_A]) * self.lora_scale, [self.lora_B], biases)


class _Unformed(torch.autograd.Function):
    """(out_TO, x_TI, W_OI) -> out_TO, with the gradients of out + x @ W^T. W has none."""

    @staticmethod
    def forward(ctx: Any, out_TO: Tensor, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(weight_OI)
        return out_TO.view_as(out_TO)

    @staticmethod
    def backward(ctx: Any, dout_TO: Tensor) -> tuple[Tensor | None, ...]:
        (weight_OI,) = ctx.saved_tensors
        return dout_TO if ctx.needs_input_grad[0] else None, dout_TO @ weight_OI, None


class Embedding(nn.Embedding):
    """Likewise. The output of a frozen one still gets a gradient, so that every layer's input has one."""

    def forward(self, tokens: Tensor) -> Tensor:
        out = F.embedding(tokens, computed(self.weight))
        if out.requires_grad or not torch.is_grad_enabled():
            return out
        return _WithGradient.apply(out, out.new_empty(0, requires_grad=True))


class _WithGradient(torch.autograd.Function):
    """(x, any tensor that requires a gradient) -> x as a part of the graph: as a leaf, x and its gradient would stay
    until backward has ended."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        return None, None


def normed(norm: Norm, x: Tensor) -> Tensor:
    """norm(x), or x where there is none."""
    return x if norm is None else norm(x)
