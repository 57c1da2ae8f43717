"""A part of a layer over runs of tokens, of which backward computes each again by autograd.

This serves every form of projection and MLP that `tiled_projection` and `tiled_mlp` have no hand-written backward for.
Only the part's input is saved; forward and backward hold the intermediates of one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from engine.ops import RECOMPUTE
from engine.ops.autograd import refuse_second_derivative
from engine.ops.runs import runs, zeros_for_sum

# (x of a run [B, T, E], its tokens among the L) -> tensors [B, T, ...]
RunFn = Callable[[Tensor, slice], tuple[Tensor, ...]]


def in_runs(
    compute: RunFn, parameters: Sequence[Tensor], x_BLE: Tensor, tiles: int, again: RunFn | None = None
) -> tuple[Tensor, ...]:
    """The results of `compute` for all tokens, [B, L, ...] each, in `tiles` runs of every sequence's tokens.

    `parameters` are those that `compute` reads. `again` is what backward runs for the gradients, by default the same;
    the numbers that it returns are not read. Outputs and gradients equal those of the whole to rounding; the
    gradients of parameters are summed over the runs in fp32 or wider and rounded once.
    """
    saver = None
    if torch.is_grad_enabled():
        x_BLE = SaveInputs.apply(x_BLE)
        saver = x_BLE.grad_fn
    size = -(-x_BLE.shape[1] // tiles)
    results: tuple[Tensor, ...] = _InRuns.apply(compute, again or compute, size, saver, x_BLE, *parameters)
    return results


class SaveInputs(torch.autograd.Function):
    """(x, other tensors) -> x, which saves all of them for the backward of the function that x is given to.

    Before anything is computed: torch's non-reentrant checkpoint ends a layer's recomputation with the last tensor that
    backward needs, so the recomputation of a layer never runs that function.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(x, *others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *(None for _ in ctx.needs_input_grad[1:])


class _InRuns(torch.autograd.Function):
    """(what computes a run, what backward runs in its place, tokens of a run, the node that saves x, x_BLE, parameters)
    -> results for all tokens."""

    @staticmethod
    def forward(
        ctx: Any, compute: RunFn, again: RunFn, size: int, saver: Any, x_BLE: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.again, ctx.size, ctx.saver, ctx.parameters = again, size, saver, parameters
        ctx.set_materialize_grads(False)
        results: list[Tensor] = []
        for tokens in runs(x_BLE.shape[1], size):
            parts = compute(x_BLE[:, tokens], tokens)
            if not results:
                results = [part.new_empty(*x_BLE.shape[:2], *part.shape[2:]) for part in parts]
            for result, part in zip(results, parts, strict=True):
                result[:, tokens].copy_(part)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a part of a layer in runs")
        (x_BLE,) = ctx.saver.saved_tensors
        # FSDP2 has gathered the parameters again, in the tensors of the forward.
        needed = [each for each in ctx.parameters if each.requires_grad]
        sums = [zeros_for_sum(each) for each in needed]
        dx_BLE = torch.empty_like(x_BLE)
        for tokens in runs(x_BLE.shape[1], ctx.size):
            with torch.enable_grad():
                run_BTE = x_BLE[:, tokens].detach().requires_grad_()
                with record_function(RECOMPUTE):
                    parts = ctx.again(run_BTE, tokens)
            pairs = [(part, grad[:, tokens]) for part, grad in zip(parts, gradients, strict=True) if grad is not None]
            found = torch.autograd.grad(
                [part for part, _ in pairs], [run_BTE, *needed], [grad for _, grad in pairs], allow_unused=True
            )
            dx_BLE[:, tokens].copy_(found[0])
            for total, part in zip(sums, found[1:], strict=True):
                if part is not None:
                    total += part
        of = {id(each): total.to(each.dtype) for each, total in zip(needed, sums, strict=True)}
        return None, None, None, None, dx_BLE, *(of.get(id(each)) for each in ctx.parameters)
