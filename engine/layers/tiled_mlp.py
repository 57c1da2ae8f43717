"""The MLP over runs of tokens, so that only the intermediates of one run exist at a time.

At 128K tokens per rank and an MLP 11008 wide, one bf16 intermediate is 2.7 GiB and a SwiGLU's backward holds six. Only
the branch's input is saved; backward recomputes the intermediates of a run, and from them the run's gradients, before
the next run: three of them at a time on GPUs, where the gradients overwrite them. The norm before the MLP is part of
the run, and so is the residual sum.

Shape letters: T tokens, E embedding, F MLP width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from engine.model import MLP, AddMLP, activate, add_whole_mlp
from engine.ops.autograd import refuse_second_derivative
from engine.ops.ranges import RECOMPUTE
from engine.ops.runs import RecomputedNorm, add_product, run_length, runs, zeros_for_sum
from engine.ops.swiglu import swiglu_again


def add_mlp_in(tiles: int) -> AddMLP:
    """The MLP's residual branch in `tiles` runs of tokens; 1 is the whole at once, as torch does it.

    T tokens go in runs of ceil(T / tiles), fewer where that is more than a norm takes at once, so there are never more
    runs than tokens, and the last may be shorter. Outputs equal those of the whole to rounding, and so do gradients:
    those of the weights are summed over the runs in fp32 or wider and rounded to the weight's dtype once.
    """
    if tiles == 1:
        return add_whole_mlp

    def add_tiled_mlp(norm: nn.RMSNorm, mlp: MLP, x_BLE: Tensor) -> Tensor:
        x_TE = x_BLE.flatten(0, -2)
        run = run_length(x_TE.shape[0], x_TE.shape[1], tiles)
        matrices = [mlp.down.weight, mlp.up.weight, *([] if mlp.gate is None else [mlp.gate.weight])]
        weights = (norm.weight, *matrices)
        if torch.is_grad_enabled():
            # Saved before anything is computed: torch's non-reentrant checkpoint ends a layer's recomputation with the
            # last tensor that backward needs, so the recomputation never runs the MLP.
            x_TE = _SaveInputs.apply(x_TE, *weights)
        return _TiledMLP.apply(x_TE, x_TE.grad_fn, x_BLE.shape, norm.eps, run, *weights)

    return add_tiled_mlp


class _SaveInputs(torch.autograd.Function):
    """The identity, which saves its arguments for `_TiledMLP`'s backward."""

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x_TE, *weights)
        return x_TE.view_as(x_TE)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        return grad_TE, *(None for _ in ctx.needs_input_grad[1:])


class _TiledMLP(torch.autograd.Function):
    """(x_TE, the node that saves the inputs, shape of x_BLE, eps, tokens of a run, weights of norm, down, up, gate or
    none) -> x + mlp(x), [B, L, E]."""

    @staticmethod
    def forward(
        ctx: Any, x_TE: Tensor, saver: Any, shape: torch.Size, eps: float | None, run: int, *weights: Tensor
    ) -> Tensor:
        ctx.saver, ctx.eps, ctx.run = saver, eps, run
        norm_E, down_EF, *projections_FE = weights
        out_BLE = x_TE.new_empty(shape)  # not a view of another tensor, which FSDP2 warns of
        out_TE = out_BLE.flatten(0, -2)
        for tokens in runs(x_TE.shape[0], run):
            normed_TE = F.rms_norm(x_TE[tokens], norm_E.shape, norm_E, eps)
            hidden_TF = activate(*(F.linear(normed_TE, weight_FE) for weight_FE in projections_FE))
            torch.add(x_TE[tokens], F.linear(hidden_TF, down_EF), out=out_TE[tokens])
        return out_BLE

    @staticmethod
    def backward(ctx: Any, dout_BLE: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("an MLP in tiles")
        dout_TE = dout_BLE.flatten(0, -2)
        x_TE, norm_E, *matrices = ctx.saver.saved_tensors
        dx_TE = torch.empty_like(x_TE)
        dnorm_E, *dmatrices = (zeros_for_sum(weight) for weight in (norm_E, *matrices))
        for tokens in runs(x_TE.shape[0], ctx.run):
            norm = RecomputedNorm(x_TE[tokens], norm_E, ctx.eps)
            dnormed_TE = _mlp_backward(dout_TE[tokens], norm.normed_TE, matrices, dmatrices)
            torch.add(dout_TE[tokens], norm.gradient(dnormed_TE, dnorm_E), out=dx_TE[tokens])
        return dx_TE, None, None, None, None, *(total.to(norm_E.dtype) for total in (dnorm_E, *dmatrices))


def _mlp_backward(dout_TE: Tensor, normed_TE: Tensor, matrices: list[Tensor], dmatrices: list[Tensor]) -> Tensor:
    """The gradient of one run's MLP input; those of the matrices, down first, are added to `dmatrices`."""
    down_EF, *projections_FE = matrices
    ddown_EF, *dprojections_FE = dmatrices
    with record_function(RECOMPUTE):
        projected_TF = [F.linear(normed_TE, weight_FE) for weight_FE in projections_FE]
    hidden_TF, *dprojected_TF = _activate_again(dout_TE @ down_EF, *projected_TF)
    del projected_TF
    add_product(ddown_EF, dout_TE, hidden_TF)
    del hidden_TF
    dnormed_TE = dprojected_TF[0] @ projections_FE[0]
    for d_TF, weight_FE in zip(dprojected_TF[1:], projections_FE[1:], strict=True):
        dnormed_TE.addmm_(d_TF, weight_FE)
    for dprojection_FE, d_TF in zip(dprojections_FE, dprojected_TF, strict=True):
        add_product(dprojection_FE, d_TF, normed_TE)
    return dnormed_TE


def _activate_again(dhidden_TF: Tensor, up_TF: Tensor, gate_TF: Tensor | None = None) -> tuple[Tensor, ...]:
    """`activate` recomputed, then the gradients of its arguments, which the results may overwrite."""
    if gate_TF is None:
        return F.gelu(up_TF), torch.ops.aten.gelu_backward(dhidden_TF, up_TF)
    hidden_TF, dgate_TF, dup_TF = swiglu_again(dhidden_TF, gate_TF, up_TF)
    return hidden_TF, dup_TF, dgate_TF
