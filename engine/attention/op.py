"""BurstAttention: attention over a sequence that is sharded over many ranks. The autograd function is written once.

`engine.attention.prepared` has the public calls and `engine.attention.plan` turns their settings into a plan. A plan
computes (out, LSE) and the gradients from this rank's shards, as ring attention (`engine.attention.algorithms.ring`) or
as Ulysses around it (`engine.attention.algorithms.ulysses`). Where one kernel call is the whole problem, nothing but
that call runs.

A sink is one more key of every query, without a value: a logit of its own per head (gpt-oss). It is applied here, after
a plan's forward: lse' = logaddexp(lse, sink) and out' = out * exp(lse - lse'). Backward is then that of any attention
with more keys elsewhere, from lse' and delta = rowsum(dO * out'), so no kernel and no schedule knows of sinks.

A latent in place of K and V is expanded by the plan (`engine.attention.algorithms.latent`).

Shape letters: B batch, S whole sequence, L this rank's tokens, N query heads, K KV heads, D head dim, which V, O and
dO may have as one of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from engine.attention.accumulate.accumulators import row_dot
from engine.attention.algorithms.latent import Expansion
from engine.attention.algorithms.saved import AttentionPlan, Saved, SavedOutput
from engine.attention.inputs import Result
from engine.attention.kernels import WholeInputs
from engine.ops.autograd import outside_autocast, refuse_second_derivative

QKV: TypeAlias = tuple[Tensor, Tensor, Tensor]  # q_BLND, k_BLKD, v_BLKD of this rank

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
        sinks_N: Tensor | None,
        expand_NXC: Tensor | None,
        plan: AttentionPlan,
        saved_output: SavedOutput | None,
        recompute: bool,
        call: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # zeros for an unused LSE's gradient would be summed for nothing
        ctx.plan, ctx.call, shards = plan, call, (q_BLND, k_BLKD, v_BLKD)
        plan = plan if expand_NXC is None else _expanding(plan, q_BLND, k_BLKD, expand_NXC)
        out_BLND, lse_BNL, saved = _forward(plan, shards, sinks_N, saved_output, ctx.call, save=not recompute)
        ctx.gathered = saved.gathered
        ctx.save_for_backward(out_BLND, lse_BNL, sinks_N, expand_NXC, *saved.tensors)
        # Autograd wants fresh outputs, not its own inputs back; a view costs nothing.
        if saved_output is not None:
            return out_BLND.view_as(out_BLND), lse_BNL.view_as(lse_BNL)
        return out_BLND, lse_BNL

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dout_BLND: Tensor | None, dlse_BNL: Tensor | None) -> tuple[Tensor | None, ...]:
        sent = (dout_BLND, dlse_BNL) if ctx.plan.cp.size > 1 else ()
        refuse_second_derivative("attention", *sent)  # autograd does not see what the ranks exchange
        out_BLND, lse_BNL, sinks_N, expand_NXC, *tensors = ctx.saved_tensors
        plan = ctx.plan if expand_NXC is None else _expanding(ctx.plan, tensors[0], tensors[1], expand_NXC)
        owned, saved = [out_BLND], Saved(tuple(tensors), ctx.gathered)
        del out_BLND
        found = _gradients(plan, saved, owned, lse_BNL, sinks_N, dout_BLND, dlse_BNL, ctx.call)
        return *found, None if expand_NXC is None else _matrix_gradient(plan, expand_NXC), None, None, None, None


class _OneCall(torch.autograd.Function):
    """A problem that is one kernel call, without the LSE: as `_BurstAttention`, with the least work of the host."""

    @staticmethod
    def forward(ctx: Any, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, plan: AttentionPlan) -> Tensor:
        out_BLND, lse_BNL = _whole_forward(plan, q_BLND, k_BLKD, v_BLKD)
        ctx.plan = plan
        ctx.save_for_backward(out_BLND, lse_BNL, q_BLND, k_BLKD, v_BLKD)
        return out_BLND

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dout_BLND: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention")
        out_BLND, lse_BNL, *tensors = ctx.saved_tensors
        return *_whole_backward(ctx.plan, tensors, out_BLND, lse_BNL, laid_out(dout_BLND.contiguous())), None


@outside_autocast
def _whole_forward(plan: AttentionPlan, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
    """(out_BLND in the inputs' dtype, lse_BNL) by the one kernel call of `plan.one_call`."""
    assert plan.one_call is not None
    out_BLND, lse_BNL = plan.kernel.forward(q_BLND, k_BLKD, v_BLKD, plan.one_call, plan.scale)
    if out_BLND.dtype is not q_BLND.dtype:  # `to` of the same dtype takes host time
        out_BLND = out_BLND.to(q_BLND.dtype)
    return out_BLND.contiguous(), lse_BNL.contiguous()


def _whole_backward(
    plan: AttentionPlan, shards: Sequence[Tensor], out_BLND: Tensor, lse_BNL: Tensor, dout_BLND: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_BLND, dk_BLKD, dv_BLKD) by one kernel call, which forms delta of O and dO itself."""
    q_BLND, k_BLKD, v_BLKD = shards
    assert plan.one_call is not None
    found = plan.kernel.backward_of_whole(
        WholeInputs(q_BLND, out_BLND, dout_BLND, lse_BNL, k_BLKD, v_BLKD),
        plan.one_call,
        plan.scale,
        plan.choice.choices.deterministic,
    )
    if plan.kernel.writes_input_dtype:
        return found
    dq_BLND, dk_BLKD, dv_BLKD = (gradient.to(q_BLND.dtype) for gradient in found)
    return dq_BLND, dk_BLKD, dv_BLKD


def _gradients(
    plan: AttentionPlan,
    saved: Saved,
    owned_out: list[Tensor],
    lse_BNL: Tensor,
    sinks_N: Tensor | None,
    dout_BLND: Tensor | None,
    dlse_BNL: Tensor | None,
    call: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq_BLND, dk_BLKD, dv_BLKD, dsinks_N). `owned_out` holds O alone, and is emptied where the gradients need its
    memory; `call` is the number of the forward's call."""
    out_BLND = owned_out.pop()
    dout_BLND = torch.zeros_like(out_BLND) if dout_BLND is None else laid_out(dout_BLND.contiguous())
    if plan.one_call is not None and dlse_BNL is None and plan.kernel.takes_output:
        dsinks_N = None if sinks_N is None else _sink_gradient(sinks_N, lse_BNL, row_dot(dout_BLND, out_BLND))
        return *_whole_backward(plan, saved.tensors, out_BLND, lse_BNL, dout_BLND), dsinks_N
    # d lse / d score is the probability itself, so the gradient of the LSE is subtracted from delta.
    delta_BNL = row_dot(dout_BLND, out_BLND)
    del out_BLND  # in a recomputed layer the last reference to O: the gradients need its memory
    if dlse_BNL is not None:
        if not plan.kernel.takes_delta:
            raise ValueError(
                f"the LSE has a gradient and this plan for kernel {plan.kernel.name} was made for one without; plan it "
                "with lse_gradient=True"
            )
        delta_BNL -= dlse_BNL
    dsinks_N = None if sinks_N is None else _sink_gradient(sinks_N, lse_BNL, delta_BNL)
    with plan.cp.collective(call, plan=plan.cp.plan_number, backward=True):
        return *plan.backward(saved, dout_BLND, lse_BNL, delta_BNL), dsinks_N


def _expanding(plan: AttentionPlan, q_BLND: Tensor, shared_BL1R: Tensor, expand_NXC: Tensor) -> AttentionPlan:
    """The plan of one pass in which a matrix forms K and V."""
    return replace(plan, expansion=Expansion.of(q_BLND, shared_BL1R, expand_NXC))


def _matrix_gradient(plan: AttentionPlan, expand_NXC: Tensor) -> Tensor:
    """dexpand_NXC of a pass that is over."""
    assert plan.expansion is not None, "a pass with a matrix has one"
    return plan.expansion.gradient().to(expand_NXC.dtype)


def _with_sinks(out_BLND: Tensor, lse_BNL: Tensor, sinks_N: Tensor) -> tuple[Tensor, Tensor]:
    """(out_BLND, in place, and lse_BNL) of rows that see a sink as well. A sink of -inf is none."""
    final_BNL = torch.logaddexp(lse_BNL, sinks_N.to(lse_BNL.dtype)[:, None])
    weight_BNL = (lse_BNL - final_BNL.masked_fill(final_BNL == -torch.inf, 0)).exp()
    return out_BLND.mul_(weight_BNL.transpose(1, 2).unsqueeze(-1)), final_BNL


def _sink_gradient(sinks_N: Tensor, lse_BNL: Tensor, delta_BNL: Tensor) -> Tensor:
    """dsinks_N, summed over this rank's tokens: a sink's probability times -delta, as of a key whose value is 0."""
    logits_N1 = sinks_N.to(lse_BNL.dtype)[:, None]
    p_BNL = (logits_N1 - lse_BNL.masked_fill(lse_BNL == -torch.inf, 0)).exp()
    return -(p_BNL * delta_BNL).sum(dim=(0, 2)).to(sinks_N.dtype)


@outside_autocast
def attention_forward(
    plan: AttentionPlan,
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    sinks_N: Tensor | None,
    expand_NXC: Tensor | None,
    saved: SavedOutput | None,
    call: int,
) -> tuple[Tensor, Tensor]:
    """(out_BLND, lse_BNL) of `run_attention`, outside autograd. `call`: its number."""
    with torch.no_grad():
        shards = laid_out(q_BLND), laid_out(k_BLKD), laid_out(v_BLKD)
        plan = plan if expand_NXC is None else _expanding(plan, q_BLND, k_BLKD, expand_NXC)
        out_BLND, lse_BNL, _ = _forward(plan, shards, sinks_N, saved, call, save=False)
    return out_BLND, lse_BNL


@outside_autocast
def attention_backward(
    plan: AttentionPlan,
    shards: QKV,
    out_BLND: Tensor,
    lse_BNL: Tensor,
    sinks_N: Tensor | None,
    expand_NXC: Tensor | None,
    dout_BLND: Tensor | None,
    dlse_BNL: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(dq_BLND, dk_BLKD, dv_BLKD, dsinks_N, dexpand_NXC) of `run_attention`, outside autograd, from its inputs and
    results."""
    with torch.no_grad():
        saved = Saved(tuple(laid_out(shard) for shard in shards))
        # A compiled program holds no number of its calls: their backwards are told apart by their order alone.
        plan = plan if expand_NXC is None else _expanding(plan, shards[0], shards[1], expand_NXC)
        found = _gradients(plan, saved, [out_BLND], lse_BNL, sinks_N, dout_BLND, dlse_BNL, call=0)
        return *found, None if expand_NXC is None else _matrix_gradient(plan, expand_NXC)


def _forward(
    plan: AttentionPlan, shards: QKV, sinks_N: Tensor | None, saved_output: SavedOutput | None, call: int, *, save: bool
) -> tuple[Tensor, Tensor, Saved]:
    """(out_BLND, lse_BNL, saved), with attention computed only for the rows that are not in `saved_output`."""
    if saved_output is not None:
        return *_joined_forward(plan, shards, sinks_N, saved_output, call), Saved(shards)
    if plan.one_call is not None:
        out_BLND, lse_BNL, saved = *_whole_forward(plan, *shards), Saved(shards)
    else:
        with plan.cp.collective(call, plan=plan.cp.plan_number):
            out_BLND, lse_BNL, saved = plan.forward(*shards, save=save)
    if sinks_N is None:
        return out_BLND, lse_BNL, saved
    return *_with_sinks(out_BLND, lse_BNL, sinks_N), saved.with_sinks(sinks_N)


def _joined_forward(
    plan: AttentionPlan, shards: QKV, sinks_N: Tensor | None, saved_output: SavedOutput, call: int
) -> tuple[Tensor, Tensor]:
    """(out_BLND, lse_BNL) of rows that are computed, followed by those of `saved_output`, which are final.

    Raises ValueError for a result of another call, and on all ranks where theirs begin at different positions.
    """
    cp, number = plan.cp, 0
    try:  # no context manager, which would take host time in every call
        saved_output.check(plan, shards[0], sinks_N)
    except ValueError as error:
        cp.comms.refuse(error)
        raise
    if cp.size > 1:
        said = {"q": tuple(shards[0].shape), "saved_from": saved_output.cut}
        number = cp.comms.agree(tuple(said.values()), said)
    if saved_output.cut == 0:
        return saved_output.tensors
    # Ranks that come with different results after all take no message of each other.
    with cp.collective(call, plan=cp.plan_number + (number << 8)):
        out_BHND, lse_BNH, _ = plan.before(saved_output.cut).forward(*shards, save=False)
    if sinks_N is not None:
        out_BHND, lse_BNH = _with_sinks(out_BHND, lse_BNH, sinks_N)
    out_BLND = torch.cat((out_BHND, saved_output.out_BLND), dim=1)
    return out_BLND, torch.cat((lse_BNH, saved_output.lse_BNL), dim=2)


def run_attention(
    plan: AttentionPlan,
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    sinks_N: Tensor | None = None,
    expand_NXC: Tensor | None = None,
    *,
    saved: SavedOutput | None = None,
    recompute: bool = False,
    return_lse: bool = False,
) -> Result:
    """`burst_attention` with a plan that was made before. Without a gradient to compute, no tensor is saved."""
    q_BLND, k_BLKD, v_BLKD = laid_out(q_BLND), laid_out(k_BLKD), laid_out(v_BLKD)
    inputs = q_BLND, k_BLKD, v_BLKD, sinks_N, expand_NXC
    differentiable = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs)
    call = plan.cp.comms.begin_call() if plan.cp.size > 1 else 0  # also where nothing is sent: ranks count alike
    if sinks_N is None and saved is None and not return_lse and plan.one_call is not None and plan.kernel.takes_output:
        if differentiable:
            out_BLND: Tensor = _OneCall.apply(q_BLND, k_BLKD, v_BLKD, plan)
            return out_BLND
        return _whole_forward(plan, q_BLND, k_BLKD, v_BLKD)[0]
    if differentiable:
        out_BLND, lse_BNL = _BurstAttention.apply(*inputs, plan, saved, recompute, call)
    else:
        out_BLND, lse_BNL = attention_forward(plan, *inputs, saved, call)
    return (out_BLND, lse_BNL) if return_lse else out_BLND


def laid_out(tensor_BLND: Tensor) -> Tensor:
    """A tensor that every kernel and transfer can read: the tensor itself, or a contiguous copy. Differentiable.

    A head's values of one token must be contiguous, from an address that wide loads accept, and no two tokens or heads
    may share them. Other strides are free: slices of one projection for q, k and v, or tensors with heads before
    tokens, are not copied. Kernels do not check: they return garbage, raise, or end the process.
    """
    start, contiguous = tensor_BLND.storage_offset(), tensor_BLND.is_contiguous()
    if contiguous and start == 0:
        return tensor_BLND
    sizes, strides, item = tensor_BLND.shape[:-1], tensor_BLND.stride(), tensor_BLND.itemsize
    row_bytes = tensor_BLND.shape[-1] * item
    if contiguous and (row_bytes % ALIGNMENT_BYTES or start * item % ALIGNMENT_BYTES == 0):
        return tensor_BLND
    taken = [stride for size, stride in zip(sizes, strides, strict=False) if size > 1]
    contiguous_heads = tensor_BLND.shape[-1] == 1 or strides[-1] == 1
    # Rows of an odd number of bytes are aligned by no copy; no kernel that asks for alignment takes them.
    alignable = row_bytes % ALIGNMENT_BYTES == 0
    starts = (start, *taken) if alignable else ()
    if contiguous_heads and 0 not in taken and all(start * item % ALIGNMENT_BYTES == 0 for start in starts):
        return tensor_BLND
    return tensor_BLND.clone(memory_format=torch.contiguous_format)
