"""Checks of attention's arguments, before any rank waits for another: each raises ValueError.

Strides are not refused: `engine.attention.op.laid_out` copies tensors that a kernel could not read.
"""

from __future__ import annotations

import math

from torch import Tensor


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
