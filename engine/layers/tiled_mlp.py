"""The MLP over runs of tokens: only the intermediates of one run exist at a time, and those that are saved.

At 128K tokens per rank and an MLP 11008 wide, one bf16 intermediate is 2.7 GiB, and torch saves four for a SwiGLU's
backward (gate, up, their product, the normed input) and holds six. Here at most gate and up are saved, for the tokens
that are chosen; for the others only the branch's input is. Backward forms the rest of a run again (its norm and its
product take one pass over memory each), and from them the run's gradients, before the next run. The norm before the MLP
is part of the run, and so is the residual sum.

Shape letters: T tokens, E embedding, F MLP width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from engine.layers.recomputed_runs import SaveInputs, in_runs
from engine.models.decoder import MLP, AddMLP, add_whole_mlp
from engine.models.matrices import Norm, normed
from engine.ops import RECOMPUTE
from engine.ops.autograd import refuse_second_derivative
from engine.ops.copies import values_of
from engine.ops.products import PLAIN, Operand, Products
from engine.ops.runs import RecomputedNorm, WeightGradient, run_length, runs, zeros_for_sum


def add_mlp_in(tiles: int, saved: float | None = None) -> AddMLP:
    """The MLP's residual branch in `tiles` runs of tokens.

    T tokens go in runs of ceil(T / tiles), fewer where that is more than a norm takes at once, so there are never more
    runs than tokens, and the last may be shorter. Outputs equal those of the whole to rounding, and so do gradients:
    those of the weights are summed over the runs in fp32 or wider and rounded to the weight's dtype once.

    `saved` is the fraction of the tokens, the last ones, whose gate and up are saved; the others' are computed again.
    None is for a layer that backward recomputes as a whole: nothing is saved, and one tile is left to torch, unless it
    is computed in float8, for which torch would cast inputs once for every matrix.

    An MLP with other features than the hand-written backward has (`ModelShape.plain_mlp`) is recomputed by autograd,
    and torch saves what it wants of the tokens that are kept.
    """

    def add_tiled_mlp(norm: Norm, mlp: MLP, x_BLE: Tensor, branch_BLE: Tensor | None = None) -> Tensor:
        if tiles == 1 and saved is None and mlp.down.products is PLAIN:
            return add_whole_mlp(norm, mlp, x_BLE, branch_BLE)
        if not mlp.plain:
            return _add_by_autograd(tiles, saved, norm, mlp, x_BLE, branch_BLE)
        assert norm is not None, "a plain MLP has a norm before"
        x_TE = x_BLE.flatten(0, -2)
        branch_TE = None if branch_BLE is None else branch_BLE.flatten(0, -2)
        tokens = x_TE.shape[0]
        run = run_length(tokens, x_TE.shape[1], tiles)
        cut = tokens - round((saved or 0.0) * tokens)
        matrices = [mlp.down.weight, mlp.up.weight, *([] if mlp.gate is None else [mlp.gate.weight])]
        weights = (norm.weight, *matrices)
        values = [values_of(weight) for weight in weights]
        saver = None
        if branch_TE is None and torch.is_grad_enabled():
            x_TE = SaveInputs.apply(x_TE, *values)
            saver = x_TE.grad_fn
        products = mlp.down.products
        return _TiledMLP.apply(x_TE, branch_TE, saver, x_BLE.shape, norm.eps, run, cut, products, *weights, *values)

    return add_tiled_mlp


def _add_by_autograd(
    tiles: int, saved: float | None, norm: Norm, mlp: MLP, x_BLE: Tensor, branch_BLE: Tensor | None
) -> Tensor:
    """The residual branch of any MLP: the first tokens in runs that are recomputed, the saved ones at once."""
    x_BLE = x_BLE if branch_BLE is None else x_BLE + branch_BLE
    tokens = x_BLE.shape[1]
    cut = tokens - round((saved or 0.0) * tokens)
    parameters = [*mlp.parameters(), *([] if norm is None else norm.parameters())]

    def compute(run_BTE: Tensor, _: slice) -> tuple[Tensor]:
        return (add_whole_mlp(norm, mlp, run_BTE),)

    def again(run_BTE: Tensor, _: slice) -> tuple[Tensor]:
        return (run_BTE + mlp.for_gradients(normed(norm, run_BTE)),)

    parts = [*(in_runs(compute, parameters, x_BLE[:, :cut], tiles, again) if cut else ())]
    parts += [add_whole_mlp(norm, mlp, x_BLE[:, cut:])] if cut < tokens else []
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class _TiledMLP(torch.autograd.Function):
    """(x_TE, a branch to add to it or none, the node that saves the inputs, shape of x_BLE, eps, tokens of a run, first
    token whose gate and up are saved, how products are formed, weights of norm, down, up, gate or none, and what is
    computed with for each) -> y + mlp(y), y = x + branch; [B, L, E]."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        branch_TE: Tensor | None,
        saver: Any,
        shape: torch.Size,
        eps: float | None,
        run: int,
        cut: int,
        products: Products,
        *weights_and_values: Tensor,
    ) -> Tensor:
        ctx.saver, ctx.eps, ctx.run, ctx.cut, ctx.products = saver, eps, run, cut, products
        weights, values = _halves(weights_and_values)
        ctx.dtypes, ctx.branched = [weight.dtype for weight in weights], branch_TE is not None
        norm_E, *matrices = values
        down, *projections = operands = [products.operand(matrix) for matrix in matrices]
        ctx.known, ctx.known_of_runs = [operand.known for operand in operands], []
        out_BLE = x_TE.new_empty(shape)  # not a view of another tensor, which FSDP2 warns of
        out_TE = out_BLE.flatten(0, -2)
        total_TE = x_TE if branch_TE is None else torch.empty_like(x_TE)
        saved: list[Tensor] = []
        for tokens in _runs(x_TE.shape[0], run, cut):
            if branch_TE is None:
                normed = products.normed(x_TE[tokens], norm_E, eps)
            else:
                normed = products.add_normed(x_TE[tokens], branch_TE[tokens], norm_E, eps, total_TE[tokens])
            ctx.known_of_runs.append(normed.known)
            projected_TF = [products.output(normed, projection) for projection in projections]
            del normed
            hidden = _activated(products, *projected_TF)
            torch.add(total_TE[tokens], products.output(hidden, down), out=out_TE[tokens])
            if tokens.start >= cut:
                saved += projected_TF
            del projected_TF, hidden  # before the next run's are formed
        ctx.save_for_backward(*([total_TE, *values] if saver is None else []), *saved)
        return out_BLE

    @staticmethod
    def backward(ctx: Any, dout_BLE: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("an MLP in tiles")
        dout_TE = dout_BLE.flatten(0, -2)
        saved = list(ctx.saved_tensors)
        if ctx.saver is None:
            count = 1 + len(ctx.dtypes)
            (x_TE, norm_E, *matrices), saved = saved[:count], saved[count:]
        else:
            x_TE, norm_E, *matrices = ctx.saver.saved_tensors
        width = len(matrices) - 1
        dx_TE, dnorm_E = torch.empty_like(x_TE), zeros_for_sum(norm_E)
        of_tokens = list(_runs(x_TE.shape[0], ctx.run, ctx.cut))
        products: Products = ctx.products
        dmatrices = [
            WeightGradient(products, matrix, dtype, single=len(of_tokens) == 1)
            for matrix, dtype in zip(matrices, ctx.dtypes[1:], strict=True)
        ]
        again = of_tokens[0].start < ctx.cut  # some products are formed again
        operands = [
            products.operand(matrix, rows=again and place > 0, columns=True, known=known)
            for place, (matrix, known) in enumerate(zip(matrices, ctx.known, strict=True))
        ]
        for tokens, known in zip(of_tokens, ctx.known_of_runs, strict=True):
            norm = RecomputedNorm(x_TE[tokens], norm_E, ctx.eps)
            projected_TF: list[Tensor] | None = None
            if tokens.start >= ctx.cut:
                projected_TF, saved = saved[:width], saved[width:]
            normed = norm.normed(products, rows=projected_TF is None, known=known)
            dnormed_TE = _mlp_backward(products, dout_TE[tokens], normed, projected_TF, operands, dmatrices)
            del normed
            norm.gradient(dnormed_TE, dnorm_E, residual_TE=dout_TE[tokens], dx_TE=dx_TE[tokens])
            del dnormed_TE  # before the next run's are formed
        gradients = (dnorm_E.to(ctx.dtypes[0]), *(total.rounded() for total in dmatrices))
        dbranch_TE = dx_TE if ctx.branched else None
        return dx_TE, dbranch_TE, None, None, None, None, None, None, *gradients, *(None for _ in ctx.dtypes)


def _halves(tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]


def _runs(tokens: int, run: int, cut: int) -> Iterator[slice]:
    """Runs of the tokens before `cut`, then of those from it on."""
    yield from runs(cut, run)
    for part in runs(tokens - cut, run):
        yield slice(cut + part.start, cut + part.stop)


def _mlp_backward(
    products: Products,
    dout_TE: Tensor,
    normed: Operand,
    saved_TF: list[Tensor] | None,
    matrices: list[Operand],
    dmatrices: list[WeightGradient],
) -> Tensor:
    """The gradient of one run's MLP input; those of the matrices, down first, are added to `dmatrices`. `saved_TF`:
    the products of up, and gate, where they were saved."""
    down, *projections = matrices
    ddown, *dprojections = dmatrices
    dout = products.operand(dout_TE, columns=True, gradient=True)
    dhidden_TF = products.input_gradient(dout, down)
    projected_TF = saved_TF
    if projected_TF is None:
        with record_function(RECOMPUTE):
            projected_TF = [products.output(normed, projection) for projection in projections]
    hidden, *dprojected = _activate_again(products, dhidden_TF, *projected_TF, saved=saved_TF is not None)
    del dhidden_TF, projected_TF
    ddown.add(dout, hidden)
    del hidden, dout
    dnormed_TE: Tensor | None = None
    for projection, dprojection in zip(projections, dprojections, strict=True):
        gradient = dprojected.pop(0)
        dnormed_TE = products.input_gradient(gradient, projection, dnormed_TE)
        dprojection.add(gradient, normed)
        del gradient
    assert dnormed_TE is not None, "an MLP has a first matrix"
    return dnormed_TE


def _activated(products: Products, up_TF: Tensor, gate_TF: Tensor | None = None) -> Operand:
    """`activate`, for the product with down."""
    return products.operand(F.gelu(up_TF)) if gate_TF is None else products.swiglu(gate_TF, up_TF)


def _activate_again(
    products: Products, dhidden_TF: Tensor, up_TF: Tensor, gate_TF: Tensor | None = None, *, saved: bool
) -> list[Operand]:
    """`activate` recomputed, by columns, then the gradients of its arguments, which may overwrite these; not an `up_TF`
    and `gate_TF` that are `saved` tensors, which a second backward may want."""
    if gate_TF is None:
        dup_TF = torch.ops.aten.gelu_backward.grad_input(dhidden_TF, up_TF, grad_input=dhidden_TF)
        hidden_TF = F.gelu(up_TF) if saved else torch.ops.aten.gelu_(up_TF)
        hidden = products.operand(hidden_TF, rows=False, columns=True)
        return [hidden, products.operand(dup_TF, columns=True, gradient=True)]
    hidden, dgate, dup = products.swiglu_again(dhidden_TF, gate_TF, up_TF, saved=saved)
    return [hidden, dup, dgate]
