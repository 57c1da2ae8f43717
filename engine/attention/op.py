"""BurstAttention: attention over a sequence that lives on many ranks. The autograd function is written once.

`plan_attention` resolves every choice into a plan; a plan knows how to compute (out, lse) and the gradients from this
rank's shards. There are two: a pass around a ring (`engine.attention.algorithms.ring`), and an exchange of heads for tokens
around such a pass (`engine.attention.algorithms.ulysses`).

Shape letters: B batch, S whole sequence, L this rank's tokens, N query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.attention.accumulate.output import row_dot
from engine.attention.algorithms.ring import RingPlan
from engine.attention.algorithms.saved import SavedOutput
from engine.attention.algorithms.ulysses import UlyssesPlan
from engine.attention.comm.all_to_all import token_runs_in_order
from engine.attention.context import ContextParallel
from engine.attention.geometry.ring import RingTraffic
from engine.attention.inputs import check_inputs, check_mask, check_scale, laid_out
from engine.attention.kernels import Problem, choose_kernel
from engine.attention.kernels.stand_in import AnyDelta
from engine.attention.masks import Causal, Mask, band_kinds
from engine.attention.planning.comm_plan import traffic_left
from engine.attention.planning.comm_volume import GRAD_COMM_DTYPES, Shards, narrowed
from engine.attention.planning.cost_model import (
    BACKWARD_SIDES,
    ULYSSES_SCHEDULES,
    HardwareModel,
    Workload,
    choose_num_head_chunks,
    choose_schedule,
    schedule_unsupported_reason,
)
from engine.autocast import outside_autocast
from engine.second_derivative import refuse_second_derivative

AttentionPlan = RingPlan | UlyssesPlan


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
        saved: SavedOutput | None,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        kept: tuple[Tensor, ...] = (q_BLND, k_BLKD, v_BLKD)
        ctx.plan, ctx.as_given = plan, recompute or saved is not None
        ctx.set_materialize_grads(False)  # a gradient of zeros for an LSE that nobody used would be summed for nothing
        if ctx.as_given:
            out_BLND, lse_BNL = _forward(plan, q_BLND, k_BLKD, v_BLKD, saved)
        else:
            with plan.cp.collective():
                out_BLND, lse_BNL, kept = plan.forward_keeping(q_BLND, k_BLKD, v_BLKD)
        ctx.save_for_backward(out_BLND, lse_BNL, *kept)
        # Autograd wants fresh outputs, not its own inputs back; a view costs nothing.
        return (out_BLND.view_as(out_BLND), lse_BNL.view_as(lse_BNL)) if saved is not None else (out_BLND, lse_BNL)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dout_BLND: Tensor | None, dlse_BNL: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention")  # what backward_side is out of autograd's sight
        out_BLND, lse_BNL, *kept = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        dout_BLND = torch.zeros_like(out_BLND) if dout_BLND is None else laid_out(dout_BLND.contiguous())
        # d lse / d score is the probability itself, so a gradient of LSE enters exactly where delta leaves.
        delta_BNL = row_dot(dout_BLND, out_BLND)
        del out_BLND  # of a layer computed again nobody else holds it, and the gradients are about to want the room
        if dlse_BNL is not None:
            _check_takes_lse_gradient(plan)
            delta_BNL -= dlse_BNL
        with plan.cp.collective():
            if ctx.as_given:
                q_BLND, k_BLKD, v_BLKD = kept
                gradients = plan.backward(q_BLND, k_BLKD, v_BLKD, dout_BLND, lse_BNL, delta_BNL)
            else:
                gradients = plan.backward_kept(tuple(kept), dout_BLND, lse_BNL, delta_BNL)
        return *gradients, None, None, None


def _check_takes_lse_gradient(plan: AttentionPlan) -> None:
    """Raise ValueError when the plan is for an LSE that is not differentiated and its kernel would get this wrong."""
    kernel = (plan.inner if isinstance(plan, UlyssesPlan) else plan).kernel
    if not kernel.takes_delta:
        raise ValueError(
            f"the LSE has a gradient and this plan for kernel {kernel.name} was made for one without; plan it with "
            "lse_gradient=True"
        )


def _forward(
    plan: AttentionPlan, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, saved: SavedOutput | None
) -> tuple[Tensor, Tensor]:
    """(out_BLND, lse_BNL), computed for the rows that are not saved."""
    if saved is None:
        with plan.cp.collective():
            return plan.forward(q_BLND, k_BLKD, v_BLKD)
    if saved.cut == 0:
        return saved.tensors
    with plan.cp.collective():
        out_BHND, lse_BNH = plan.before(saved.cut).forward(q_BLND, k_BLKD, v_BLKD)
    rows = out_BHND.shape[1] + saved.out_BLND.shape[1]
    if rows != q_BLND.shape[1]:
        raise ValueError(
            f"saved holds {saved.out_BLND.shape[1]} rows from position {saved.cut} on and {out_BHND.shape[1]} lie "
            f"before it, but q has {q_BLND.shape[1]}; pass what save_suffix returned for these shards"
        )
    return torch.cat((out_BHND, saved.out_BLND), dim=1), torch.cat((lse_BNH, saved.lse_BNL), dim=2)


def plan_attention(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    *,
    mask: Mask,
    cp: ContextParallel,
    scale: float | None = None,
    kernel: str = "auto",
    schedule: str = "auto",
    backward: str = "auto",
    exchange: str = "auto",
    deterministic: bool = False,
    grad_comm_dtype: str = "fp32",
    num_head_chunks: int | None = None,
    recompute: bool = False,
    lse_gradient: bool = True,
) -> AttentionPlan:
    """Resolve every `auto` for shards of this shape, dtype and device. Raises ValueError when nothing fits.

    Without `lse_gradient` backward need not look for a gradient of the LSE: some kernels wait for the answer. The other
    arguments are those of `burst_attention`.
    """
    batch, tokens, heads, head_dim = q_BLND.shape
    kv_heads, seq_len = k_BLKD.shape[2], tokens * cp.size
    cp.segments(seq_len)  # refuses lengths the layout cannot split
    if backward not in ("auto", *BACKWARD_SIDES):
        raise ValueError(f"backward {backward!r} is unknown; choose auto, query or key_value")
    if grad_comm_dtype not in GRAD_COMM_DTYPES:
        raise ValueError(f"grad_comm_dtype {grad_comm_dtype!r} is unknown; choose one of {', '.join(GRAD_COMM_DTYPES)}")
    narrow = narrowed(grad_comm_dtype)[cp.node_size < cp.size]  # at the slowest links
    estimated = schedule == "auto" and q_BLND.is_cuda and backward == exchange == "auto"
    share = Workload(
        cp_size=cp.size,
        node_size=cp.node_size,
        heads=heads,
        kv_heads=kv_heads,
        query_bytes=q_BLND.numel() * q_BLND.itemsize,
        gradient_factor=1.0 if narrow else max(4, q_BLND.itemsize) / q_BLND.itemsize,
        forward_flops=4.0 * batch * heads * head_dim * mask.area(seq_len) / cp.size,
        rows=batch * tokens,
        left=traffic_left(mask, cp.layout, cp.size, cp.node_size, seq_len) if estimated else RingTraffic(),
        recompute=recompute,
    )
    # Asking for the link may mean measuring it: only where the model has something to decide, and never where a run
    # must repeat bit for bit: another measurement could lead to another schedule, which sums in another order.
    open_parts = q_BLND.is_cuda and schedule in ULYSSES_SCHEDULES and num_head_chunks is None
    link = cp.link(q_BLND.device, fixed=deterministic) if estimated or open_parts else None
    hardware = HardwareModel() if link is None else HardwareModel(across_gib=link.gib)
    estimate = None
    if schedule == "auto":
        # The hardware behind the estimate are a GPU's; elsewhere, and where a ring's own switches are set, it is a ring.
        if estimated:
            estimate = choose_schedule(share, cp.layout.name, hardware)
        schedule = estimate.best if estimate else "ring" if cp.node_size == cp.size else "double_ring"
    unsupported_reason = schedule_unsupported_reason(schedule, share, cp.layout.name)
    if unsupported_reason:
        raise ValueError(unsupported_reason)

    inner, traded, parts = cp, 1, 1
    if schedule in ULYSSES_SCHEDULES:
        trade, members, inner = cp.all_to_all(schedule, exchange, q_BLND.device)
        traded = len(members)
        # The hardware that make parts worth their launches are a GPU's too.
        chosen_parts = choose_num_head_chunks(schedule, share, hardware) if q_BLND.is_cuda else 1
        parts = chosen_parts if num_head_chunks is None else num_head_chunks
        if parts < 1 or kv_heads // traded % parts:
            raise ValueError(
                f"num_head_chunks {parts} does not divide the {kv_heads // traded} KV heads of a rank under schedule "
                f"{schedule}; give a number that does"
            )
        ring = inner.ring("double_ring" if inner.node_size < inner.size else "ring")
    else:
        ring = cp.ring(schedule)
    problem = Problem(
        device=q_BLND.device,
        dtype=q_BLND.dtype,
        heads=heads // traded // parts,
        kv_heads=kv_heads // traded // parts,
        head_dim=head_dim,
        bands=band_kinds(mask, inner.layout, seq_len, inner.size),
        deterministic=deterministic,
    )
    attend = choose_kernel(kernel, problem)
    if lse_gradient and not attend.takes_delta:
        attend = AnyDelta(attend)
    around = RingPlan(
        cp=inner,
        mask=mask,
        ring=ring,
        exchange=inner.choose_exchange(exchange, ring, q_BLND.device),
        kernel=attend,
        backward_side="query" if backward == "auto" else backward,
        seq_len=seq_len,
        shards=Shards.of(problem, attend, batch, seq_len // inner.size, grad_comm_dtype),
        scale=head_dim**-0.5 if scale is None else scale,
        deterministic=deterministic,
        grad_comm_dtype=grad_comm_dtype,
        estimate=estimate,
        link=link,
    )
    if backward == "auto":
        around = around.by_cheaper_route(hardware)
    if schedule not in ULYSSES_SCHEDULES:
        return around
    token_runs = token_runs_in_order(tuple(cp.layout.segments(seq_len, cp.size, rank) for rank in members))
    return UlyssesPlan(
        cp=cp, members=members, schedule=schedule, heads=trade, token_runs=token_runs, inner=around, parts=parts
    )


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
        BrokenContext: an earlier call on `cp` failed halfway (`engine.attention.call_order` has both).
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
            out_BLND, lse_BNL = outside_autocast(_forward)(plan, q_BLND, k_BLKD, v_BLKD, saved)
    return (out_BLND, lse_BNL) if return_lse else out_BLND
