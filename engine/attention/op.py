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
from engine.attention.inputs import check_inputs, check_mask, check_scale, laid_out
from engine.attention.masks import Causal, Mask
from engine.attention.resolve import plan_attention
from engine.ops.autograd import outside_autocast, refuse_second_derivative


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
        # d lse / d score is the probability itself, so a gradient of LSE enters exactly where delta leaves.
        delta_BNL = row_dot(dout_BLND, out_BLND)
        del out_BLND  # of a layer computed again this is the last reference, and the gradients need the memory
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

    Its inputs' dtype alone says what is computed in what: autocast around the call or its backward changes nothing.
    Tensors of strides that kernels do not read are copied (`engine.attention.inputs.laid_out`).

    Args:
        q_BLND: this rank's queries, [batch, local tokens, query heads, head_dim], positions as `cp.layout` deals them.
        k_BLKD, v_BLKD: this rank's keys and values; the number of KV heads divides the number of query heads.
        mask: who sees whom in global positions; causal when None.
        cp: the ranks that share the sequence; a group of one when None.
        scale: factor of the scores; head_dim ** -0.5 when None.
        kernel: auto, reference, cpu, fa2, cudnn, fa4 or flex.
        schedule: ring, double_ring, ulysses, usp, usp_transposed (see `engine.attention.planning.cost_model`), or
            auto: on GPUs the one a cost model finds cheapest, elsewhere a ring.
        exchange: how they travel inside a lap: relay, direct, copy_engine, or auto for the fastest the links allow.
        backward: side that backward_side in backward: query, key_value, or auto for the one whose bytes take less time.
        deterministic: repeat bit for bit, from run to run: no choice rests on a measurement; refused by kernels that
            cannot.
        grad_comm_dtype: fp32: sums of gradients cross links in fp32 and a single kernel result as the kernel wrote it;
            input_across: a node's sum crosses a double ring between nodes, once, in the inputs' dtype; input: all do.
        num_head_chunks: where heads are traded, how many parts they come in, one travelling while another is computed; the
            cost model's choice when None.
        saved: what `engine.attention.algorithms.saved.save_suffix` kept of an earlier call with the same inputs: the forward is
            computed again for the other rows alone.
        recompute: under activation checkpointing, a call that will be repeated with `saved`. Both then leave the same
            tensors to backward; otherwise heads that were traded for tokens are kept as they arrived.
        return_lse: also return lse_BNL, the natural-log sum-exp of scaled scores; it is differentiable. The same on
            every rank, as all choices are. With kernels cpu, cudnn and fa2, backward takes twice the time for tiles in
            which some row's gradient comes by LSE alone, or nearly so.

    Returns:
        out_BLND in the inputs' dtype, or (out_BLND, lse_BNL). A query that sees no key gives 0, lse -inf, no gradient.

    Raises:
        ValueError: tensors that do not fit each other, a scale that is not above 0, a length the layout cannot split,
            or a choice this machine cannot run.
        PeerLost: another rank's tensors did not come within the timeout of `cp`'s process group.
        BrokenContext: an earlier call on `cp` failed halfway (`engine.attention.comm.call_order` has both).
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
    """`burst_attention` with its choices already made. Where no gradient will be asked for, nothing is kept for one."""
    q_BLND, k_BLKD, v_BLKD = (laid_out(tensor) for tensor in (q_BLND, k_BLKD, v_BLKD))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q_BLND, k_BLKD, v_BLKD)):
        out_BLND, lse_BNL = _BurstAttention.apply(q_BLND, k_BLKD, v_BLKD, plan, saved, recompute)
    else:
        with torch.no_grad():
            out_BLND, lse_BNL, _ = outside_autocast(_forward)(plan, q_BLND, k_BLKD, v_BLKD, saved, save=False)
    return (out_BLND, lse_BNL) if return_lse else out_BLND
