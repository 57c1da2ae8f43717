"""Which form of an elementwise pass takes a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the kernels compute in fp32: float64 is not theirs


def kernels_for(tensor: Tensor) -> Any:
    """The module of Triton kernels when `tensor` is theirs to handle, else None."""
    if not tensor.is_cuda or tensor.dtype not in KERNEL_DTYPES:
        return None
    # Only here: a machine without GPUs needs no Triton.
    from engine.elementwise import kernels_triton

    return kernels_triton
