"""Copies of parameters in the dtype that a model computes in, kept from one step to the next.

FSDP2 makes such copies of a unit whenever it gathers it, twice a step, and moves its gradients through buffers of its
own. Where one rank holds all parameters nothing has to be gathered: each fp32 parameter has one copy, made once per
step, and gradients are formed in the dtype of the parameter.

A copy is an attribute of its parameter. A parameter without one, such as a gathered one of FSDP2, is computed with as
it is. Shape letters: T tokens, I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

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


def mark_written(parameters: Iterable[Tensor]) -> None:
    """Raise the parameters' versions, by which their copies see what was written: kernels leave them as they are."""
    torch.autograd.graph.increment_version(list(parameters))


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
