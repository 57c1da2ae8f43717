"""Checks of attention's arguments, before any rank waits for another: each raises ValueError.

Any strides are accepted: tensors that a kernel cannot read in place are copied (`laid_out`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16  # of the widest load of a GPU kernel


def check_inputs(q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> None:
    """Raise ValueError unless these are shards of the same positions, with heads that fit, of one kind."""
    if q_BLND.ndim != 4 or k_BLKD.ndim != 4 or k_BLKD.shape != v_BLKD.shape:
        raise ValueError(
            f"q {tuple(q_BLND.shape)}, k {tuple(k_BLKD.shape)}, v {tuple(v_BLKD.shape)} are not [batch, tokens, heads, "
            "head_dim] with equal k and v; reshape them"
        )
    if 0 in q_BLND.shape or 0 in k_BLKD.shape:
        raise ValueError(
            f"q {tuple(q_BLND.shape)} or k {tuple(k_BLKD.shape)} is empty; pass at least one sequence, token and head"
        )
    batch, tokens, heads, head_dim = q_BLND.shape
    if (batch, tokens, head_dim) != (k_BLKD.shape[0], k_BLKD.shape[1], k_BLKD.shape[3]):
        raise ValueError(
            f"q {tuple(q_BLND.shape)} and k {tuple(k_BLKD.shape)} differ in batch, tokens or head_dim; pass shards of "
            "the same positions"
        )
    if heads % k_BLKD.shape[2]:
        raise ValueError(f"{heads} query heads are not divisible by {k_BLKD.shape[2]} KV heads; choose heads that are")
    if not q_BLND.dtype == k_BLKD.dtype == v_BLKD.dtype:
        raise ValueError(f"q, k, v are {q_BLND.dtype}, {k_BLKD.dtype}, {v_BLKD.dtype}; pass one dtype")
    if not q_BLND.dtype.is_floating_point:
        raise ValueError(f"q, k, v are {q_BLND.dtype}; pass a floating-point dtype")
    if not q_BLND.device == k_BLKD.device == v_BLKD.device:
        raise ValueError(f"q, k, v are on {q_BLND.device}, {k_BLKD.device}, {v_BLKD.device}; move them to one device")


def check_scale(scale: float | None) -> None:
    """Raise ValueError unless `scale` is None or a factor that every kernel takes.

    Kernels scale scores after hiding some as -inf, so zero and less would show them again, or give NaN.
    """
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}; give a finite factor above 0, or None for head_dim ** -0.5")


def check_mask(mask: object) -> None:
    """Raise ValueError unless `mask` is a mask rather than its name or its class."""
    if isinstance(mask, type) or not hasattr(mask, "tiles"):
        raise ValueError(
            f"mask is {mask!r}; pass an object of engine.attention.masks such as Causal(), or parse_mask of a setting"
        )


def laid_out(tensor_BLND: Tensor) -> Tensor:
    """A tensor that every kernel and transfer can read: the tensor itself, or a contiguous copy. Differentiable.

    A head's values of one token must be contiguous, from an address that wide loads accept, and no two tokens or heads
    may share them. Other strides are free, so slices of one projection for q, k and v, or tensors with heads before
    tokens, are not copied. Kernels do not check: the CPU's reads past such strides and returns garbage, those of GPUs
    return garbage, raise, or end the process with a misaligned address.
    """
    sizes, strides, item = tensor_BLND.shape[:-1], tensor_BLND.stride(), tensor_BLND.itemsize
    taken = [stride for size, stride in zip(sizes, strides, strict=False) if size > 1]
    contiguous_heads = tensor_BLND.shape[-1] == 1 or strides[-1] == 1
    # Rows of an odd number of bytes are aligned by no copy; no kernel that needs alignment takes them.
    alignable = tensor_BLND.shape[-1] * item % ALIGNMENT_BYTES == 0
    starts = (tensor_BLND.storage_offset(), *taken) if alignable else ()
    if contiguous_heads and 0 not in taken and all(start * item % ALIGNMENT_BYTES == 0 for start in starts):
        return tensor_BLND
    return tensor_BLND.clone(memory_format=torch.contiguous_format)
