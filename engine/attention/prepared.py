"""The public calls: `burst_attention`, and `prepare_attention`, whose result is the same attention planned before.

Both give the same bits, forward and backward. Under `torch.compile` they are one custom operation
(`engine.attention.compiled`); otherwise nothing stands between them and `engine.attention.op`.

Shape letters as in `engine.attention.op`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from engine.attention.algorithms.saved import AttentionPlan, Made, SavedOutput, made_by_lse
from engine.attention.compiled import compiled_attention, registered
from engine.attention.context import ContextParallel, context_named, ranks_of_shared_context
from engine.attention.inputs import (
    Result,
    check_inputs,
    check_sent,
    check_sinks,
    check_tensors,
    from_bshd,
    looks_transposed,
    refuse_unnamed_layout,
    to_bshd,
)
from engine.attention.masks import Causal, Mask
from engine.attention.masks.mask import mask_named
from engine.attention.op import run_attention
from engine.attention.plan import Bounds, cached_plan, mask_of
from engine.attention.resolve import Choices

Function = TypeVar("Function", bound=Callable[..., Any])

_CAUSAL = Causal()
_warned: list[bool] = []
_Constant = tuple[str, int]  # name and id of a mask


def constant_in_programs(function: Function) -> Function:
    """As `torch.compiler.assume_constant_result`, which imports torch's compiler: a second of every process's start."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


constant_in_programs(Mask.name_in_programs)  # marked here because masks do not import torch


@lru_cache(maxsize=1)
def _single() -> ContextParallel:
    return ContextParallel.single()


def _alone() -> ContextParallel:
    """The group of one of calls without `cp`. Warns once where ranks share sequences: it may have been forgotten."""
    if not _warned and (ranks := ranks_of_shared_context()):
        _warned.append(True)
        warnings.warn(
            f"attention without cp sees this rank's tokens alone, and this process has a context of {ranks} ranks; "
            "pass cp for shards of a sequence, or cp=ContextParallel.single() for whole ones",
            stacklevel=3,
        )
    return _single()


def burst_attention(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    *,
    mask: Mask | None = None,
    cu_seqlens: Bounds | None = None,
    max_seqlen: int | None = None,
    cp: ContextParallel | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    kernel: str = "auto",
    schedule: str = "auto",
    backward: str = "auto",
    exchange: str = "auto",
    deterministic: bool = False,
    grad_comm_dtype: str = "fp32",
    num_head_chunks: int | None = None,
    sinks_N: Tensor | None = None,
    expand_NXC: Tensor | None = None,
    saved: SavedOutput | None = None,
    recompute: bool = False,
    return_lse: bool = False,
    tensor_layout: str | None = None,
) -> Result:
    """Attention of this rank's queries over the whole sequence. Collective over `cp`.

    `cp` keeps the plans of its last calls: a call with the shapes, dtype, device, mask and choices of an earlier one
    plans nothing. `prepare_attention` makes a plan before the first call.

    The inputs' dtype alone decides the precision: autocast around the call or its backward changes nothing. Tensors
    with strides that kernels cannot read are copied (`laid_out`).

    Args:
        q_BLND: this rank's queries, [batch, local tokens, query heads, head_dim], positions as `cp.layout` says.
        k_BLKD, v_BLKD: this rank's keys and values; the number of KV heads divides the number of query heads. The head
            dim of V, which is that of the output, may be another one than that of Q and K.
        mask: visible (query, key) pairs, in global positions; causal when None.
        cu_seqlens: in place of a mask, the positions at which packed documents start and the last one ends, 0, ...,
            length of the whole sequence, in a tensor or a sequence, the same on every rank: a query sees the earlier
            tokens of its document. The host waits for a tensor on a GPU, once for all layers that get the same one:
            give other numbers in another tensor there, since what a collective writes into one is not noticed.
        max_seqlen: a length that no document exceeds, which is checked; kernels get the exact one.
        cp: the ranks that share the sequence; a group of one when None, with a warning where this process holds a
            context of several ranks.
        scale: factor of the scores; head_dim ** -0.5 when None.
        softcap: bound of the scores, which become softcap * tanh(scores / softcap); None for none. Kernels fa4, flex
            and reference have it.
        kernel: auto, reference, cpu, fa2, cudnn, fa4 or flex.
        schedule: ring, double_ring, all_gather, ulysses, usp, usp_transposed (see
            `engine.attention.cost`), or auto: on GPUs the one a cost model finds cheapest, elsewhere a
            ring.
        exchange: how chunks move inside a node: relay (p2p ring), direct (all-pairs p2p), copy_engine, or auto for the
            fastest that the links allow.
        backward: the side that is sent in backward: query, key_value, or auto for the one whose bytes take less time.
        deterministic: repeat bit for bit, from run to run: no choice rests on a measurement; refused by kernels that
            cannot.
        grad_comm_dtype: dtype in which gradients are sent. fp32: sums in fp32, the result of one kernel call as the
            kernel wrote it; input_across: between nodes in the inputs' dtype, once; input_after_first: so between nodes
            and, inside a node, for the chunks of other nodes; input: everywhere so.
        num_head_chunks: under a Ulysses schedule, the number of chunks of a rank's heads: one is sent while another is
            computed. The cost model's choice when None.
        sinks_N: one learned logit per query head, [query heads], the same on every rank, in any floating-point dtype:
            every query sees one more key of this score (which is neither scaled nor capped), whose value is 0. Its
            gradient is the sum over this rank's tokens; add those of the ranks, as of any replicated parameter.
        expand_NXC: where K and V are formed from a latent (multi-head latent attention), the matrix that forms them,
            [query heads, dims of K and V, dims of the latent], the same on every rank; `k_BLKD` is then the key that
            all heads share and `v_BLKD` the latent, each with one head. K of a head has the first dims from the latent
            and the shared key behind them. Ranks send the latent (`engine.attention.algorithms.latent`). Its gradient
            is a sum as that of the sinks.
        saved: result of `engine.attention.algorithms.saved.save_suffix` on an earlier call with the same inputs: only
            the other rows are computed again. Refused where that call had another shape or dtype; outside compiled
            programs also where it had another mask, scale or softcap, or only one of them sinks.
        recompute: under activation checkpointing, set on both calls, the first and the one repeated with `saved`, so
            that both save the same tensors. Without it, Ulysses saves Q, K and V as they were received.
        return_lse: also return lse_BNL, the natural-log sum-exp of the scores, a sink's among them; it is
            differentiable. The same on every rank, as all choices are. With kernels cpu, cudnn and fa2, backward takes
            twice the time for tiles in which some row's gradient comes by LSE alone, or nearly so.

    Returns:
        out_BLND in the inputs' dtype, or (out_BLND, lse_BNL). A query that sees no key gives 0, lse -inf (or
            the sink's logit), no gradient to q, k and v.

    Raises:
        ValueError: tensors that do not fit each other, a scale or softcap that is not above 0, a length the layout
            cannot split, or a choice this machine cannot run.
        PeerLost: another rank's tensors did not come within the timeout of `cp`'s process group.
        BrokenContext: an earlier call on `cp` failed halfway (`engine.attention.comm.p2p` has both).
    """
    choices = (
        scale,
        softcap,
        kernel,
        schedule,
        backward,
        exchange,
        deterministic,
        grad_comm_dtype,
        num_head_chunks,
        recompute,
        return_lse,
    )
    if cp is not None and not isinstance(cp, ContextParallel):
        raise ValueError(f"cp is a {type(cp).__name__}; pass a ContextParallel")
    try:
        _check_saved(saved)
        if tensor_layout is None:
            if looks_transposed(q_BLND):
                refuse_unnamed_layout(q_BLND)
        elif tensor_layout != "BSHD":
            q_BLND, k_BLKD, v_BLKD = to_bshd((q_BLND, k_BLKD, v_BLKD), tensor_layout)
        if expand_NXC is not None or not (
            q_BLND.dtype == k_BLKD.dtype == v_BLKD.dtype
            and q_BLND.device == k_BLKD.device == v_BLKD.device
            and k_BLKD.shape[:-1] == v_BLKD.shape[:-1]
            and q_BLND.layout is k_BLKD.layout is v_BLKD.layout is torch.strided
        ):
            check_inputs(q_BLND, k_BLKD, v_BLKD, expand_NXC)
        if sinks_N is not None:
            check_sinks(sinks_N, q_BLND)
        if cp is not None and cp.size > 1 and not torch.compiler.is_compiling():
            check_sent(q_BLND, k_BLKD, v_BLKD, sinks_N, expand_NXC)
        if (cu_seqlens is not None or max_seqlen is not None) and not torch.compiler.is_compiling():
            mask = mask_of(mask, cu_seqlens, max_seqlen)
    except (AttributeError, TypeError, ValueError) as error:
        _refuse(error, cp, q_BLND, k_BLKD, v_BLKD)
    if torch.compiler.is_compiling():
        bounds, known = (cu_seqlens, None) if isinstance(cu_seqlens, Tensor) else (None, cu_seqlens)
        context = None if cp is None else cp.name
        name = _traced(_constant(mask), known, bounds is not None, max_seqlen, context, *choices)
        out_BLND, lse_BNL = compiled_attention(q_BLND, k_BLKD, v_BLKD, sinks_N, name, saved, bounds, expand_NXC)
        found: Result = (out_BLND, lse_BNL) if return_lse else out_BLND
        return from_bshd(found, tensor_layout or "BSHD")
    mask = _CAUSAL if mask is None else mask
    plan = cached_plan(
        q_BLND, k_BLKD, v_BLKD, expand_NXC, mask, cp or _alone(), Choices(*choices), sinks=sinks_N is not None
    )
    found = run_attention(
        plan, q_BLND, k_BLKD, v_BLKD, sinks_N, expand_NXC, saved=saved, recompute=recompute, return_lse=return_lse
    )
    return _returned(found, plan, sinks_N, tensor_layout or "BSHD")


def _check_saved(saved: object) -> None:
    """Raises ValueError for what no earlier call has given."""
    if saved is not None and not isinstance(saved, SavedOutput):
        raise ValueError(f"saved is a {type(saved).__name__}; pass what save_suffix returned")


def _returned(found: Result, plan: AttentionPlan, sinks_N: Tensor | None, layout: str) -> Result:
    """A call's result in its layout; of an LSE is noted which call it is of (`save_suffix`)."""
    if isinstance(found, tuple):
        made_by_lse[found[1]] = Made.by(plan, sinks_N)
    return found if layout == "BSHD" else from_bshd(found, layout)


def _refuse(error: Exception, cp: ContextParallel | None, *tensors: object) -> NoReturn:
    """Raise the ValueError of a call, and let the other ranks know of it."""
    try:
        check_tensors(*tensors)
        raise error
    except ValueError as reason:
        if cp is not None:
            cp.comms.refuse(reason)
        raise


class PreparedAttention:
    """Attention with every choice made, for tensors of one shape, dtype and device. Made by `prepare_attention`."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        expand_NXC: Tensor | None,
        layout: str | None,
        mask: Mask,
        cp: ContextParallel,
        choices: Choices,
        return_lse: bool,
    ) -> None:
        if not isinstance(cp, ContextParallel):
            raise ValueError(
                f"cp is a {type(cp).__name__}; pass a ContextParallel, made once of the ranks' process group"
            )
        self.mask, self.cp = mask, cp
        self._choices, self._return_lse = choices, return_lse
        self._layout = layout or "BSHD"
        self._with_sinks: AttentionPlan | None = None  # the same plan for calls with sinks, on which ranks agree
        try:
            if layout is None and looks_transposed(q):
                refuse_unnamed_layout(q)
            q_BLND, k_BLKD, v_BLKD = to_bshd((q, k, v), self._layout)
            check_inputs(q_BLND, k_BLKD, v_BLKD, expand_NXC)
        except (AttributeError, TypeError, ValueError) as error:
            _refuse(error, cp, q, k, v)
        self._q_shape, self._k_shape, self._v_shape = q.shape, k.shape, v.shape
        self._expands = _form(expand_NXC)
        self._dtype, self._device = q.dtype, q.device
        self.plan: AttentionPlan = cached_plan(q_BLND, k_BLKD, v_BLKD, expand_NXC, mask, cp, choices)
        cp.comms.begin_call()  # one that sends nothing: a rank that refuses it has made it too

    def __call__(
        self,
        q_BLND: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        mask: Mask | None = None,
        *,
        cu_seqlens: Bounds | None = None,
        max_seqlen: int | None = None,
        sinks_N: Tensor | None = None,
        expand_NXC: Tensor | None = None,
        saved: SavedOutput | None = None,
    ) -> Result:
        """`burst_attention` of these tensors. Collective over `cp`.

        Args:
            q_BLND, k_BLKD, v_BLKD: shards of the shapes, layout, dtype and device that were prepared; strides are free.
            mask: replaces the prepared mask in this call, the same one on every rank. Its plan is taken from those that
                `cp` keeps, or made.
            cu_seqlens, max_seqlen: replace the prepared mask as well.
            sinks_N, expand_NXC, saved: as of `burst_attention`.

        Raises:
            ValueError: other shapes, another dtype or device than prepared, or a mask that does not fit.
        """
        dtype, device = self._dtype, self._device
        try:
            _check_saved(saved)
            fits = (
                q_BLND.shape == self._q_shape
                and k_BLKD.shape == self._k_shape
                and v_BLKD.shape == self._v_shape
                and q_BLND.dtype == k_BLKD.dtype == v_BLKD.dtype == dtype
                and q_BLND.device == k_BLKD.device == v_BLKD.device == device
                and q_BLND.layout is k_BLKD.layout is v_BLKD.layout is torch.strided
            )
        except (AttributeError, ValueError) as error:
            _refuse(error, self.cp, q_BLND, k_BLKD, v_BLKD)
        if not fits:
            prepared = self._described(self._q_shape, self._k_shape, self._v_shape)
            with self.cp.comms.refusals_told():
                check_tensors(q_BLND, k_BLKD, v_BLKD)
                raise ValueError(
                    f"attention was prepared for {prepared} of {dtype} "
                    f"on {device}, found {self._described(q_BLND.shape, k_BLKD.shape, v_BLKD.shape)} of "
                    f"{', '.join(sorted({str(t.dtype) for t in (q_BLND, k_BLKD, v_BLKD)}))} on "
                    f"{', '.join(sorted({str(t.device) for t in (q_BLND, k_BLKD, v_BLKD)}))}; prepare attention for "
                    "these"
                )
        if self._layout != "BSHD":
            q_BLND, k_BLKD, v_BLKD = to_bshd((q_BLND, k_BLKD, v_BLKD), self._layout)
        if (form := _form(expand_NXC)) != self._expands:
            with self.cp.comms.refusals_told():
                raise ValueError(f"attention was prepared for expand_NXC {self._expands}, found {form}; give that one")
        if sinks_N is not None:
            with self.cp.comms.refusals_told():
                check_sinks(sinks_N, q_BLND)
        if torch.compiler.is_compiling():
            bounds, known = (cu_seqlens, None) if isinstance(cu_seqlens, Tensor) else (None, cu_seqlens)
            name = self._traced(id(self), _constant(mask), known, bounds is not None, max_seqlen)
            out_BLND, lse_BNL = compiled_attention(q_BLND, k_BLKD, v_BLKD, sinks_N, name, saved, bounds, expand_NXC)
            return from_bshd((out_BLND, lse_BNL) if self._return_lse else out_BLND, self._layout)
        if self.cp.size > 1:
            with self.cp.comms.refusals_told():
                check_sent(q_BLND, k_BLKD, v_BLKD, sinks_N, expand_NXC)
        if cu_seqlens is not None or max_seqlen is not None:
            with self.cp.comms.refusals_told():
                mask = mask_of(mask, cu_seqlens, max_seqlen)
        given = q_BLND, k_BLKD, v_BLKD, expand_NXC
        if mask is not None:
            plan = cached_plan(*given, mask, self.cp, self._choices, sinks=sinks_N is not None)
        elif sinks_N is None:
            plan = self.plan
        else:
            if self._with_sinks is None:
                self._with_sinks = cached_plan(*given, self.mask, self.cp, self._choices, sinks=True)
            plan = self._with_sinks
        found = run_attention(
            plan,
            q_BLND,
            k_BLKD,
            v_BLKD,
            sinks_N,
            expand_NXC,
            saved=saved,
            recompute=self._choices.recompute,
            return_lse=self._return_lse,
        )
        return _returned(found, plan, sinks_N, self._layout)

    @constant_in_programs
    def _traced(
        self,
        _guarded: int,
        mask: _Constant | None,
        cu_seqlens: Sequence[int] | None,
        has_bounds: bool,
        max_seqlen: int | None,
    ) -> str:
        """As the function `_traced`. `_guarded` is this object's id: the program is for this attention alone."""
        given = _given(mask, cu_seqlens, has_bounds, max_seqlen)
        return registered(given or self.mask, self.cp, self._choices, max_seqlen)

    def resolved(self) -> dict[str, str]:
        """What each `auto` became, for the prepared mask."""
        return self.plan.resolved()

    @staticmethod
    def _described(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size) -> str:
        return f"q {tuple(q_shape)}, k {tuple(k_shape)}, v {tuple(v_shape)}"


def _form(expand_NXC: Tensor | None) -> tuple[tuple[int, ...], torch.dtype, torch.device] | None:
    """What a call is prepared for of a matrix."""
    return None if expand_NXC is None else (tuple(expand_NXC.shape), expand_NXC.dtype, expand_NXC.device)


def prepare_attention(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor | None = None,
    *,
    expand_NXC: Tensor | None = None,
    mask: Mask | None = None,
    cu_seqlens: Bounds | None = None,
    max_seqlen: int | None = None,
    cp: ContextParallel | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    kernel: str = "auto",
    schedule: str = "auto",
    backward: str = "auto",
    exchange: str = "auto",
    deterministic: bool = False,
    grad_comm_dtype: str = "fp32",
    num_head_chunks: int | None = None,
    recompute: bool = False,
    return_lse: bool = False,
    lse_gradient: bool | None = None,
    tensor_layout: str | None = None,
) -> PreparedAttention:
    """Plan attention once, to call it many times: `attend = prepare_attention(...)`, then `attend(q, k, v)`.

    The result's bits are those of `burst_attention` with the same arguments. Collective over `cp`.

    Args:
        q_BLND, k_BLKD, v_BLKD, expand_NXC: tensors like those of a call; their shapes, dtype and device are read, not
            their values. V is as K when None.
        lse_gradient: whether an LSE that is returned may have a gradient; as `return_lse` when None. Without one,
            kernels that would have to check for it run without that check.
        mask, cu_seqlens, cp, tensor_layout, softcap and the others: as of `burst_attention`.

    Raises:
        ValueError: as `burst_attention`.
    """
    choices = Choices(
        scale,
        softcap,
        kernel,
        schedule,
        backward,
        exchange,
        deterministic,
        grad_comm_dtype,
        num_head_chunks,
        recompute,
        return_lse if lse_gradient is None else lse_gradient,
    )
    if cu_seqlens is not None or max_seqlen is not None:
        try:
            mask = mask_of(mask, cu_seqlens, max_seqlen)
        except ValueError as error:
            _refuse(error, cp, q_BLND, k_BLKD)
    v_BLKD = k_BLKD if v_BLKD is None else v_BLKD
    mask = _CAUSAL if mask is None else mask
    group = cp or _alone()
    return PreparedAttention(q_BLND, k_BLKD, v_BLKD, expand_NXC, tensor_layout, mask, group, choices, return_lse)


def _constant(mask: Mask | None) -> _Constant | None:
    """A mask as what every torch takes as a constant while it traces. Its id makes torch guard the program: it is for
    this mask alone."""
    if not isinstance(mask, Mask):
        return mask
    return mask.name_in_programs() or _name_of_parts(_parts(mask)), id(mask)


def _parts(value: Any) -> Any:
    """A mask that a program makes, as its class and what it is made of: values that torch takes as constants."""
    if not is_dataclass(value):
        return value
    return type(value), {each.name: _parts(getattr(value, each.name)) for each in fields(value) if each.init}


@constant_in_programs
def _name_of_parts(parts: tuple[type[Mask], dict[str, Any]]) -> str:
    """The name in programs of the mask that has these parts."""
    mask: Mask = _joined(parts)
    return mask.name_in_programs()


def _joined(parts: Any) -> Any:
    """The reverse of `_parts`."""
    if not isinstance(parts, tuple) or not parts or not isinstance(parts[0], type):
        return parts
    kind, values = parts
    return kind(**{name: _joined(value) for name, value in values.items()})


@constant_in_programs
def _traced(
    mask: _Constant | None,
    cu_seqlens: Sequence[int] | None,
    has_bounds: bool,
    max_seqlen: int | None,
    context: str | None,
    *choices: Any,
) -> str:
    """The name under which a compiled program finds mask, context and choices. `has_bounds`: the mask is that of a
    tensor which the program has."""
    cp = _alone() if context is None else context_named(context)
    return registered(_given(mask, cu_seqlens, has_bounds, max_seqlen) or _CAUSAL, cp, Choices(*choices), max_seqlen)


def _given(
    constant: _Constant | None, cu_seqlens: Sequence[int] | None, has_bounds: bool, max_seqlen: int | None
) -> Mask | None:
    """As `mask_of`; boundaries in a tensor are read when the program runs."""
    mask = mask_named(constant[0]) if isinstance(constant, tuple) else constant
    if not has_bounds:
        return mask_of(mask, cu_seqlens, max_seqlen)
    if mask is not None:
        mask_of(mask, (0, 1), None)  # refuses both
    return None
