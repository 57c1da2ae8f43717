"""BurstAttention: attention over a sequence that is sharded over many ranks. The autograd function is written once.

`engine.attention.resolve` turns settings into a plan; a plan computes (out, LSE) and the gradients from this rank's
shards, as ring attention (`engine.attention.algorithms.ring`) or as Ulysses around it
(`engine.attention.algorithms.ulysses`).

Shape letters: B batch, S whole sequence, L this rank's tokens, N query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.attention.accumulate.accumulators import row_dot
from engine.attention.algorithms.saved import AttentionPlan, Saved, SavedOutput
from engine.attention.context import ContextParallel
from engine.attention.inputs import check_inputs, check_mask, check_scale
from engine.attention.masks import Causal, Mask
from engine.attention.resolve import plan_attention
from engine.old_names import renamed_keywords
from engine.ops.autograd import outside_autocast, refuse_second_derivative

ALIGNMENT_BYTES = 16  # of the widest load of a GPU kernel


class _BurstAttention(torch.autograd.Function):
    """Tensors and one plan in, (out, lse) out; both are differentiable."""

    @staticmethod
    @outside_autocast
    def forward(
        ctx: Any,
        q_BLND: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        plan: AttentionPlan,
        saved_output: SavedOutput | None,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # zeros for an unused LSE's gradient would be summed for nothing
        out_BLND, lse_BNL, saved = _forward(plan, q_BLND, k_BLKD, v_BLKD, saved_output, save=not recompute)
        ctx.plan, ctx.gathered = plan, saved.gathered
        ctx.save_for_backward(out_BLND, lse_BNL, *saved.tensors)
        # Autograd wants fresh outputs, not its own inputs back; a view costs nothing.
        if saved_output is not None:
            return out_BLND.view_as(out_BLND), lse_BNL.view_as(lse_BNL)
        return out_BLND, lse_BNL

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dout_BLND: Tensor | None, dlse_BNL: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention")  # autograd does not see what the ranks exchange
        out_BLND, lse_BNL, *tensors = ctx.saved_tensors
        dout_BLND = torch.zeros_like(out_BLND) if dout_BLND is None else laid_out(dout_BLND.contiguous())
        # d lse / d score is the probability itself, so the gradient of the LSE is subtracted from delta.
        delta_BNL = row_dot(dout_BLND, out_BLND)
        del out_BLND  # in a recomputed layer the last reference to O: the gradients need its memory
        if dlse_BNL is not None:
            ctx.plan.check_takes_lse_gradient()
            delta_BNL -= dlse_BNL
        with ctx.plan.cp.collective():
            gradients = ctx.plan.backward(Saved(tuple(tensors), ctx.gathered), dout_BLND, lse_BNL, delta_BNL)
        return *gradients, None, None, None


def _forward(
    plan: AttentionPlan,
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    saved_output: SavedOutput | None,
    *,
    save: bool,
) -> tuple[Tensor, Tensor, Saved]:
    """(out_BLND, lse_BNL, saved), with attention computed only for the rows that are not in `saved_output`."""
    if saved_output is None:
        with plan.cp.collective():
            return plan.forward(q_BLND, k_BLKD, v_BLKD, save=save)
    shards = Saved((q_BLND, k_BLKD, v_BLKD))
    if saved_output.cut == 0:
        return *saved_output.tensors, shards
    with plan.cp.collective():
        out_BHND, lse_BNH, _ = plan.before(saved_output.cut).forward(q_BLND, k_BLKD, v_BLKD, save=False)
    rows = out_BHND.shape[1] + saved_output.out_BLND.shape[1]
    if rows != q_BLND.shape[1]:
        raise ValueError(
            f"saved holds {saved_output.out_BLND.shape[1]} rows from position {saved_output.cut} on and "
            f"{out_BHND.shape[1]} lie before it, but q has {q_BLND.shape[1]}; pass what save_suffix returned for these "
            "shards"
        )
    out_BLND = torch.cat((out_BHND, saved_output.out_BLND), dim=1)
    return out_BLND, torch.cat((lse_BNH, saved_output.lse_BNL), dim=2), shards


@renamed_keywords
def burst_attention(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    *,
    mask: Mask | None = None,
    cp: ContextParallel | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    schedule: str = "auto",
    backward: str = "auto",
    exchange: str = "auto",
    deterministic: bool = False,
    grad_comm_dtype: str = "fp32",
    num_head_chunks: int | None = None,
    saved: SavedOutput | None = None,
    recompute: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention of this rank's queries over the whole sequence. Collective over `cp`.

    The inputs' dtype alone decides the precision: autocast around the call or its backward changes nothing. Tensors
    with strides that kernels cannot read are copied (`laid_out`).

    Args:
        q_BLND: this rank's queries, [batch, local tokens, query heads, head_dim], positions as `cp.layout` says.
        k_BLKD, v_BLKD: this rank's keys and values; the number of KV heads divides the number of query heads.
        mask: visible (query, key) pairs, in global positions; causal when None.
        cp: the ranks that share the sequence; a group of one when None.
        scale: factor of the scores; head_dim ** -0.5 when None.
        kernel: auto, reference, cpu, fa2, cudnn, fa4 or flex.
        schedule: ring, double_ring, ulysses, usp, usp_transposed (see `engine.attention.planning.cost_model`), or
            auto: on GPUs the one a cost model finds cheapest, elsewhere a ring.
        exchange: how chunks move inside a node: relay (p2p ring), direct (all-pairs p2p), copy_engine, or auto for the
            fastest that the links allow.
        backward: the side that is sent in backward: query, key_value, or auto for the one whose bytes take less time.
        deterministic: repeat bit for bit, from run to run: no choice rests on a measurement; refused by kernels that
            cannot.
        grad_comm_dtype: dtype in which gradients are sent. fp32: sums in fp32, the result of one kernel call as the
            kernel wrote it; input_across: between nodes in the inputs' dtype, once; input: everywhere so.
        num_head_chunks: under a Ulysses schedule, the number of chunks of a rank's heads: one is sent while another is
            computed. The cost model's choice when None.
        saved: result of `engine.attention.algorithms.saved.save_suffix` on an earlier call with the same inputs: only
            the other rows are computed again.
        recompute: under activation checkpointing, set on both calls, the first and the one repeated with `saved`, so
            that both save the same tensors. Without it, Ulysses saves Q, K and V as they were received.
        return_lse: also return lse_BNL, the natural-log sum-exp of scaled scores; it is differentiable. The same on
            every rank, as all choices are. With kernels cpu, cudnn and fa2, backward takes twice the time for tiles in
            which some row's gradient comes by LSE alone, or nearly so.

    Returns:
        out_BLND in the inputs' dtype, or (out_BLND, lse_BNL). A query that sees no key gives 0, lse -inf, no gradient.

    Raises:
        ValueError: tensors that do not fit each other, a scale that is not above 0, a length the layout cannot split,
            or a choice this machine cannot run.
        PeerLost: another rank's tensors did not come within the timeout of `cp`'s process group.
        BrokenContext: an earlier call on `cp` failed halfway (`engine.attention.comm.p2p` has both).
    """
    mask = Causal() if mask is None else mask
    check_inputs(q_BLND, k_BLKD, v_BLKD)
    check_scale(scale)
    check_mask(mask)
    plan = plan_attention(
        q_BLND,
        k_BLKD,
        mask=mask,
        cp=cp or ContextParallel.single(),
        scale=scale,
        kernel=kernel,
        schedule=schedule,
        backward=backward,
        exchange=exchange,
        deterministic=deterministic,
        grad_comm_dtype=grad_comm_dtype,
        num_head_chunks=num_head_chunks,
        recompute=recompute,
        lse_gradient=return_lse,
    )
    return run_attention(plan, q_BLND, k_BLKD, v_BLKD, saved=saved, recompute=recompute, return_lse=return_lse)


def run_attention(
    plan: AttentionPlan,
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    *,
    saved: SavedOutput | None = None,
    recompute: bool = False,
    return_lse: bool = False,
) -> Any:
    """`burst_attention` with a plan that was made before. Without a gradient to compute, no tensor is saved."""
    q_BLND, k_BLKD, v_BLKD = (laid_out(tensor) for tensor in (q_BLND, k_BLKD, v_BLKD))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q_BLND, k_BLKD, v_BLKD)):
        out_BLND, lse_BNL = _BurstAttention.apply(q_BLND, k_BLKD, v_BLKD, plan, saved, recompute)
    else:
        with torch.no_grad():
            out_BLND, lse_BNL, _ = outside_autocast(_forward)(plan, q_BLND, k_BLKD, v_BLKD, saved, save=False)
    return (out_BLND, lse_BNL) if return_lse else out_BLND


def laid_out(tensor_BLND: Tensor) -> Tensor:
    """A tensor that every kernel and transfer can read: the tensor itself, or a contiguous copy. Differentiable.

    A head's values of one token must be contiguous, from an address that wide loads accept, and no two tokens or heads
    may share them. Other strides are free, so slices of one projection for q, k and v, or tensors with heads before
    tokens, are not copied. Kernels do not check: the CPU's reads past such strides and returns garbage, those of GPUs
    return garbage, raise, or end the process with a misaligned address.
    """
    sizes, strides, item = tensor_BLND.shape[:-1], tensor_BLND.stride(), tensor_BLND.itemsize
    taken = [stride for size, stride in zip(sizes, strides, strict=False) if size > 1]
    contiguous_heads = tensor_BLND.shape[-1] == 1 or strides[-1] == 1
    # Rows of an odd number of bytes are aligned by no copy; no kernel that asks for alignment takes them.
    alignable = tensor_BLND.shape[-1] * item % ALIGNMENT_BYTES == 0
    starts = (tensor_BLND.storage_offset(), *taken) if alignable else ()
    if contiguous_heads and 0 not in taken and all(start * item % ALIGNMENT_BYTES == 0 for start in starts):
        return tensor_BLND
    return tensor_BLND.clone(memory_format=torch.contiguous_format)
