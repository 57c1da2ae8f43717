"""Shared by the autograd functions of the engine: Triton's kernels or torch, the dtype of sums, autocast switched off,
no second derivative."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor

Args = ParamSpec("Args")
Result = TypeVar("Result")

_DEVICE_TYPES = ("cpu", "cuda")  # where the operations run
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the kernels compute in fp32, which float64 exceeds


def kernels_for(tensor: Tensor, module: str) -> Any:
    """The Triton kernels of `module`, or None where the reference implementation in torch has to run.

    A tensor on a CPU, or in a dtype outside `KERNEL_DTYPES`, is left to the reference. `module` is imported only when
    its kernels run, so a machine without GPUs needs no Triton.
    """
    if not tensor.is_cuda or tensor.dtype not in KERNEL_DTYPES:
        return None
    return importlib.import_module(module)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def outside_autocast(operation: Callable[Args, Result]) -> Callable[Args, Result]:
    """`operation` with autocast off on every device: it computes in its arguments' dtypes or wider.

    For forward and backward of an autograd function: backward runs under the autocast of its caller, not that of the
    forward. torch's `custom_fwd` would cast the arguments, serve one device type, and restore the forward's autocast in
    backward.
    """

    @functools.wraps(operation)
    def run(*args: Args.args, **named: Args.kwargs) -> Result:
        if not any(map(torch.is_autocast_enabled, _DEVICE_TYPES)):
            return operation(*args, **named)
        with ExitStack() as off:
            for device_type in _DEVICE_TYPES:
                if torch.is_autocast_enabled(device_type):
                    off.enter_context(torch.autocast(device_type, enabled=False))
            return operation(*args, **named)

    return run


def refuse_second_derivative(operation: str, *sent: Tensor | None) -> None:
    """First line of a backward that computes gradients of `operation` which autograd cannot differentiate.

    torch's `once_differentiable` raises nothing where the incoming gradient is a constant, as that of a loss is: a
    penalty on the gradients is then part of the loss and not of the gradients.

    Args:
        sent: gradients that ranks send, which cannot be batches of them.

    Raises ValueError where backward runs under create_graph, or in a batch.
    """
    if torch.is_grad_enabled():
        raise ValueError(f"create_graph is set and {operation} has no second derivative; take gradients without it")
    if any(
        gradient is not None and (is_legacy_batchedtensor(gradient) or is_functorch_wrapped_tensor(gradient))
        for gradient in sent
    ):
        raise ValueError(
            f"the gradient of {operation} is in a batch of is_grads_batched, vectorize or torch.func, which do not "
            "follow what ranks send; take one gradient at a time"
        )
