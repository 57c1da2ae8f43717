"""The one place that decides between a Triton kernel and its reference implementation in torch."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the kernels compute in fp32, which float64 exceeds


def kernels_for(tensor: Tensor, module: str) -> Any:
    """The Triton kernels of `module`, or None where the reference implementation in torch has to run.

    A tensor on a CPU, or in a dtype outside `KERNEL_DTYPES`, is left to the reference. `module` is imported only when
    its kernels run, so a machine without GPUs needs no Triton.
    """
    if not tensor.is_cuda or tensor.dtype not in KERNEL_DTYPES:
        return None
    return importlib.import_module(module)
