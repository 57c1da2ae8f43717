"""Grouped heads for kernels that want as many KV heads as query heads: repeated locally, never before a transfer."""

from __future__ import annotations

from torch import Tensor


def repeat_heads(kv_BMKD: Tensor, heads: int) -> Tensor:
    """KV heads repeated to `heads`: query head n reads KV head n // (N / K)."""
    groups = heads // kv_BMKD.shape[2]
    return kv_BMKD if groups == 1 else kv_BMKD.repeat_interleave(groups, dim=2)


def sum_heads(grad_BMND: Tensor, kv_heads: int) -> Tensor:
    """Gradients of repeated KV heads summed back to `kv_heads`, in fp32 or wider."""
    groups = grad_BMND.shape[2] // kv_heads
    if groups == 1:
        return grad_BMND
    wide = grad_BMND if grad_BMND.itemsize >= 4 else grad_BMND.float()
    return wide.unflatten(2, (kv_heads, groups)).sum(dim=3)
