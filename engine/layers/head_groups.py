"""Norm, projections and attention of a layer that is computed again, with a group of heads at a time in backward.

Where attention's output was kept, the recomputation of a layer needs no queries, keys or values: here it forms none.
Backward forms those of a few heads from the layer's input, and attention's gradients of these heads, before the next
few. So of all heads the output and the gradients are there, and no queries, keys and values, no sums that a kernel
forms in fp32. Untied head chunks as in UPipe (arXiv:2602.21196), there for the exchange of heads among ranks; here of
one rank, with grouped heads beside the K/V head that they read.

Shape letters: B sequences, L tokens of each held here, N query heads, K KV heads, D head dim, E embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from engine.attention.algorithms.saved import Attend, OnceAndAgain, SavedOutput
from engine.layers.tiled_projection import Formed, PlainProjections
from engine.models.decoder import AttendGroups, Attention, Rotary
from engine.models.matrices import Norm
from engine.ops import RECOMPUTE
from engine.ops.autograd import refuse_second_derivative
from engine.ops.runs import runs


def attend_in(heads_at_once: int, tiles: int) -> AttendGroups:
    """Attention's output before its last matrix, and the residual stream, with so many KV heads at once in backward,
    at last perhaps fewer, and the query heads that read them. Projections go in `tiles` runs of tokens. Only of plain
    projections (`ModelShape.plain_projection`).

    Output and gradients equal those of all heads at once: what one head gives depends on no other head, and the
    gradients of all heads are there before the projections' own are formed.
    """

    def attended(
        norm: Norm, attention: Attention, x_BLE: Tensor, rotary: Rotary, again: OnceAndAgain
    ) -> tuple[Tensor, Tensor]:
        plain, weights, values = PlainProjections.of(norm, attention, x_BLE, tiles)
        of_layer = _Layer(
            attend=again.attend, copies=again.copies, passed=again.passed, heads_at_once=heads_at_once, plain=plain
        )
        residual: list[Tensor] = []

        def compute(kept: SavedOutput | None) -> tuple[Tensor, Tensor]:
            tensors = (None, None) if kept is None else kept.tensors
            cut = 0 if kept is None else kept.cut
            out_BLND, lse_BNL, x = _InGroups.apply(x_BLE, *rotary, of_layer, *tensors, cut, *weights, *values)
            residual.append(x)
            return out_BLND, lse_BNL

        out_BLND, _ = again.once(compute)
        return out_BLND, residual[0]

    return attended


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """What a pass through one layer needs beside tensors: of `OnceAndAgain` not what it has saved, which the graph's
    nodes would hold to the end of backward."""

    attend: Attend
    copies: bool
    passed: Callable[[], None]
    heads_at_once: int  # KV heads
    plain: PlainProjections


class _InGroups(torch.autograd.Function):
    """(x_BLE, cos_LD, sin_LD, a layer, kept out_BLND and lse_BNL or none, where they begin, weights of the projections,
    and what is computed with for each) -> out_BLND, lse_BNL, x_BLE, which passes through as in `tiled_projection`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BLE: Tensor,
        cos_LD: Tensor,
        sin_LD: Tensor,
        of_layer: _Layer,
        out_BLND: Tensor | None,
        lse_BNL: Tensor | None,
        cut: int,
        *weights_and_values: Tensor,
    ) -> tuple[Tensor, ...]:
        plain = of_layer.plain
        values = weights_and_values[len(plain.dtypes) :]
        if out_BLND is None or lse_BNL is None or cut:
            kept = None if out_BLND is None or lse_BNL is None else SavedOutput(out_BLND, lse_BNL, cut)
            qkv, _formed = plain.outputs(x_BLE, (cos_LD, sin_LD), values)
            out_BLND, lse_BNL = of_layer.attend(*qkv, saved=kept)
        ctx.save_for_backward(x_BLE, cos_LD, sin_LD, out_BLND, lse_BNL, *values)
        ctx.set_materialize_grads(False)
        ctx.of_layer = of_layer
        lse_view_BNL = lse_BNL.view_as(lse_BNL)
        ctx.mark_non_differentiable(lse_view_BNL)
        return out_BLND.view_as(out_BLND), lse_view_BNL, x_BLE.view_as(x_BLE)

    @staticmethod
    def backward(
        ctx: Any, dout_BLND: Tensor | None, _: Tensor | None, dresidual_BLE: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention in groups of heads")
        x_BLE, cos_LD, sin_LD, out_BLND, lse_BNL, *values = ctx.saved_tensors
        of_layer, rotary, head_dim = ctx.of_layer, (cos_LD, sin_LD), ctx.of_layer.plain.head_dim
        heads = [value.shape[0] // head_dim for value in values[:3]]
        shared = heads[0] // heads[1]  # query heads of a KV head
        whole = [x_BLE.new_empty(*x_BLE.shape[:2], count, head_dim) for count in heads[1:]]
        # The gradient of a group's queries may take the place of its output, which no other group needs.
        reused = of_layer.copies and out_BLND.is_contiguous()
        whole.insert(0, out_BLND if reused else torch.empty_like(out_BLND))
        dout_BLND = torch.zeros_like(out_BLND) if dout_BLND is None else dout_BLND
        formed: Formed | None = None
        for keys in runs(heads[1], of_layer.heads_at_once):
            queries = slice(keys.start * shared, keys.stop * shared)
            parts = queries, keys, keys
            with record_function(RECOMPUTE):
                qkv, formed = of_layer.plain.outputs(x_BLE, rotary, values, parts)
            qkv = [each.requires_grad_() for each in qkv]
            kept = SavedOutput(out_BLND[:, :, queries].contiguous(), lse_BNL[:, queries].contiguous())
            with torch.enable_grad():
                of_group_BLND, _lse = of_layer.attend(*qkv, saved=kept)
            del kept
            found = torch.autograd.grad(of_group_BLND, qkv, dout_BLND[:, :, queries])
            for total, part, gradient in zip(whole, parts, found, strict=True):
                total[:, :, part].copy_(gradient)
            del qkv, of_group_BLND, _lse, found
        del out_BLND, lse_BNL
        assert formed is not None, "there is a group"
        dx_BLE, *of_weights = of_layer.plain.gradients(x_BLE, rotary, values, whole, dresidual_BLE, formed)
        # Not earlier, when the gradients need the memory of what comes from the host.
        del whole
        of_layer.passed()
        return dx_BLE, *(None for _ in range(6)), *of_weights, *(None for _ in of_weights)
