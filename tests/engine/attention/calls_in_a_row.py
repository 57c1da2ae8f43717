"""Attention calls enqueued one behind the other without waiting, as layers of a model are, against dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine import ContextParallel, burst_attention
from engine.attention.masks import Mask


def worst_error_in_a_row(
    cp: ContextParallel,
    whole: Sequence[torch.Tensor],
    mask: Mask,
    choices: dict[str, Any],
    truths: Sequence[torch.Tensor],
    count: int = 3,
) -> float:
    """Worst relative error, as norms, of out, dq, dk and dv over `count` calls; inf where one is not finite.

    `whole` is q, k, v and dout of the whole sequence, `choices` are `burst_attention`'s, `truths` the dense results.
    """
    q, k, v, dout = (cp.shard(t, 1) for t in whole)
    results = []
    for _ in range(count):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = burst_attention(*leaves, mask=mask, cp=cp, tensor_layout="BSHD", **choices)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    return max(worst_relative_error([cp.unshard(part, 1) for part in result], truths) for result in results)


def worst_relative_error(found: Sequence[torch.Tensor], truths: Sequence[torch.Tensor]) -> float:
    """Worst relative error, as norms, of some tensors; inf where one is not finite, which max() would pass over."""
    errors = [
        (one.double() - truth).norm() / truth.norm().clamp_min(1e-30) for one, truth in zip(found, truths, strict=True)
    ]
    return max(error.item() if torch.isfinite(error) else float("inf") for error in errors)
