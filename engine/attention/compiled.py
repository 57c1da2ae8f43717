"""Attention as one operation of a compiled program: `torch.ops.burst.attention`, with a fake implementation.

`torch.compile` sees tensors and one string, the name of mask, context and choices; what the ranks exchange stays inside
the operation, so no graph breaks. Without `torch.compile` the dispatcher is not used: `engine.attention.op` is called
directly, which costs the host less. Forward and backward give the bits of `burst_attention`.

Under a Ulysses schedule backward receives Q, K and V again, as with `recompute`: a compiled program has no place for
received tensors, whose number depends on the plan.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.attention.algorithms.saved import AttentionPlan, SavedOutput
from engine.attention.context import ContextParallel, context_named
from engine.attention.inputs import check_inputs
from engine.attention.masks import Mask
from engine.attention.masks.mask import check_mask
from engine.attention.op import attention_backward, attention_forward
from engine.attention.plan import cached_plan, mask_of
from engine.attention.resolve import Choices, check_choices
from engine.ops.autograd import accumulation_dtype


class _Call(NamedTuple):
    """All that a compiled program does not see."""

    mask: Mask
    context: str  # name of a ContextParallel, which programs do not keep
    choices: Choices
    max_seqlen: int | None  # of documents between boundaries that the program has in a tensor


_calls: dict[str, _Call] = {}
_names: dict[tuple[str, Mask, Choices, int | None], str] = {}
_numbers = itertools.count()


def registered(mask: Mask, cp: ContextParallel, choices: Choices, max_seqlen: int | None = None) -> str:
    """The name of these in compiled programs: the same one for equal ones. Raises ValueError when the mask or
    a choice cannot be."""
    check_mask(mask)
    check_choices(choices)
    choices = choices._replace(recompute=True)  # received tensors are not saved
    key = (cp.name, mask, choices, max_seqlen)
    if key not in _names:
        _names[key] = f"attention {next(_numbers)}"
        _calls[_names[key]] = _Call(mask, cp.name, choices, max_seqlen)
    return _names[key]


def compiled_attention(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    sinks_N: Tensor | None,
    name: str,
    saved: SavedOutput | None,
    cu_seqlens: Tensor | None = None,
    expand_NXC: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out_BLND, lse_BNL), both differentiable; `sinks_N`, `saved`, `cu_seqlens` and `expand_NXC` as of
    `burst_attention`."""
    tensors = q_BLND, k_BLKD, v_BLKD, sinks_N, expand_NXC, name, cu_seqlens
    out_BLND: Tensor
    lse_BNL: Tensor
    if saved is None:
        out_BLND, lse_BNL = torch.ops.burst.attention(*tensors, None, None, 0)
    else:
        out_BLND, lse_BNL = torch.ops.burst.attention(*tensors, saved.out_BLND, saved.lse_BNL, saved.cut)
    return out_BLND, lse_BNL


def _plan(
    name: str,
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    expand_NXC: Tensor | None,
    cu_seqlens: Tensor | None,
    sinks_N: Tensor | None,
) -> AttentionPlan:
    call = _calls[name]
    cp, mask = context_named(call.context), call.mask
    if cu_seqlens is not None:
        with cp.comms.refusals_told():
            mask = mask_of(None, cu_seqlens, call.max_seqlen) or mask
    return cached_plan(q_BLND, k_BLKD, v_BLKD, expand_NXC, mask, cp, call.choices, sinks=sinks_N is not None)


@torch.library.custom_op("burst::attention", mutates_args=())
def _attention(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    sinks_N: Tensor | None,
    expand_NXC: Tensor | None,
    name: str,
    cu_seqlens: Tensor | None,
    saved_out_BLND: Tensor | None,
    saved_lse_BNL: Tensor | None,
    cut: int,
) -> tuple[Tensor, Tensor]:
    saved = None
    if saved_out_BLND is not None and saved_lse_BNL is not None:
        saved = SavedOutput(saved_out_BLND, saved_lse_BNL, cut)
    plan = _plan(name, q_BLND, k_BLKD, v_BLKD, expand_NXC, cu_seqlens, sinks_N)
    number = plan.cp.comms.begin_call()
    out_BLND, lse_BNL = attention_forward(plan, q_BLND, k_BLKD, v_BLKD, sinks_N, expand_NXC, saved, number)
    if saved is not None and cut == 0:
        return out_BLND.clone(), lse_BNL.clone()  # an operation returns none of its inputs
    return out_BLND, lse_BNL


@_attention.register_fake
def _attention_fake(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    _sinks_N: Tensor | None,
    expand_NXC: Tensor | None,
    *_others: object,
) -> tuple[Tensor, Tensor]:
    check_inputs(q_BLND, k_BLKD, v_BLKD, expand_NXC)
    batch, tokens, heads, head_dim = q_BLND.shape
    value_dim = v_BLKD.shape[3]
    if expand_NXC is not None:
        value_dim = expand_NXC.shape[1] - (head_dim - k_BLKD.shape[3])
    lse_BNL = q_BLND.new_empty((batch, heads, tokens), dtype=accumulation_dtype(q_BLND.dtype))
    return q_BLND.new_empty(batch, tokens, heads, value_dim), lse_BNL


@torch.library.custom_op("burst::attention_backward", mutates_args=())
def _attention_backward(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    out_BLND: Tensor,
    lse_BNL: Tensor,
    sinks_N: Tensor | None,
    expand_NXC: Tensor | None,
    dout_BLND: Tensor | None,
    dlse_BNL: Tensor | None,
    name: str,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    plan = _plan(name, q_BLND, k_BLKD, v_BLKD, expand_NXC, cu_seqlens, sinks_N)
    shards, rows = (q_BLND, k_BLKD, v_BLKD), (lse_BNL, sinks_N, expand_NXC, dout_BLND, dlse_BNL)
    dq, dk, dv, *others = attention_backward(plan, shards, out_BLND, *rows)
    # An operation returns tensors only: where there are no sinks, or no matrix, their gradient is empty.
    dsinks, dexpand = (lse_BNL.new_empty(0) if each is None else each for each in others)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dsinks, dexpand


@_attention_backward.register_fake
def _attention_backward_fake(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    _out_BLND: Tensor,
    lse_BNL: Tensor,
    sinks_N: Tensor | None,
    expand_NXC: Tensor | None,
    *_others: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q_BLND, k_BLKD, v_BLKD))
    dsinks, dexpand = (
        lse_BNL.new_empty(0) if each is None else torch.empty_like(each) for each in (sinks_N, expand_NXC)
    )
    return dq, dk, dv, dsinks, dexpand


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_BLND, k_BLKD, v_BLKD, sinks_N, expand_NXC, ctx.name, cu_seqlens, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q_BLND, k_BLKD, v_BLKD, *output, sinks_N, expand_NXC, cu_seqlens)


def _differentiate(ctx: Any, dout_BLND: Tensor | None, dlse_BNL: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, sinks_N, expand_NXC, cu_seqlens = ctx.saved_tensors
    dq, dk, dv, *found = torch.ops.burst.attention_backward(
        *tensors, sinks_N, expand_NXC, dout_BLND, dlse_BNL, ctx.name, cu_seqlens
    )
    dsinks, dexpand = (
        None if given is None else each for given, each in zip((sinks_N, expand_NXC), found, strict=True)
    )
    return dq, dk, dv, dsinks, dexpand, None, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)
