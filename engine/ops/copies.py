"""Copies of parameters in the dtype that a model computes in, kept from one step to the next.

FSDP2 makes such copies of a unit whenever it gathers it, twice a step, and moves its gradients through buffers of its
own. Where one rank holds all parameters nothing has to be gathered: each fp32 parameter has one copy, made once per
step, and gradients are formed in the dtype of the parameter.

A copy is an attribute of its parameter. A parameter without one, such as a gathered one of FSDP2, is computed with as
it is. Shape letters: T tokens, I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.autograd import refuse_second_derivative
from engine.ops.products import PLAIN, Products

_COPY = "copy_in_compute_dtype"
ALIGNMENT_BYTES = 256  # of a copy's address, which matrix products ask for


class Copies:
    """The copies of some parameters, in one buffer and in the parameters' order.

    Args:
        parameters: on one device, in one dtype.
        dtype: that of the copies.
    """

    def __init__(self, parameters: Iterable[Tensor], dtype: torch.dtype) -> None:
        self._parameters = list(parameters)
        self._versions = [-1] * len(self._parameters)
        step = ALIGNMENT_BYTES // dtype.itemsize
        sizes = [-(-parameter.numel() // step) * step for parameter in self._parameters]
        # One buffer, because matrices that follow one another in it are one matrix (`joined`).
        parts = torch.empty(sum(sizes), dtype=dtype, device=self._parameters[0].device).split(sizes)
        self._copies = [
            part[: parameter.numel()].view(parameter.shape)
            for part, parameter in zip(parts, self._parameters, strict=True)
        ]
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            setattr(parameter, _COPY, copy)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy every parameter that was written since, in one kernel; none where nothing was."""
        stale = [
            place
            for place, (parameter, version) in enumerate(zip(self._parameters, self._versions, strict=True))
            if parameter._version != version
        ]
        if stale:
            torch._foreach_copy_([self._copies[at] for at in stale], [self._parameters[at].detach() for at in stale])
            self._versions = [parameter._version for parameter in self._parameters]


def copy_of(parameter: Tensor) -> Tensor | None:
    """The parameter's copy in the dtype of the computation, outside any graph; None where it has none."""
    found: Tensor | None = getattr(parameter, _COPY, None)
    return found


def values_of(parameter: Tensor) -> Tensor:
    """What autograd functions compute with: the copy, or the parameter where it has none."""
    copy = copy_of(parameter)
    return parameter if copy is None else copy


def computed(parameter: Tensor) -> Tensor:
    """The same as part of the graph: the gradient of the copy is that of the parameter, in the parameter's dtype."""
    copy = copy_of(parameter)
    return parameter if copy is None else _Computed.apply(parameter, copy)


class _Computed(torch.autograd.Function):
    """(parameter, its copy) -> the copy."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def linear(x: Tensor, matrices_OI: list[Tensor], biases_O: Sequence[Tensor] = (), products: Products = PLAIN) -> Tensor:
    """`x @ matrix^T` of several matrices beside one another, as one product, and where given plus their biases.

    The gradient of a matrix that has a copy is formed in the matrix's own dtype. Plain products without a copy are left
    to torch.
    """
    bias_O = torch.cat([computed(bias) for bias in biases_O]) if biases_O else None
    if products is PLAIN and copy_of(matrices_OI[0]) is None:
        return F.linear(x, matrices_OI[0] if len(matrices_OI) == 1 else torch.cat(matrices_OI), bias_O)
    values_OI = map(values_of, matrices_OI)
    out_TO = _Linear.apply(x.flatten(0, -2), products, len(matrices_OI), *matrices_OI, *values_OI)
    out = out_TO.unflatten(0, x.shape[:-1])
    return out if bias_O is None else out.add_(bias_O)


class _Linear(torch.autograd.Function):
    """(x_TI, how products are formed, number of matrices, matrices_OI, what is computed with for each) -> x @ W^T."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, products: Products, count: int, *matrices_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, *matrices_OI[count:])
        ctx.products, ctx.dtype, ctx.count = products, matrices_OI[0].dtype, count
        x, matrix = products.operand(x_TI), products.operand(joined(list(matrices_OI[count:])))
        ctx.largest = x.largest, matrix.largest
        return products.output(x, matrix)

    @staticmethod
    def backward(ctx: Any, dout_TO: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product with copies of parameters")
        x_TI, *values_OI = ctx.saved_tensors
        products: Products = ctx.products
        of_x, of_matrices = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3 : 3 + ctx.count])
        dout = products.operand(dout_TO, rows=of_x, columns=of_matrices, gradient=True)
        dx_TI = None
        if of_x:
            matrix = products.operand(joined(values_OI), rows=False, columns=True, largest=ctx.largest[1])
            dx_TI = products.input_gradient(dout, matrix)
            del matrix
        gradients: tuple[Tensor | None, ...] = (None,) * ctx.count
        if of_matrices:
            x = products.operand(x_TI, rows=False, columns=True, largest=ctx.largest[0])
            whole_OI = products.weight_gradient(dout, x, ctx.dtype)
            gradients = whole_OI.split([value.shape[0] for value in values_OI])
        return dx_TI, None, None, *gradients, *(None for _ in values_OI)


def joined(matrices_OI: list[Tensor]) -> Tensor:
    """The matrices one above the other, [sum of O, I]: a view where they follow one another in memory, else a copy."""
    first = matrices_OI[0]
    rows, place = 0, first.storage_offset()
    for matrix in matrices_OI:
        same = matrix.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and matrix.is_contiguous() and matrix.storage_offset() == place):
            return torch.cat(matrices_OI)
        rows, place = rows + matrix.shape[0], place + matrix.numel()
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1), first.storage_offset())
