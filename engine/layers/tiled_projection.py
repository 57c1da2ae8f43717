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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.recomputed_runs import in_runs
from engine.models.decoder import Attention, Project, Projected, Rotary, project_whole
from engine.models.matrices import Norm, normed
from engine.ops.autograd import refuse_second_derivative
from engine.ops.copies import joined, values_of
from engine.ops.elementwise import rotate_into
from engine.ops.products import PLAIN, Products
from engine.ops.runs import RecomputedNorm, WeightGradient, run_length, runs, zeros_for_sum


def project_in(tiles: int, *, recomputed: bool = True) -> Project:
    """Queries, keys and values in `tiles` runs of tokens.

    A run is within one sequence, so sequences shorter than a run make more runs than `tiles`. Outputs and gradients
    equal those of the whole to rounding; the gradients of the weights are summed over the runs in fp32 or wider and
    rounded to the weight's dtype once.

    `recomputed`: backward recomputes the layer as a whole, so what torch saves here is not held for long, and one tile
    is left to torch, unless it is one sequence in float8, whose norms are cast as they are formed. So is one tile of
    normed queries and keys (Qwen3): torch keeps them as they were before their norm, which would otherwise be projected
    again. Projections with other features than the hand-written backward has (`ModelShape.plain_projection`) are
    recomputed by autograd, and one tile of them is left to torch as well.
    """

    def project_tiled(norm: Norm, attention: Attention, x_BLE: Tensor, rotary: Rotary) -> Projected:
        if not attention.plain:
            if tiles == 1:
                return project_whole(norm, attention, x_BLE, rotary)
            return _project_by_autograd(tiles, norm, attention, x_BLE, rotary)
        if tiles == 1 and recomputed and (attention.q.products is PLAIN or len(x_BLE) > 1):
            return project_whole(norm, attention, x_BLE, rotary)
        if tiles == 1 and attention.q_norm is not None:
            return project_whole(norm, attention, x_BLE, rotary)
        plain, weights, values = PlainProjections.of(norm, attention, x_BLE, tiles)
        return _TiledProjection.apply(x_BLE, *rotary, plain, *weights, *values)

    return project_tiled


def _project_by_autograd(tiles: int, norm: Norm, attention: Attention, x_BLE: Tensor, rotary: Rotary) -> Projected:
    """Queries, keys and values of any form, and attention's gate, in runs of tokens that are recomputed."""
    parts = (norm, *attention.projections())
    parameters = [parameter for part in parts if part is not None for parameter in part.parameters()]

    def compute(run_BTE: Tensor, tokens: slice) -> tuple[Tensor, ...]:
        return attention.project(normed(norm, run_BTE), (rotary[0][tokens], rotary[1][tokens]))

    return *in_runs(compute, parameters, x_BLE, tiles), x_BLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Formed:
    """What is known of the operands of some projections (`Operand.known`)."""

    matrix: tuple[Tensor, ...] = ()
    runs: tuple[tuple[Tensor, ...], ...] = ()  # of the normed input of each


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainProjections:
    """How the plain projections of a layer are computed; `values` are weights of q, k, v, of the norm before them, and
    of the heads' two norms or none, as they are computed with."""

    head_dim: int
    run: int  # tokens of a run
    eps: tuple[float | None, ...]  # of every norm
    dtypes: tuple[torch.dtype, ...]  # of the weights' gradients
    products: Products  # how products are formed

    @classmethod
    def of(
        cls, norm: Norm, attention: Attention, x_BLE: Tensor, tiles: int
    ) -> tuple[PlainProjections, list[Tensor], list[Tensor]]:
        """The projections in `tiles` runs of tokens, their weights, and the values of these."""
        assert norm is not None, "plain projections have a norm before"
        head_norms = [each for each in (attention.q_norm, attention.k_norm) if each is not None]
        matrices = (attention.q.weight, attention.k.weight, attention.v.weight)
        # All heads of a token are normed together, and they may be wider than the token's embedding.
        widest = max(x_BLE.shape[2], matrices[0].shape[0]) if head_norms else x_BLE.shape[2]
        weights = [*matrices, norm.weight, *(each.weight for each in head_norms)]
        found = cls(
            head_dim=attention.head_dim,
            run=run_length(x_BLE.shape[0] * x_BLE.shape[1], widest, tiles),
            eps=tuple(each.eps for each in (norm, *head_norms)),
            dtypes=tuple(weight.dtype for weight in weights),
            products=attention.q.products,
        )
        return found, weights, [values_of(weight) for weight in weights]

    def outputs(
        self, x_BLE: Tensor, rotary: Rotary, values: Sequence[Tensor], heads: Sequence[slice] | None = None
    ) -> tuple[list[Tensor], Formed]:
        """q_BLND, k_BLKD and v_BLKD outside any graph, and what is known of the operands then; `heads`: of the query
        heads, of keys' and of values', those that are formed, by default all."""
        products, matrices, norm_E, head_norms_D = self.products, list(values[:3]), values[3], values[4:]
        if heads is not None:
            matrices = [_rows(matrix, part, self.head_dim) for matrix, part in zip(matrices, heads, strict=True)]
        rows, matrix = [matrix.shape[0] for matrix in matrices], products.operand(joined(matrices))
        outs = [x_BLE.new_empty(*x_BLE.shape[:2], count // self.head_dim, self.head_dim) for count in rows]
        of_runs: list[tuple[Tensor, ...]] = []
        for at in _runs(x_BLE, self.run):
            operand = products.normed(x_BLE[at], norm_E, self.eps[0])
            of_runs.append(operand.known)
            projected = products.output(operand, matrix).split(rows, -1)
            del operand
            for place, (out_BLND, projected_TO) in enumerate(zip(outs, projected, strict=True)):
                projected_TND = projected_TO.unflatten(-1, (-1, self.head_dim))
                if place == 2:  # values are neither normed nor rotated
                    out_BLND[at].copy_(projected_TND)
                    continue
                if head_norms_D:
                    projected_TND = F.rms_norm(
                        projected_TND, (self.head_dim,), head_norms_D[place], self.eps[1 + place]
                    )
                rotate_into(out_BLND[at], projected_TND, (rotary[0][at[1]], rotary[1][at[1]]))
        return outs, Formed(matrix=matrix.known, runs=tuple(of_runs))

    def gradients(
        self,
        x_BLE: Tensor,
        rotary: Rotary,
        values: Sequence[Tensor],
        douts: Sequence[Tensor | None],
        dresidual_BLE: Tensor | None,
        formed: Formed,
    ) -> tuple[Tensor, ...]:
        """Of x_BLE, `dresidual_BLE` included, and of the weights, from those of q_BLND, k_BLKD and v_BLKD. `formed`: by
        `outputs`."""
        cos_LD, sin_LD = rotary
        rows, (norm_E, *head_norms_D) = [value.shape[0] for value in values[:3]], values[3:]
        products, matrix_OE = self.products, joined(list(values[:3]))
        matrix = products.operand(matrix_OE, rows=bool(head_norms_D), columns=True, known=formed.matrix)
        dx_BLE = torch.empty_like(x_BLE)
        of_tokens = list(_runs(x_BLE, self.run))
        dmatrix_OE = WeightGradient(products, matrix_OE, self.dtypes[0], single=len(of_tokens) == 1)
        dnorms = [zeros_for_sum(weight) for weight in values[3:]]
        dnorm_E, *dhead_norms_D = dnorms
        for at, known in zip(of_tokens, formed.runs, strict=True):
            norm = RecomputedNorm(x_BLE[at], norm_E, self.eps[0])
            dprojected_TO = x_BLE.new_empty(x_BLE[at].shape[0], sum(rows))
            operand = norm.normed(products, rows=bool(head_norms_D), known=known)
            projected: tuple[Tensor, ...] = ()
            if head_norms_D:
                projected = products.output(operand, matrix.first(sum(rows[:2]))).split(rows[:2], -1)
            for place, (dout_BLND, part_TO) in enumerate(zip(douts, dprojected_TO.split(rows, -1), strict=True)):
                part_TND = part_TO.unflatten(-1, (-1, self.head_dim))
                if dout_BLND is None:
                    part_TND.zero_()
                elif place == 2:
                    part_TND.copy_(dout_BLND[at])
                else:
                    rotate_into(part_TND, dout_BLND[at], (cos_LD[at[1]], sin_LD[at[1]]), inverse=True)
                    if head_norms_D:
                        again_TND = projected[place].unflatten(-1, (-1, self.head_dim)).contiguous()
                        again = RecomputedNorm(again_TND, head_norms_D[place], self.eps[1 + place])
                        part_TND.copy_(again.gradient(part_TND.contiguous(), dhead_norms_D[place]))
            del projected
            dprojected = products.operand(dprojected_TO, columns=True, gradient=True)
            del dprojected_TO
            dmatrix_OE.add(dprojected, operand)
            del operand
            dnormed_TE = products.input_gradient(dprojected, matrix)
            del dprojected
            residual_TE = None if dresidual_BLE is None else dresidual_BLE[at]
            norm.gradient(dnormed_TE, dnorm_E, residual_TE=residual_TE, dx_TE=dx_BLE[at])
            del dnormed_TE
        of_matrices = dmatrix_OE.rounded().split(rows)
        of_norms = (total.to(dtype) for total, dtype in zip(dnorms, self.dtypes[3:], strict=True))
        return dx_BLE, *of_matrices, *of_norms


def _rows(matrix_OE: Tensor, heads: slice, head_dim: int) -> Tensor:
    return matrix_OE[heads.start * head_dim : heads.stop * head_dim]


class _TiledProjection(torch.autograd.Function):
    """(x_BLE, cos_LD, sin_LD, the projections, their weights, and what is computed with for each) -> q_BLND, k_BLKD,
    v_BLKD, x_BLE.

    x passes through so that its other gradient, that of the residual stream, arrives here and is added in the pass that
    forms the norm's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BLE: Tensor,
        cos_LD: Tensor,
        sin_LD: Tensor,
        plain: PlainProjections,
        *weights_and_values: Tensor,
    ) -> tuple[Tensor, ...]:
        values = weights_and_values[len(plain.dtypes) :]
        ctx.save_for_backward(x_BLE, cos_LD, sin_LD, *values)
        ctx.set_materialize_grads(False)
        outs, ctx.formed = plain.outputs(x_BLE, (cos_LD, sin_LD), values)
        ctx.plain = plain
        return *outs, x_BLE.view_as(x_BLE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a projection in tiles")
        *douts, dresidual_BLE = gradients
        x_BLE, cos_LD, sin_LD, *values = ctx.saved_tensors
        rotary = cos_LD, sin_LD
        dx_BLE, *found = ctx.plain.gradients(x_BLE, rotary, values, douts, dresidual_BLE, ctx.formed)
        return dx_BLE, None, None, None, *found, *(None for _ in found)


def _runs(x_BLE: Tensor, run: int) -> Iterator[tuple[int, slice]]:
    return itertools.product(range(x_BLE.shape[0]), runs(x_BLE.shape[1], run))
