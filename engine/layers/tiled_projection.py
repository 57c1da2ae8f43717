"""Norm, projections and rotation before attention over runs of tokens: only queries, keys and values exist whole.

Computed at once, a layer saves the normed hidden states besides its input for the gradients of the three matrices, and
forms queries and keys twice, before and after their rotation. Here only the layer's input is saved. Backward takes a
run, recomputes its normed states, rotates the gradients of its queries and keys back, and forms the run's gradients: it
holds the intermediates of one run. Normed queries and keys (Qwen3) are projected again, because the gradient of their
norm needs its input.

Shape letters: B sequences, L tokens of each held here, T tokens of a run, E embedding, N query heads, K KV heads,
D head dim, O outputs of a projection.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model import Attention, Project, Rotary, project_whole
from engine.ops.autograd import refuse_second_derivative
from engine.ops.rotary import rotate_into
from engine.ops.runs import RecomputedNorm, WeightGradient, run_length, runs, zeros_for_sum


def project_in(tiles: int, *, recomputed: bool = True) -> Project:
    """Queries, keys and values in `tiles` runs of tokens.

    A run is within one sequence, so sequences shorter than a run make more runs than `tiles`. Outputs and gradients
    equal those of the whole to rounding; the gradients of the weights are summed over the runs in fp32 or wider and
    rounded to the weight's dtype once.

    `recomputed`: backward recomputes the layer as a whole, so what torch saves here is not held for long, and one tile
    is left to torch. So is one tile of normed queries and keys (Qwen3): torch keeps them as they were before their
    norm, which would otherwise be projected again.
    """
    if tiles == 1 and recomputed:
        return project_whole

    def project_tiled(
        norm: nn.RMSNorm, attention: Attention, x_BLE: Tensor, rotary: Rotary
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_norms = [each for each in (attention.q_norm, attention.k_norm) if each is not None]
        if tiles == 1 and head_norms:
            return project_whole(norm, attention, x_BLE, rotary)
        eps = tuple(each.eps for each in (norm, *head_norms))
        matrices = (attention.q.weight, attention.k.weight, attention.v.weight)
        # All heads of a token are normed together, and they may be wider than the token's embedding.
        widest = max(x_BLE.shape[2], matrices[0].shape[0]) if head_norms else x_BLE.shape[2]
        run = run_length(x_BLE.shape[0] * x_BLE.shape[1], widest, tiles)
        norms = (norm.weight, *(each.weight for each in head_norms))
        return _TiledProjection.apply(x_BLE, *rotary, attention.head_dim, run, eps, *matrices, *norms)

    return project_tiled


class _TiledProjection(torch.autograd.Function):
    """(x_BLE, cos_LD, sin_LD, D, tokens of a run, epsilon of every norm, weights of q, k, v, of the norm before them,
    and of the heads' two norms or none) -> q_BLND, k_BLKD, v_BLKD."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BLE: Tensor,
        cos_LD: Tensor,
        sin_LD: Tensor,
        head_dim: int,
        run: int,
        eps: tuple[float | None, ...],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_BLE, cos_LD, sin_LD, *weights)
        ctx.head_dim, ctx.run, ctx.eps = head_dim, run, eps
        matrices_OE, (norm_E, *head_norms_D) = weights[:3], weights[3:]
        outs = tuple(x_BLE.new_empty(*x_BLE.shape[:2], weight.shape[0] // head_dim, head_dim) for weight in matrices_OE)
        for at in _runs(x_BLE, run):
            normed_TE = F.rms_norm(x_BLE[at], norm_E.shape, norm_E, eps[0])
            for place, (out_BLND, matrix_OE) in enumerate(zip(outs, matrices_OE, strict=True)):
                if place == 2:  # values are neither normed nor rotated
                    torch.mm(normed_TE, matrix_OE.T, out=out_BLND[at].flatten(1))
                    continue
                projected_TND = F.linear(normed_TE, matrix_OE).unflatten(-1, (-1, head_dim))
                if head_norms_D:
                    projected_TND = F.rms_norm(projected_TND, (head_dim,), head_norms_D[place], eps[1 + place])
                rotate_into(out_BLND[at], projected_TND, (cos_LD[at[1]], sin_LD[at[1]]))
        return outs

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a projection in tiles")
        x_BLE, cos_LD, sin_LD, *weights = ctx.saved_tensors
        matrices_OE, (norm_E, *head_norms_D) = weights[:3], weights[3:]
        dx_BLE = torch.empty_like(x_BLE)
        of_tokens = list(_runs(x_BLE, ctx.run))
        dmatrices_OE = [WeightGradient(single=len(of_tokens) == 1) for _ in matrices_OE]
        dnorms = [zeros_for_sum(weight) for weight in weights[3:]]
        dnorm_E, *dhead_norms_D = dnorms
        for at in of_tokens:
            norm = RecomputedNorm(x_BLE[at], norm_E, ctx.eps[0])
            dnormed_TE: Tensor | None = None
            for place, (dout_BLND, matrix_OE) in enumerate(zip(douts, matrices_OE, strict=True)):
                dprojected_TND = dout_BLND[at]
                if place < 2:
                    turned_TND = torch.empty_like(dprojected_TND, memory_format=torch.contiguous_format)
                    rotate_into(turned_TND, dprojected_TND, (cos_LD[at[1]], sin_LD[at[1]]), inverse=True)
                    dprojected_TND = turned_TND
                    if head_norms_D:
                        projected_TND = F.linear(norm.normed_TE, matrix_OE).unflatten(-1, (-1, ctx.head_dim))
                        again = RecomputedNorm(projected_TND, head_norms_D[place], ctx.eps[1 + place])
                        dprojected_TND = again.gradient(dprojected_TND, dhead_norms_D[place])
                dprojected_TO = dprojected_TND.flatten(1)
                dmatrices_OE[place].add(dprojected_TO, norm.normed_TE)
                if dnormed_TE is None:
                    dnormed_TE = dprojected_TO @ matrix_OE
                else:
                    dnormed_TE.addmm_(dprojected_TO, matrix_OE)
            assert dnormed_TE is not None
            dx_BLE[at] = norm.gradient(dnormed_TE, dnorm_E)
        rounded = [total.rounded(norm_E.dtype) for total in dmatrices_OE] + [total.to(norm_E.dtype) for total in dnorms]
        return dx_BLE, None, None, None, None, None, *rounded


def _runs(x_BLE: Tensor, run: int) -> Iterator[tuple[int, slice]]:
    return itertools.product(range(x_BLE.shape[0]), runs(x_BLE.shape[1], run))
