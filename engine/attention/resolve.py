"""From settings to a plan: every `auto` is resolved here, once for a shape, dtype and device.

The result is an `engine.attention.algorithms.saved.AttentionPlan`: ring attention, Ulysses around it, or attention over
gathered keys. A context keeps the plans used last (`cached_plan`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from engine.attention.algorithms.all_gather import AllGatherPlan, gathered_kinds
from engine.attention.algorithms.ring import RingPlan
from engine.attention.algorithms.saved import AttentionPlan
from engine.attention.algorithms.ulysses import UlyssesPlan
from engine.attention.comm.all_to_all import TokenRun, token_runs_in_order
from engine.attention.context import ContextParallel
from engine.attention.inputs import check_inputs, check_mask, check_scale, check_softcap
from engine.attention.kernels import KernelProblem, choose_kernel
from engine.attention.masks import Mask
from engine.attention.masks.pairs import pair_table
from engine.attention.planning.comm_volume import GRAD_COMM_DTYPES, Shards, narrowed
from engine.attention.planning.cost_model import (
    ALL_GATHER,
    BACKWARD_SIDES,
    ULYSSES_SCHEDULES,
    HardwareModel,
    asks_for_link,
    chosen_schedule,
    model_chooses,
)
from engine.attention.planning.workload import workload_of
from engine.cuda.alternate import streams_of


class Choices(NamedTuple):
    """The settings of a call besides its mask, as `plan_attention` takes them."""

    scale: float | None = None
    softcap: float | None = None
    kernel: str = "auto"
    schedule: str = "auto"
    backward: str = "auto"
    exchange: str = "auto"
    deterministic: bool = False
    grad_comm_dtype: str = "fp32"
    num_head_chunks: int | None = None
    recompute: bool = False
    lse_gradient: bool = True
    forward_streams: int = 1


def cached_plan(q_BLND: Tensor, k_BLKD: Tensor, mask: Mask, cp: ContextParallel, choices: Choices) -> AttentionPlan:
    """The plan that `cp` keeps for such tensors, this mask and these choices, made where it has none.

    `q_BLND` and `k_BLKD` are of one dtype and device. A new plan may be collective, on all ranks alike. Raises
    ValueError when nothing fits.
    """
    try:
        check_mask(mask)
    except ValueError as error:
        cp.refuse(error)
        raise
    key = (q_BLND.shape, k_BLKD.shape, q_BLND.dtype, q_BLND.device, mask, choices)
    plan: AttentionPlan | None = cp.plans.get(key)
    if plan is None:
        try:
            check_inputs(q_BLND, k_BLKD, k_BLKD)
            check_scale(choices.scale)
            check_softcap(choices.softcap)
        except ValueError as error:
            cp.refuse(error)
            raise
        settings = choices._asdict()

        def said() -> dict[str, object]:
            return {
                "q": tuple(q_BLND.shape),
                "k": tuple(k_BLKD.shape),
                "dtype": str(q_BLND.dtype),
                "device": q_BLND.device.type,
                "mask": _described(mask),
                **settings,
            }

        number = cp.agree(key, said)
        made = plan_attention(q_BLND, k_BLKD, mask=mask, cp=cp.without_plans(number), **settings)
        plan = cp.plans.put(key, made)
    return plan


def _described(mask: Mask) -> str:
    """The mask in words that are the same on every rank, also for a mask without words of its own."""
    words = f"{type(mask).__name__} {mask}"
    return re.sub(r" at 0x[0-9a-f]+", "", words)


def plan_attention(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    *,
    mask: Mask,
    cp: ContextParallel,
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
    lse_gradient: bool = True,
    forward_streams: int = 1,
) -> AttentionPlan:
    """Resolve every `auto` for shards of this shape, dtype and device. Raises ValueError when nothing fits.

    Without `lse_gradient` backward skips the check for a gradient of the LSE; with some kernels it makes the host wait
    for the GPU. The other arguments are those of `burst_attention` and `prepare_attention`.
    """
    if forward_streams not in (1, 2):
        raise ValueError(f"forward_streams is {forward_streams}; give 1 or 2")
    batch, tokens, heads, head_dim = q_BLND.shape
    kv_heads, seq_len = k_BLKD.shape[2], tokens * cp.size
    cp.segments(seq_len)  # refuses lengths the layout cannot split
    if backward not in ("auto", *BACKWARD_SIDES):
        raise ValueError(f"backward {backward!r} is unknown; choose auto, query or key_value")
    if grad_comm_dtype not in GRAD_COMM_DTYPES:
        raise ValueError(f"grad_comm_dtype {grad_comm_dtype!r} is unknown; choose one of {', '.join(GRAD_COMM_DTYPES)}")
    narrow = narrowed(grad_comm_dtype)[-1 if cp.node_size < cp.size else 0]  # at the slowest links
    estimated = q_BLND.is_cuda and model_chooses(schedule, backward, exchange)
    workload = workload_of(
        mask,
        cp.layout,
        cp_size=cp.size,
        node_size=cp.node_size,
        seq_len=seq_len,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        input_bytes=q_BLND.itemsize,
        grad_comm_dtype=grad_comm_dtype,
        recompute=recompute,
        counts_traffic=estimated,
    )
    # Asking for the link may mean measuring it: only where the model has something to decide, and never where a run
    # must repeat bit for bit: another measurement could lead to another schedule, which sums in another order.
    asks = q_BLND.is_cuda and asks_for_link(schedule, backward, exchange, num_head_chunks)
    link = cp.link(q_BLND.device, fixed=deterministic) if asks else None
    hardware = HardwareModel() if link is None else HardwareModel(across_gib=link.gib)
    schedule, chunks, estimate = chosen_schedule(
        workload,
        cp.layout.name,
        hardware,
        schedule=schedule,
        backward=backward,
        exchange=exchange,
        num_head_chunks=num_head_chunks,
        on_gpu=q_BLND.is_cuda,
    )
    gathers = schedule == ALL_GATHER and cp.size > 1
    if schedule == ALL_GATHER and not gathers:
        schedule = "ring"  # of one rank
    inner, shared_by = cp, 1
    if schedule in ULYSSES_SCHEDULES:
        all_to_all, members, inner = cp.all_to_all(schedule, exchange, q_BLND.device)
        shared_by = len(members)
        if chunks < 1 or kv_heads // shared_by % chunks:
            raise ValueError(
                f"num_head_chunks {chunks} does not divide the {kv_heads // shared_by} KV heads of a rank under "
                f"schedule {schedule}; give a number that does"
            )
        ring = inner.ring("double_ring" if inner.node_size < inner.size else "ring")
    elif not gathers:
        ring = cp.ring(schedule)
    if gathers:
        kinds = gathered_kinds(mask, cp.layout, seq_len, cp.size)
    else:
        kinds = pair_table(mask, inner.layout, seq_len, inner.size).kinds
    problem = KernelProblem(
        device=q_BLND.device,
        dtype=q_BLND.dtype,
        heads=heads // shared_by // chunks,
        kv_heads=kv_heads // shared_by // chunks,
        head_dim=head_dim,
        bands=kinds,
        deterministic=deterministic,
        softcap=softcap,
        any_delta=lse_gradient,
    )
    attend = choose_kernel(kernel, problem)
    scale = head_dim**-0.5 if scale is None else scale
    if gathers:
        return AllGatherPlan(
            cp=cp,
            mask=mask,
            gather=cp.gather(),
            token_runs=_token_runs(cp, seq_len, range(cp.size)),
            kernel=attend,
            seq_len=seq_len,
            shards=Shards.of(problem, attend, batch, tokens, "input" if narrow else "fp32"),
            scale=scale,
            deterministic=deterministic,
            narrow_grads=narrow,
            streams=streams_of(forward_streams, q_BLND.device),
        )
    resolved_exchange = inner.choose_exchange(exchange, ring, q_BLND.device)
    ring_plan = RingPlan(
        cp=inner,
        mask=mask,
        ring=ring,
        exchange=resolved_exchange,
        comms=inner.ring_comms(ring, resolved_exchange),
        kernel=attend,
        backward_side="query" if backward == "auto" else backward,
        seq_len=seq_len,
        shards=Shards.of(problem, attend, batch, seq_len // inner.size, grad_comm_dtype),
        scale=scale,
        deterministic=deterministic,
        narrow_grads=narrowed(grad_comm_dtype),
        estimate=estimate,
        link=link,
        # Copies into receive slots follow the stream that they were posted on.
        streams=streams_of(forward_streams if resolved_exchange == "relay" and inner.size > 1 else 1, q_BLND.device),
    )
    if backward == "auto":
        ring_plan = ring_plan.with_cheaper_backward(hardware)
    if schedule not in ULYSSES_SCHEDULES:
        return ring_plan
    return UlyssesPlan(
        cp=cp,
        members=members,
        schedule=schedule,
        all_to_all=all_to_all,
        token_runs=_token_runs(cp, seq_len, members),
        inner=ring_plan,
        num_head_chunks=chunks,
    )


def _token_runs(cp: ContextParallel, seq_len: int, ranks: Iterable[int]) -> tuple[TokenRun, ...]:
    """Runs of consecutive tokens of these ranks, in order of position."""
    return token_runs_in_order(tuple(cp.layout.segments(seq_len, cp.size, rank) for rank in ranks))
