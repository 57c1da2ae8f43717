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
        out = burst_attention(*leaves, mask=mask, cp=cp, **choices)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    worst = 0.0
    for result in results:
        for part, truth in zip(result, truths, strict=True):
            error = (cp.unshard(part, 1).double() - truth).norm() / truth.norm().clamp_min(1e-30)
            worst = max(worst, error.item() if torch.isfinite(error) else float("inf"))
    return worst
