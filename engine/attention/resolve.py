"""From what a user leaves open to choices: schedule, side sent in backward, exchange and head chunks, in one pure
function without torch.

    resolve(problem, hardware, choices) -> Resolved

Engine (`engine.attention.plan`), memory planner, `burst plan` and prediction read the same `Resolved`, and records hold
it in words. Nothing else asks the cost model but the fit of its constants. `choose_layout` answers `layout: auto`,
before a sequence is sharded. All of it is integer code and arithmetic on values that all ranks share, so that every
rank chooses the same. The kernel depends on the machine and is chosen by `engine.attention.kernels.choose_kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from numbers import Real
from typing import NamedTuple

from engine.attention.comm_plan import comm_plan
from engine.attention.comm_volume import (
    CallBytes,
    NarrowedGradients,
    RingVolume,
    SentBytes,
    Shards,
    all_to_all_bytes,
    gather_bytes,
    gradient_widths,
    head_slot_bytes,
    narrowed,
    ring_slot_bytes,
)
from engine.attention.cost import (
    Estimate,
    HardwareModel,
    Workload,
    choose_num_head_chunks,
    choose_schedule,
    ring_seconds,
)
from engine.attention.geometry.balanced import Balanced
from engine.attention.geometry.layout import LAYOUTS, Layout, SplitZigzag, as_layout, split_unsupported_reason, tail_cut
from engine.attention.masks import (
    Documents,
    Full,
    Mask,
    TooManyTiles,
    imbalance,
    kept_share,
    parse_mask,
)
from engine.attention.masks.mask import FirstRows, check_is_mask
from engine.attention.masks.pairs import pair_tiles
from engine.attention.problem import (
    ALL_GATHER,
    BACKWARD_SIDES,
    EXCHANGES,
    GRAD_COMM_DTYPES,
    RING_SCHEDULES,
    RUNS_OF_TOKENS,
    ULYSSES_SCHEDULES,
    Division,
    Problem,
    all_to_all_ranks,
    divided,
    problem_of_trial,
    schedule_unsupported_reason,
)
from engine.settings import TrialSettings

__all__ = [
    "Choices", "Estimate", "HardwareModel", "Resolved", "asks_for_link", "balanced", "cheaper_backward",
    "check_choices", "choose_layout", "recomputes_attention", "resolve", "resolve_trial", "trial_choices",
    "trial_layout",
]  # fmt: skip

ALL_RANKS = 8  # up to so many ranks are added up to choose a side; of more ranks, three
PREFERENCE = tuple(LAYOUTS[name] for name in ("contiguous", "zigzag", "striped"))
AS_GOOD = 1.05  # of the best imbalance is accepted: striped layouts slow kernels and add ring steps


class Choices(NamedTuple):
    """The settings of a call besides its mask: those of `burst_attention` and `prepare_attention`. A tuple, because a
    call without a prepared plan looks its plan up by them."""

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
    # Of baselines whose original does so: how many streams of a GPU the kernels of a forward use in turn, 1 or 2, where
    # chunks move by relay or are gathered. With two, a kernel starts while the one before it ends, and a forward holds
    # up to three more received chunks. The results are the same.
    forward_streams: int = 1


def check_choices(choices: Choices) -> None:
    """Raise ValueError for a value that no call can have. `schedule` and `kernel` are looked up where they are used.

    A tuple cannot refuse its own values, and a call with a known plan should not check them again.
    """
    for name in ("deterministic", "recompute", "lse_gradient"):
        if getattr(choices, name) not in (True, False):
            called = "return_lse (or lse_gradient)" if name == "lse_gradient" else name
            raise ValueError(f"{called} is {getattr(choices, name)!r}; give True or False")
    if choices.scale is not None and not _finite_above_0(choices.scale):
        # Kernels scale scores after hiding some as -inf, so zero and less would show them again, or give NaN.
        raise ValueError(f"scale is {choices.scale!r}; give a finite factor above 0, or None for head_dim ** -0.5")
    if choices.softcap is not None and not _finite_above_0(choices.softcap):
        raise ValueError(
            f"softcap is {choices.softcap!r}; give a finite bound of the scores above 0, or None for no bound"
        )
    if choices.backward not in ("auto", *BACKWARD_SIDES):
        raise ValueError(f"backward {choices.backward!r} is unknown; choose auto, query or key_value")
    if choices.grad_comm_dtype not in GRAD_COMM_DTYPES:
        known = ", ".join(GRAD_COMM_DTYPES)
        raise ValueError(f"grad_comm_dtype {choices.grad_comm_dtype!r} is unknown; choose one of {known}")
    if choices.exchange not in ("auto", *EXCHANGES):
        raise ValueError(f"exchange {choices.exchange!r} is unknown; choose auto, relay, direct or copy_engine")
    if choices.schedule == ALL_GATHER and choices.backward == "query":
        raise ValueError(
            "schedule all_gather gathers keys and values in backward too, found backward query; set it to auto"
        )
    if choices.schedule == ALL_GATHER and choices.exchange != "auto":
        raise ValueError(f"schedule all_gather has no ring, found exchange {choices.exchange}; set it to auto")
    chunks = choices.num_head_chunks
    if chunks is not None and (not isinstance(chunks, int) or chunks < 1):
        raise ValueError(f"num_head_chunks is {chunks!r}; give a whole number of at least 1, or None")
    if chunks is not None and chunks > 1 and choices.schedule in (*RING_SCHEDULES, ALL_GATHER):
        raise ValueError(
            f"schedule {choices.schedule} sends all heads together, found num_head_chunks {chunks}; leave it out, or "
            "choose schedule ulysses, usp or usp_transposed"
        )
    if choices.forward_streams not in (1, 2):
        raise ValueError(f"forward_streams is {choices.forward_streams}; give 1 or 2")


def _finite_above_0(value: float) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < value < math.inf


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What every `auto` became. Numbers that need the tables of a mask are computed where they are first read."""

    problem: Problem
    hardware: HardwareModel
    choices: Choices  # as they were given
    schedule: str  # as asked or chosen; `ring` for a double ring on one node and all_gather on one rank
    reason: str  # one sentence: why `auto` took the schedule, or that it was given
    estimate: Estimate | None  # of all schedules, where the cost model chose
    division: Division  # members of the all-to-all, and the ring after it
    head_exchange: str | None  # all_to_all, copy_engine; none for one of a single rank; None without one
    exchange: str  # of the ring: relay, direct, copy_engine; none for a ring of one rank; all_gather
    num_head_chunks: int
    written_bytes: int  # per element of a gradient, as the kernel writes it

    @property
    def layout(self) -> str:
        """The name of the layout."""
        return self.problem.layout.name

    @cached_property
    def backward(self) -> str:
        """The side sent in backward, query or key_value; under `auto` the one whose bytes take less time."""
        if self.schedule == ALL_GATHER:
            return "key_value"
        if self.choices.backward != "auto":
            return self.choices.backward
        problem, division = self.problem, self.division
        return cheaper_backward(problem.mask, division.layout, self.volume, problem.seq_len, self.shards, self.hardware)

    @cached_property
    def narrow_grads(self) -> NarrowedGradients:
        """Where gradients are sent in the inputs' dtype; all_gather sends all as at its slowest links."""
        found = narrowed(self.choices.grad_comm_dtype)
        if self.schedule == ALL_GATHER:
            return NarrowedGradients(*(found.at_slowest(self.problem.nodes),) * 3)
        return found

    @property
    def summed_bytes(self) -> int:
        """Per element of a summed gradient at the slowest links that it crosses."""
        return (self.shards.inter_node if self.problem.nodes > 1 else self.shards.intra_node).summed

    @cached_property
    def shards(self) -> Shards:
        """A rank's shards of one head chunk after the all-to-all, with the widths of gradients on each link."""
        widths = gradient_widths(self.narrow_grads, self.problem.input_bytes, self.written_bytes)
        return Shards.of(self.problem, widths, shared_by=self.division.shared_by, chunks=self.num_head_chunks)

    @property
    def volume(self) -> RingVolume:
        """Counts the bytes of the ring."""
        return RingVolume(ring=self.division.ring, node_size=self.division.node_size, exchange=self.exchange)

    @property
    def sends_queries(self) -> bool:
        return self.backward == "query"

    @cached_property
    def receive_slot_bytes(self) -> int:
        """Bytes of all receive slots of the fullest rank: 0 where nothing is sent by copy engine."""
        problem, division, slots = self.problem, self.division, 0
        if self.head_exchange == "copy_engine":
            slots += head_slot_bytes(self.shards, self.choices.recompute)
        if self.exchange == "copy_engine":
            slots += ring_slot_bytes(
                problem.mask, division.layout, division.ring, problem.seq_len, self.shards, self.sends_queries
            )
        return slots

    def sent(self, cp_rank: int, *, gathered: bool) -> CallBytes:
        """Bytes that CP rank `cp_rank` sends in a forward and its backward, which may read what an all-to-all of
        forward received (`gathered`) or receives it again."""
        problem, division = self.problem, self.division
        if self.schedule == ALL_GATHER:
            return gather_bytes(problem.cp_size, problem.node_size, self.shards)
        call = self.volume.rank_bytes(problem, division, cp_rank, self.shards, self.sends_queries)
        if self.head_exchange is not None:
            call += all_to_all_bytes(
                division.members(cp_rank), cp_rank, problem.node_size, self.shards, gathered=gathered,
                packed=self.head_exchange != "copy_engine",
            )  # fmt: skip
        return call.times(self.num_head_chunks)

    def written_as(self, written_bytes: int) -> Resolved:
        """The same for a kernel that writes each element of a gradient in so many bytes."""
        return self if written_bytes == self.written_bytes else replace(self, written_bytes=written_bytes)


def resolve(problem: Problem, hardware: HardwareModel, choices: Choices) -> Resolved:
    """Turn every `auto` of a call into a choice. Raises ValueError, with the reason in one sentence, for what cannot
    run.

    The cost model's speeds are a GPU's: elsewhere `auto` is a ring, and heads are not cut into chunks. It is a ring as
    well where `backward` or `exchange`, which are switches of a ring, are given.
    """
    check_choices(choices)
    estimated = problem.on_gpu and _model_chooses(choices)
    workload = Workload.of(
        problem, grad_comm_dtype=choices.grad_comm_dtype, recompute=choices.recompute, counts_traffic=estimated
    )
    schedule, estimate = choices.schedule, None
    reason = f"schedule {schedule} is given"
    if schedule == "auto":
        schedule = "ring" if problem.nodes == 1 else "double_ring"
        if estimated:
            estimate = choose_schedule(workload, problem.layout.name, hardware, choices.num_head_chunks)
            schedule = estimate.best
            reason = f"auto takes {schedule}, the fastest by estimate: {estimate}"
        elif problem.on_gpu:
            reason = f"auto is {schedule} because backward or exchange is given"
        else:
            reason = f"auto is {schedule} because the cost model's speeds are those of GPUs"
    if unsupported_reason := schedule_unsupported_reason(schedule, problem, problem.layout.name):
        raise ValueError(unsupported_reason)
    chunks = 1
    if schedule in ULYSSES_SCHEDULES:
        chunks = _num_head_chunks(schedule, problem, workload, hardware, choices.num_head_chunks)
    if (schedule == "double_ring" and problem.nodes == 1) or (schedule == ALL_GATHER and problem.cp_size == 1):
        schedule = "ring"
    division = divided(schedule, problem.layout, problem.cp_size, problem.node_size)
    head_exchange = None
    if schedule in ULYSSES_SCHEDULES:
        head_exchange = _head_exchange(schedule, choices.exchange, problem, division)
    exchange = ALL_GATHER if schedule == ALL_GATHER else _ring_exchange(choices.exchange, problem, division)
    if choices.exchange == "copy_engine" and problem.cp_size > 1 and "copy_engine" not in (head_exchange, exchange):
        raise ValueError(
            f"exchange copy_engine copies inside a node and schedule {schedule} sends nothing there on nodes of "
            f"{problem.node_size} ranks; choose exchange auto"
        )
    item = problem.input_bytes
    return Resolved(
        problem=problem,
        hardware=hardware,
        choices=choices,
        schedule=schedule,
        reason=reason,
        estimate=estimate,
        division=division,
        head_exchange=head_exchange,
        exchange=exchange,
        num_head_chunks=chunks,
        written_bytes=item if problem.on_gpu else max(4, item),
    )


def _model_chooses(choices: Choices) -> bool:
    """Whether `auto` is the cost model's choice on GPUs."""
    return choices.schedule == choices.backward == choices.exchange == "auto"


def asks_for_link(problem: Problem, choices: Choices) -> bool:
    """Whether the link between nodes is measured before choosing: for the schedule, or for head chunks.

    Where backward's side alone is open, its links keep their default speeds (`cheaper_backward`): both sides send in
    the same pattern, so that nearly always the bytes decide.
    """
    if not problem.on_gpu or problem.nodes == 1:
        return False
    return _model_chooses(choices) or (choices.schedule in ULYSSES_SCHEDULES and choices.num_head_chunks is None)


def _num_head_chunks(
    schedule: str, problem: Problem, workload: Workload, hardware: HardwareModel, given: int | None
) -> int:
    """The given number of head chunks or, on GPUs, the cheapest. Raises ValueError for one that does not divide."""
    if given is None:
        return choose_num_head_chunks(schedule, workload, hardware) if problem.on_gpu else 1
    kv_heads = problem.kv_heads // all_to_all_ranks(schedule, problem)
    if kv_heads % given:
        raise ValueError(
            f"num_head_chunks {given} does not divide the {kv_heads} KV heads of a rank under schedule {schedule}; "
            "give a number that does"
        )
    return given


def _head_exchange(schedule: str, exchange: str, problem: Problem, division: Division) -> str:
    """How an all-to-all sends heads: by copy engine where all its ranks share a node and `exchange` allows it."""
    inside, reason = schedule == "usp" or problem.nodes == 1, problem.copies_unsupported_reason
    if exchange == "copy_engine" and problem.cp_size > 1 and reason:
        raise ValueError(reason)
    if division.shared_by == 1:
        return "none"
    copied = inside and exchange in ("auto", "copy_engine") and reason is None
    return "copy_engine" if copied else "all_to_all"


def _ring_exchange(exchange: str, problem: Problem, division: Division) -> str:
    """How a ring sends chunks: by `auto` the fastest that the links inside its inner rings allow. Inner rings of one
    rank leave nothing to choose: chunks are passed on from node to node."""
    ring, reason = division.ring, problem.copies_unsupported_reason
    if ring.cp_size == 1:
        return "none"
    if ring.node_size == 1:
        return "relay"
    spans_nodes = ring.node_size > division.node_size
    if exchange == "auto":
        return "relay" if spans_nodes else "direct" if reason else "copy_engine"
    if exchange == "copy_engine" and reason:
        raise ValueError(reason)
    if exchange == "copy_engine" and spans_nodes:
        raise ValueError(
            f"exchange copy_engine copies inside a node and this ring has {ring.node_size} ranks over nodes of "
            f"{division.node_size}; choose schedule double_ring or exchange relay"
        )
    return exchange


def cheaper_backward(
    mask: Mask, layout: Layout, volume: RingVolume, seq_len: int, shards: Shards, hardware: HardwareModel
) -> str:
    """The backward side whose bytes take less time on the links; `query` on a tie, as for a single rank."""

    def seconds(side: str) -> float:
        sent = group_backward_bytes(mask, layout, volume, seq_len, shards, side == "query")
        return hardware.link_seconds(sent.near, sent.far)

    return min(BACKWARD_SIDES, key=seconds)


@lru_cache(maxsize=256)
def group_backward_bytes(
    mask: Mask, layout: Layout, volume: RingVolume, seq_len: int, shards: Shards, sends_queries: bool
) -> SentBytes:
    """Backward bytes of all ranks of a small group, of the first, middle and last of a large one, added up.

    The same on every rank. Ranks are added up because with contiguous causal shards the first rank sends most with one
    side and the last rank with the other, and both finish at the same time.
    """
    size = volume.ring.cp_size
    total = SentBytes()
    for rank in range(size) if size <= ALL_RANKS else (0, size // 2, size - 1):
        work = comm_plan(mask, layout, volume.ring, seq_len, rank, sends_queries)
        total += volume.backward(work, rank, shards, sends_queries)
    return total


def choose_layout(
    mask: Mask, seq_len: int, cp_size: int, tail: float = 1.0, among: Sequence[Layout] = PREFERENCE
) -> Layout:
    """The layout that divides the mask's work most evenly; of those as good as the best, the simplest.

    Contiguous is preferred: with local masks a rank then needs chunks of the fewest other ranks, and every step has the
    fewest tiles. Several documents may also be dealt one by one (`Balanced`), which sends less than zigzag: nothing of
    documents that are whole on a rank. Zigzag has two runs of tokens per rank; striped has tiles with every rank. A
    layout that would cut the mask into too many tiles is skipped. Only layouts that can split the length are
    considered; when none can, all are, and the error names the one that would have been best. Where the cost model
    finds contiguous or zigzag shards faster than documents that are dealt, they are taken.

    Args:
        tail: attention's outputs are saved for the last `tail` of the sequence and recomputed before it. With a tail
            between 0 and 1 the recomputed work and the saved rows should be divided evenly as well, and zigzag over
            head and tail is one more candidate.
        among: layouts that do not depend on the mask, in order of preference.

    Raises ValueError with the mask's `unsupported_reason` when it does not describe `seq_len` tokens, and for what is
    no mask or no count.
    """
    check_is_mask(mask)
    if not all(hasattr(each, "__index__") and each > 0 for each in (seq_len, cp_size)):
        raise ValueError(f"seq_len {seq_len!r} and cp_size {cp_size!r} are not both counts above 0; give ints")
    cut = tail_cut(tail, seq_len, cp_size)
    layouts = list(among)
    if 0 < cut < seq_len:
        layouts.insert(layouts.index(LAYOUTS["zigzag"]) + 1, SplitZigzag(tail))
    if isinstance(mask, Documents) and (len(mask.lengths) > 1 or mask.repeat) and seq_len % cp_size == 0:
        layouts.insert(layouts.index(LAYOUTS["zigzag"]), balanced(mask, tail))
    layouts = [layout for layout in layouts if split_unsupported_reason(layout, seq_len, cp_size) is None] or layouts

    def unevenness(layout: Layout) -> float:
        work = imbalance(mask, layout, seq_len, cp_size)
        if not 0 < cut < seq_len:
            return work
        kept = kept_share(layout, seq_len, cp_size, cut) * seq_len / (seq_len - cut)
        return max(work, kept, imbalance(FirstRows(mask, cut), layout, seq_len, cp_size))

    shares = {layout: unevenness(layout) for layout in layouts}
    good = [layout for layout in layouts if shares[layout] <= min(shares.values()) * AS_GOOD]
    others = sorted(set(layouts) - set(good), key=shares.__getitem__)
    chosen = next((layout for layout in [*good, *others] if _is_whole(mask, layout, seq_len, cp_size)), good[0])
    if isinstance(chosen, Balanced) and not 0 < cut < seq_len:
        simple = [each for each in layouts if each.name in ("contiguous", "zigzag")]
        simple = [each for each in simple if _is_whole(mask, each, seq_len, cp_size)]
        return _faster(chosen, simple, mask, seq_len, cp_size)
    return chosen


def _faster(chosen: Layout, others: Sequence[Layout], mask: Mask, seq_len: int, cp_size: int) -> Layout:
    """The chosen layout, or the fastest other one where a ring of a typical layer takes less time with it by the cost
    model: uneven work costs nothing where a step takes the host longer than the GPU."""
    node_size = 8 if cp_size % 8 == 0 else cp_size

    def seconds(layout: Layout) -> float:
        return ring_seconds(Problem(
            mask=mask, layout=layout, seq_len=seq_len, batch=1, heads=32, kv_heads=8, head_dim=128, input_bytes=2,
            cp_size=cp_size, node_size=node_size,
        ))  # fmt: skip

    fastest = min(others, key=seconds, default=chosen)
    return fastest if AS_GOOD * seconds(fastest) < seconds(chosen) else chosen


def balanced(mask: Mask, tail: float = 1.0) -> Balanced:
    """The layout that deals the documents of a mask, those of the last `tail` of the sequence by themselves; any other
    mask counts as one document."""
    if isinstance(mask, Documents):
        return mask.dealt(Balanced(tail=tail))
    return Balanced(causal=not isinstance(mask, Full), tail=tail)


@lru_cache(maxsize=256)
def _is_whole(mask: Mask, layout: Layout, seq_len: int, cp_size: int) -> bool:
    """Whether the mask has few enough tiles under this layout, judged by the first shard against itself."""
    try:
        pair_tiles(mask, layout, seq_len, cp_size, 0, 0)
    except TooManyTiles:
        return False
    return True


def trial_layout(settings: TrialSettings) -> str | Layout:
    """The layout of a trial of method `burst`: its own, or for `auto` the best."""
    if settings.task == "linear":
        return "contiguous"
    tail, mask = settings.checkpoint.tail, parse_mask(settings.masks[0])
    if settings.layout == "split_zigzag":
        return SplitZigzag(tail)
    if settings.task != "train" or not settings.checkpoint.layers_again(settings.model.layers):
        tail = 1.0  # nothing is recomputed
    # Of packed rows each batch's documents are dealt anew: training replaces this layout with that of the batch.
    if settings.layout == "balanced" or (settings.packs and settings.layout == "auto" and settings.cp_size > 1):
        return balanced(mask, tail)
    if settings.layout != "auto":
        return settings.layout
    # An all-to-all or all-gather moves runs of consecutive tokens.
    among = [each for each in PREFERENCE if each.name != "striped" or settings.schedule not in RUNS_OF_TOKENS]
    return choose_layout(mask, settings.row_tokens, settings.cp_size, tail, among)


def recomputes_attention(settings: TrialSettings) -> bool:
    """Whether a trial's attention is called again in backward, with outputs that checkpointing has kept."""
    return settings.task == "train" and settings.checkpoint.reuses_attention(settings.model.layers)


def trial_choices(settings: TrialSettings, grad_comm_dtype: str = "fp32") -> Choices:
    """The choices of a trial of method `burst`; a baseline replaces some of them. `grad_comm_dtype` is what the
    setting's `auto` stands for."""
    dtype = settings.grad_comm_dtype
    return Choices(
        kernel=settings.kernel,
        schedule=settings.schedule,
        backward=settings.backward,
        exchange=settings.exchange,
        deterministic=settings.deterministic,
        grad_comm_dtype=grad_comm_dtype if dtype == "auto" else dtype,
        recompute=recomputes_attention(settings),
        lse_gradient=False,  # the LSE is only saved for a recomputation
    )


def resolve_trial(
    settings: TrialSettings, node_size: int, hardware: HardwareModel | None = None, mask: str | None = None
) -> Resolved:
    """What a trial of method `burst` becomes on GPUs, with `node_size` context-parallel ranks on a node, in layers with
    this one of `settings.masks`, the first by default. Raises ValueError for what cannot run."""
    problem = problem_of_trial(settings, as_layout(trial_layout(settings)), node_size, mask)
    return resolve(problem, hardware or HardwareModel(), trial_choices(settings))
