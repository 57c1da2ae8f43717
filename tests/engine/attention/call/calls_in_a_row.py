"""Attention calls enqueued one behind the other without waiting, as layers of a model are, against dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from engine import ContextParallel, burst_attention
from engine.attention.masks import Mask
from engine.measurement import relative_errors


def worst_error_in_a_row(
    cp: ContextParallel,
    whole: Sequence[torch.Tensor],
    mask: Mask,
    choices: dict[str, Any],
    truths: Sequence[torch.Tensor],
    count: int = 3,
    sinks_N: torch.Tensor | None = None,
) -> float:
    """Worst relative error, as norms, of out, dq, dk, dv and dsinks over `count` calls. Where queries see themselves
    alone, dq and dk are 0 and what rounding leaves of delta - dP is measured in terms of its two sides.

    `whole` is q, k, v and dout of the whole sequence, `choices` are `burst_attention`'s, `truths` the dense results.
    """
    q, k, v, dout = (cp.shard(t, 1) for t in whole)
    results = []
    for _ in range(count):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        sinks = [] if sinks_N is None else [sinks_N.clone().requires_grad_()]
        out = burst_attention(
            *leaves, mask=mask, cp=cp, sinks_N=sinks[0] if sinks else None, tensor_layout="BSHD", **choices
        )
        results.append((out.detach(), *torch.autograd.grad(out, leaves + sinks, dout)))
    for result in results:
        for dsinks_N in result[4:]:
            dist.all_reduce(dsinks_N)
    two_sides = (whole[3].double().norm() * whole[2].double().abs().max() * whole[1].double().abs().max()).item()
    errors = []
    for result in results:
        found = [*(cp.unshard(part, 1) for part in result[:4]), *result[4:]]
        nothing = [part for part, truth in zip(found[1:3], truths[1:3], strict=True) if not truth.any()]
        errors += [part.double().norm().item() / two_sides for part in nothing]
        other = [number for number in range(len(found)) if number not in (1, 2) or truths[number].any()]
        errors += relative_errors([found[number] for number in other], [truths[number] for number in other])
    return max(errors)
