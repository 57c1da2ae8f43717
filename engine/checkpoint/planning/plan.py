"""From settings whose checkpointing is open to settings with a value for everything, and what these are predicted to
take.

The cheapest choice that fits is searched: all choices are compared, but for those that cannot be cheaper or cannot fit.
The last layers are kept whole, so how many, and how much of each, says everything. What saves comparisons and
loses none: a shorter tail and a smaller share of the MLP repeat more work, more moments on the host leave more room,
and one of three tails takes the least memory. With fewer whole layers memory need not fall; and time need not grow with
groups of heads, or with copies that the repeated work hides.

A forecast says in words what was chosen and why, and stands in the trial's record.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from engine.checkpoint.planning.cost import CostModel, GpuSpeeds
from engine.checkpoint.planning.memory import GIB, MemoryModel, RankMemory
from engine.checkpoint.planning.memory_settings import (
    BESIDE_CHECKPOINT,
    MemorySettings,
    memory_settings_of,
    open_names,
    with_memory_settings,
)
from engine.combinations import gradient_offload_unsupported_reason, head_groups_unsupported_reason
from engine.lm_head.loss_kernel import forms_tiles
from engine.measurement import Forecast
from engine.settings import Checkpoint, Offload, Replay, TrialSettings, hosted_fraction

# Error of the memory model, which every plan leaves room for. Of records it is smaller (docs/plan.md).
ALLOCATED_WITHIN, RESERVED_WITHIN = 0.04, 0.10
NOTHING_FITS = "nothing fits"  # the words of such a plan begin so

_HOSTED_TRIED = 8  # numbers of layers in host memory that `leanest` compares, about
_NEAREST = 4  # frames that `leanest` compares with every number of whole layers
_NEARLY = 1.02  # shares of a budget by `leanest` below which another choice may fit
_ROOM = 1.01  # over what is predicted to be reserved: beyond a budget it is slow to reserve, but no failure
# On a CPU all is host memory.
_ONLY_WITH_GPU = frozenset({"checkpoint.offload", "checkpoint.host_layers", "optimizer_offload", "gradient_offload"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Memory that one rank may take, in bytes; infinite where nothing is known."""

    gpu: float | None  # None: the rank computes on a CPU
    host: float = float("inf")
    source: str = ""  # where the figure of the GPU, or without one of the host, comes from
    host_source: str = ""  # where that of the host comes from, beside a GPU

    @property
    def bytes(self) -> float:
        """Of the device that computes."""
        return self.host if self.gpu is None else self.gpu

    def share(self, memory: RankMemory, correction: float) -> float:
        """The part of the budget that a rank's memory takes; it fits up to 1. `correction` multiplies the prediction.

        On a GPU that is what the allocator reserves, so that it never has to give memory back in the middle of a step,
        and what is allocated with the model's error on top.
        """
        device = correction * self.needed(memory) / self.bytes
        return device if self.gpu is None else max(device, memory.host / self.host)

    def needed(self, memory: RankMemory) -> float:
        """Bytes of the device that computes, with room for what a prediction may miss."""
        if self.gpu is None:
            return memory.without_gpu
        return max(_ROOM * memory.reserved, (1 + ALLOCATED_WITHIN) * memory.allocated)


def planned(
    settings: TrialSettings,
    budget: Budget,
    speeds: GpuSpeeds | None = None,
    *,
    correction: float = 1.0,
    correction_source: str = "",
    grid: SearchGrid | None = None,
) -> tuple[TrialSettings, Forecast]:
    """The settings with the cheapest values of those that `planned` names, and the forecast.

    Where no values fit, those that take least memory, and the forecast says so: whether they run is then measured.
    """
    problem = _problem(settings, budget, speeds, correction, grid)
    found = cheapest(problem)
    choice = found or leanest(problem)
    chosen = with_memory_settings(settings, choice)
    memory = problem.memory.of(choice)
    seconds = problem.cost.seconds(choice)
    words = _words(chosen, budget, memory, seconds, None if found else correction * budget.needed(memory))
    if not found and fits_with_gradients_away(settings, budget, correction):
        words += "; something fits with gradient_offload true, which is not chosen on several GPUs"
    forecast = Forecast(
        words=words,
        fits=found is not None,
        budget_bytes=None if budget.bytes == float("inf") else int(budget.bytes),
        allocated_bytes=int(memory.allocated if budget.gpu is not None else memory.without_gpu),
        reserved_bytes=int(memory.reserved if budget.gpu is not None else memory.without_gpu),
        host_bytes=int(memory.host),
        added_seconds=seconds,
        correction=correction,
    )
    if correction != 1:
        shown = f" ({correction_source})" if correction_source else ""
        forecast = replace(forecast, words=f"{forecast.words}; the prediction is taken {correction:.3g} times{shown}")
    return chosen, forecast


def fits_with_gradients_away(settings: TrialSettings, budget: Budget, correction: float = 1.0) -> bool:
    """Whether something fits with gradients in host memory, where a user has to ask for them. `correction` multiplies
    the prediction of the GPU's memory."""
    away = with_gradients_away(settings)
    if away is None or budget.gpu is None:
        return False
    return fits_somehow(away, replace(budget, gpu=budget.gpu / correction))


def with_gradients_away(settings: TrialSettings) -> TrialSettings | None:
    """The settings with gradients in host memory where only a user can choose that, on several GPUs; None elsewhere,
    where it cannot be, and where a user has decided."""
    name = "gradient_offload"
    if settings.world_size == 1 or name not in open_names(settings):
        return None
    others = " ".join(each for each in settings.planned.split() if each != name)
    away = replace(settings, gradient_offload=True, planned=others)
    return None if gradient_offload_unsupported_reason(away) else away


def least_gpu_bytes(settings: TrialSettings) -> float:
    """The smallest budget of a GPU, in bytes, that values of the open settings fit, whatever time they take."""
    return _least_share(settings, Budget(gpu=1.0))  # memory is so many times one byte


def fits_somehow(settings: TrialSettings, budget: Budget) -> bool:
    """Whether some values of the open settings fit the budget, as `planned` finds, but where that is clear without its
    search."""
    share = _least_share(settings, budget)
    if 1 < share <= _NEARLY:  # `leanest` does not compare all choices
        return cheapest(_problem(settings, budget)) is not None
    return share <= 1


def _least_share(settings: TrialSettings, budget: Budget) -> float:
    """The smallest part of the budget that values of the open settings take."""

    def least(budget: Budget, grid: SearchGrid | None = None) -> float:
        problem = _problem(settings, budget, grid=grid)
        return problem.share(problem.memory.of(leanest(problem)))

    # A part of the moments on the host leaves less room on the GPU than all, and may be all that the host holds.
    ends = SearchGrid(optimizer_offload=(False, True))
    if budget.host == float("inf"):
        return least(budget, ends)
    if budget.gpu is not None:
        if (of_gpu := least(replace(budget, host=float("inf")), ends)) > 1:
            return of_gpu
        if (of_both := least(budget, ends)) <= 1:
            return of_both
    return least(budget)


def _problem(
    settings: TrialSettings,
    budget: Budget,
    speeds: GpuSpeeds | None = None,
    correction: float = 1.0,
    grid: SearchGrid | None = None,
) -> PlanningProblem:
    on_gpu, grid = budget.gpu is not None, grid or SearchGrid()
    opened, idle = open_names(settings), without_effect(settings, on_gpu=on_gpu)
    own, default = memory_settings_of(settings), MemorySettings(checkpoint=settings.checkpoint)
    # An earlier plan may have given it another value.
    start = replace(own, **{name: getattr(default, name) for name in opened & idle & set(BESIDE_CHECKPOINT)})
    groups = dict.fromkeys(min(groups, settings.model.kv_heads) for groups in grid.head_groups)  # more are refused
    return PlanningProblem(
        memory=MemoryModel(settings, on_gpu=on_gpu),
        cost=CostModel(settings, speeds or GpuSpeeds()),
        share=lambda memory: budget.share(memory, correction),
        start=start,
        open_names=opened - idle,
        layers=settings.model.layers,
        grid=replace(grid, head_groups=tuple(groups)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchGrid:
    """Values that are compared of each open setting, the one that costs least time first."""

    tail: Sequence[float] = tuple(step / 10 for step in range(10, -1, -1))
    mlp: Sequence[float] = tuple(step / 50 for step in range(50, -1, -1))
    mlp_tiles: Sequence[int] = (1, 8, 32)
    projection_tiles: Sequence[int] = (1, 8)
    every: Sequence[int] = (1, 4, 16)
    replay: Sequence[Replay] = ("hold", "bisect")
    offload: Sequence[Offload] = ("none", "inputs", "all")
    optimizer_offload: Sequence[bool | float] = (False, *(step / 20 for step in range(1, 20)), True)
    gradient_offload: Sequence[bool] = (False, True)
    head_tiles: Sequence[int] = (0, 32, 128)
    head_groups: Sequence[int] = (1, 8)
    host_layers: Sequence[int] = (0,)  # where it is open: and every other number, in frames that `hosts` names


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """What is to be chosen, and by what."""

    memory: MemoryModel
    cost: CostModel
    share: Callable[[RankMemory], float]  # of the budget that a rank's memory takes; it fits up to 1
    start: MemorySettings  # the values of settings that are not open
    open_names: frozenset[str]  # dotted names of those that are
    layers: int
    grid: SearchGrid = field(default_factory=SearchGrid)
    # Values of each setting to compare: its own where it is not open.
    compared: SearchGrid = field(init=False)

    def __post_init__(self) -> None:
        own: dict[str, Any] = {}
        for name in (each.name for each in fields(SearchGrid)):
            beside = name in BESIDE_CHECKPOINT
            if (name if beside else f"checkpoint.{name}") not in self.open_names:
                own[name] = (getattr(self.start if beside else self.start.checkpoint, name),)
        if "head_tiles" not in own:  # fewer than the head's own hold more and save no time
            first, *more = self.grid.head_tiles
            own["head_tiles"] = (first, *(tiles for tiles in more if tiles > self.cost.own_head_tiles))
        object.__setattr__(self, "compared", replace(self.grid, **own))

    def frames(self) -> Iterator[MemorySettings]:
        """Choices of everything but whole layers, tail and MLP: with none, and the least of the others."""
        names, compared = BESIDE_CHECKPOINT, self.compared
        values = (getattr(compared, name) for name in names)
        beside = [dict(zip(names, each, strict=True)) for each in itertools.product(*values)]
        tail, mlp = compared.tail[-1], compared.mlp[-1]
        for offload, every, replay in itertools.product(compared.offload, compared.every, compared.replay):
            if every < 2 and replay != compared.replay[0]:
                continue  # nothing follows from a group of one
            checkpoint = Checkpoint(every=every, offload=offload, replay=replay, tail=tail, mlp=mlp)
            for each in beside:
                frame = MemorySettings(checkpoint=checkpoint, **each)
                if frame.gradient_offload and not frame.optimizer_offload and any(compared.optimizer_offload):
                    continue  # means nothing
                if self.compares(frame):
                    yield frame

    def compares(self, frame: MemorySettings) -> bool:
        """Whether groups of heads are compared beside the frame's tiles: not where one tile of MLP or projections, of
        which more are compared, holds more than attention does."""
        compared = self.compared
        tiled = frame.mlp_tiles > min(compared.mlp_tiles) and frame.projection_tiles > min(compared.projection_tiles)
        open_tiles = len(compared.mlp_tiles) > 1 and len(compared.projection_tiles) > 1
        return frame.head_groups == compared.head_groups[0] or tiled or not open_tiles

    def hosts(self, frame: MemorySettings) -> bool:
        """Whether layers in host memory are compared in a frame: where all layers are kept whole, in the first of the
        frames that say this in several ways."""
        compared, of = self.compared, frame.checkpoint
        first = of.offload == compared.offload[0] and of.replay == compared.replay[0] and of.every == compared.every[0]
        first = first and frame.head_groups == compared.head_groups[0]
        return bool(self.numbers_hosted) and first and self.layers in self.whole_layers(frame)

    @property
    def numbers_hosted(self) -> Sequence[int]:
        """Numbers of layers in host memory to compare there, ascending, beside none where that is open."""
        own = self.compared.host_layers[0]
        return range(1, self.layers) if "checkpoint.host_layers" in self.open_names else (own,) if own else ()

    def leanest_tails(self, frame: MemorySettings) -> Sequence[float]:
        """Tails one of which takes the least memory: the shortest, which keeps the least; the longest in a held group,
        of which it forms no output again; both and the one beside the shortest where chunks are received into slots, of
        which there are as many for each tail between the two."""
        tails, of = self.compared.tail, frame.checkpoint
        if self.memory.has_slots:
            return tuple(dict.fromkeys((tails[-1], *tails[-2:-1], tails[0])))
        return (tails[-1], tails[0]) if of.every > 1 and of.replay == "hold" and len(tails) > 1 else tails[-1:]

    def whole_layers(self, frame: MemorySettings) -> list[int]:
        """Numbers of whole layers to compare, ascending."""
        if not frame.checkpoint.every:
            return [self.layers]
        if "checkpoint.whole_layers" in self.open_names:
            return list(range(self.layers + 1))
        return [min(self.layers, self.start.checkpoint.whole_layers)]

    def with_kept(
        self, frame: MemorySettings, whole: int, tail: float, mlp: float, hosted: int | None = None
    ) -> MemorySettings:
        """A frame with whole layers, tail and MLP, and layers in host memory where they are compared."""
        of, hosted = frame.checkpoint, self.compared.host_layers[0] if hosted is None else hosted
        every, offload, replay = of.every, of.offload, of.replay
        if whole == self.layers:  # nothing is computed again: tail, offload and replay mean nothing
            every, whole = (0, 0) if "checkpoint.every" in self.open_names else (every, whole)
            tail, offload, replay = self.compared.tail[0], self.compared.offload[0], self.compared.replay[0]
            frame = replace(frame, head_groups=self.compared.head_groups[0])
        kept = Checkpoint(
            every=every, tail=tail, offload=offload, replay=replay, whole_layers=whole, mlp=mlp, host_layers=hosted
        )
        return replace(frame, checkpoint=kept)


def cheapest(problem: PlanningProblem) -> MemorySettings | None:
    """The choice that adds the fewest seconds to a step among those that fit; None where none does."""
    best: MemorySettings | None = None
    least = float("inf")
    fixed = problem.cost.fixed
    alike: dict[MemorySettings, list[MemorySettings]] = {}  # frames that differ in moments on the host alone
    for frame in sorted(problem.frames(), key=fixed):
        # Without moments on the host, parameters may be held in another way: a frame of its own.
        alike.setdefault(replace(frame, optimizer_offload=bool(frame.optimizer_offload)), []).append(frame)

    def order(frames: Sequence[MemorySettings]) -> tuple[float, ...]:
        return frames[0].head_groups, bool(frames[0].optimizer_offload), fixed(frames[0])

    for frames in sorted(alike.values(), key=order):
        cheaper = [frame for frame in frames if fixed(frame) < least]
        again = _least_again(problem, cheaper, least)
        for frame in cheaper:
            if fixed(frame) + again >= least:
                break
            found = _cheapest_in(problem, frame, least)
            if found:
                best, least = found, problem.cost.seconds(found)
    return best


def _least_again(problem: PlanningProblem, frames: Sequence[MemorySettings], least: float) -> float:
    """Seconds that every choice of `frames`, which differ in moments on the host alone, adds at least beyond their
    `fixed`: those of the most moments there, which leave the most room, since the moments of a parameter take more than
    its gradient, which waits for them. Infinite where no choice adds less than `least` in all."""
    fixed = problem.cost.fixed
    if len(frames) < 2:
        return 0.0
    on_device = replace(
        problem, share=lambda memory: problem.share(replace(memory, host=0.0)), cost=problem.cost.apart()
    )
    found = _cheapest_in(on_device, frames[-1], least - fixed(frames[0]) + fixed(frames[-1]))
    return on_device.cost.seconds(found) - fixed(frames[-1]) if found else float("inf")


def _cheapest_in(problem: PlanningProblem, frame: MemorySettings, least: float) -> MemorySettings | None:
    """The cheapest choice of a frame that fits and adds less than `least` seconds; None where there is none."""
    best: MemorySettings | None = None
    bound, tails, mlps = problem.cost.bound, problem.compared.tail, problem.compared.mlp
    # Without copies to the host, which a longer group of fewer whole layers may hide.
    no_copies = replace(frame, checkpoint=replace(frame.checkpoint, offload="none"))
    for choice in _hosting(problem, frame, least) if problem.hosts(frame) else ():
        if (seconds := problem.cost.seconds(choice)) < least:
            best, least = choice, seconds
    if problem.compared.host_layers[0] and problem.layers in problem.whole_layers(frame):
        return best  # set by hand: not beside layers that are computed again, if all can be whole
    for whole in reversed(_may_be_whole(problem, frame)):
        if bound(problem.with_kept(no_copies, whole, tails[0], mlps[0], 0)) >= least:
            if frame.head_groups == 1 or problem.memory.alike:
                break  # fewer whole layers repeat more; with groups, which layers of a held group attend again decides
            continue
        shares = _mlps(problem, frame, whole, problem.leanest_tails(frame))
        if not shares or _same_without_groups(problem, frame, whole):
            continue
        for tail in tails if whole < problem.layers else tails[:1]:
            if bound(problem.with_kept(frame, whole, tail, shares[0])) >= least:
                continue
            for choice in _rivals(problem, frame, whole, tail, least):
                if (seconds := problem.cost.seconds(choice)) < least:
                    best, least = choice, seconds
    return best


def _may_be_whole(problem: PlanningProblem, frame: MemorySettings) -> Sequence[int]:
    """The numbers of whole layers of a frame that may fit: with the least tail and share of the MLP, at the head."""
    numbers, tail, mlp = problem.whole_layers(frame), min(problem.compared.tail), problem.compared.mlp[-1]

    def too_many(whole: int) -> bool:
        return problem.share(problem.memory.at_head(problem.with_kept(frame, whole, tail, mlp))) > 1

    return numbers[: bisect_left(numbers, True, key=too_many)]


def _same_without_groups(problem: PlanningProblem, frame: MemorySettings, whole: int) -> bool:
    """Whether the choices of a frame with so many whole layers need no less memory for their groups of heads: then they
    are no cheaper than those of a frame before.

    Groups lower the moments of layers with attention that are computed again. Where another moment is the fullest with
    the least of tail and MLP it stays so with more, of which it holds at least as much; but for that of a linear layer,
    which no tail adds to, and that of the first layer's forward, which is fuller than the last one's where gradients
    wait for their updates."""
    if frame.head_groups == problem.compared.head_groups[0]:
        return False
    tails, mlp = problem.compared.tail, problem.compared.mlp[-1]
    grows = problem.memory.alike and not problem.memory.updates_wait(frame)
    least = (problem.with_kept(frame, whole, tail, mlp) for tail in (tails[-1:] if grows else tails))
    alone = problem.compared.head_groups[0]
    return all(problem.memory.of(each) == problem.memory.of(replace(each, head_groups=alone)) for each in least)


def _rivals(
    problem: PlanningProblem, frame: MemorySettings, whole: int, tail: float, least: float
) -> Iterator[MemorySettings]:
    """Of the choices of the MLP's share that fit: the largest share, and the smallest, which may need no cut."""
    shares = _mlps(problem, frame, whole, (tail,), least)
    for some in (shares, shares[-1:]):
        for mlp in some:
            choice = problem.with_kept(frame, whole, tail, mlp)
            if problem.share(problem.memory.of(choice)) <= 1:
                yield choice
                break


def _hosting(problem: PlanningProblem, frame: MemorySettings, least: float) -> Iterator[MemorySettings]:
    """The choices of a frame with all layers whole, some in host memory, that fit and may add less than `least`: of
    each share of the MLP that with the fewest there. Each more costs copies, and the LM head's moment falls with it."""
    memory, layers, tail = problem.memory, problem.layers, problem.compared.tail[0]
    numbers, tried = problem.numbers_hosted, False
    most = 0  # how many of these numbers the host holds

    def may_fit(hosted: int) -> bool:
        choice = problem.with_kept(frame, layers, tail, problem.compared.mlp[-1], hosted)
        return problem.share(memory.of(choice, least=True)) <= 1

    for mlp in problem.compared.mlp:  # the largest first, of which it holds the fewest

        def hosting(hosted: int, mlp: float = mlp) -> MemorySettings:
            return problem.with_kept(frame, layers, tail, mlp, hosted)

        def fits_at_head(hosted: int, choice: Callable[[int], MemorySettings] = hosting) -> bool:
            return problem.share(replace(memory.at_head(choice(hosted)), host=0.0)) <= 1

        def fills_host(hosted: int, choice: Callable[[int], MemorySettings] = hosting) -> bool:
            return problem.share(RankMemory(allocated=0, reserved=0, host=memory.host(choice(hosted)))) > 1

        if problem.cost.bound(hosting(0)) >= least:
            return
        able: Sequence[int]
        if not memory.alike:  # with one more, other layers are there, which may save less
            able = [each for each in numbers if not fills_host(each) and fits_at_head(each)]
        else:
            most = bisect_left(numbers, True, lo=most, key=fills_host)
            # The most of them first: mostly even these do not fit.
            some_fit = most > 0 and fits_at_head(numbers[most - 1])
            able = numbers[bisect_left(numbers, True, hi=most, key=fits_at_head) : most] if some_fit else ()
        for choice in map(hosting, able):
            if problem.cost.bound(choice) >= least:
                break
            if problem.share(memory.of(choice)) <= 1:
                yield choice
                least = min(least, problem.cost.seconds(choice))
                break
        else:
            if able and not tried:  # leave out the numbers that fit with no share of the MLP; one pass finds all
                numbers, most, tried = [each for each in numbers if may_fit(each)], 0, True


def leanest(problem: PlanningProblem) -> MemorySettings:
    """The choice that takes the smallest share of the budget, whatever its time: what is tried where nothing fits.

    All frames are compared with the most and the least of what may be kept, the nearest also with what lies between:
    where moments of several kinds of layers, or of an MLP in one tile, are nearly as full, it may take less. What is
    found takes up to a few thousandths more than the least.
    """
    mlps = problem.compared.mlp

    def share(choice: MemorySettings) -> float:
        return problem.share(problem.memory.of(choice))

    def least(frame: MemorySettings, numbers: Iterable[int]) -> MemorySettings:
        kept = itertools.product(numbers, problem.leanest_tails(frame))
        found = [problem.with_kept(frame, whole, tail, mlps[-1]) for whole, tail in kept]
        if problem.hosts(frame):
            found += [
                problem.with_kept(frame, problem.layers, 1.0, mlps[-1], each) for each in problem.numbers_hosted[-1:]
            ]
        return min(found, key=share)

    def of_ends(frame: MemorySettings) -> float:
        numbers = problem.whole_layers(frame)
        return share(least(frame, {numbers[0], numbers[-1]}))

    def of_middle(frame: MemorySettings) -> float:
        return share(problem.with_kept(frame, problem.layers, 1.0, mlps[len(mlps) // 2], problem.numbers_hosted[-1]))

    nearest = heapq.nsmallest(_NEAREST, problem.frames(), key=of_ends)
    found = min((least(frame, problem.whole_layers(frame)) for frame in nearest), key=share)
    nearest = heapq.nsmallest(_NEAREST, filter(problem.hosts, problem.frames()), key=of_middle)
    hosting = [problem.with_kept(frame, problem.layers, 1.0, mlps[-1], problem.numbers_hosted[-1]) for frame in nearest]
    tried = [found]
    for start in (found, *hosting):
        again = start.checkpoint.layers_again(problem.layers)
        if again == problem.layers:
            continue  # no MLP keeps anything, and no layer is on the host
        hosted = () if again else problem.numbers_hosted[:: max(1, problem.layers // _HOSTED_TRIED)]
        kept = itertools.product(mlps, {start.checkpoint.host_layers, *hosted})
        tried += [replace(start, checkpoint=replace(start.checkpoint, mlp=mlp, host_layers=each)) for mlp, each in kept]
    return min(tried, key=share)


def _mlps(
    problem: PlanningProblem, frame: MemorySettings, whole: int, tails: Sequence[float], least: float = float("inf")
) -> Sequence[float]:
    """The MLP's shares that cost less than `least` seconds with the first of `tails` and may fit with one of them, the
    largest first; one at most where no layer is whole."""
    mlps = problem.compared.mlp if whole else problem.compared.mlp[:1]

    def seconds(mlp: float) -> float:
        return problem.cost.bound(problem.with_kept(frame, whole, tails[0], mlp))

    def may_fit(mlp: float) -> bool:
        choices = (problem.with_kept(frame, whole, tail, mlp) for tail in tails)
        return any(problem.share(problem.memory.of(choice, least=True)) <= 1 for choice in choices)

    cheaper = len(mlps) if seconds(mlps[-1]) < least else bisect_left(mlps, least, key=seconds)
    if not cheaper or not may_fit(mlps[cheaper - 1]):
        return ()
    return mlps[bisect_left(mlps, True, hi=cheaper, key=may_fit) : cheaper]


def without_effect(settings: TrialSettings, *, on_gpu: bool) -> frozenset[str]:
    """Names of settings of which every value is the same, or that have one value which a planner may choose."""
    names = frozenset() if on_gpu else _ONLY_WITH_GPU
    if settings.gradient_offload and "gradient_offload" not in settings.planned.split():
        names -= {"optimizer_offload"}  # gradients on the host are of moments there
    # Several GPUs have not run it yet: there it is for a user to set.
    if settings.world_size > 1 or gradient_offload_unsupported_reason(replace(settings, gradient_offload=True)):
        names |= {"gradient_offload"}
    if not forms_tiles(settings) or settings.tp_size > 1:
        names |= {"head_tiles"}
    if head_groups_unsupported_reason(replace(settings, head_groups=2)):
        names |= {"head_groups"}
    return names


def _words(settings: TrialSettings, budget: Budget, memory: RankMemory, seconds: float, too_much: float | None) -> str:
    """What was chosen, and why, in one sentence. `too_much`: bytes that would have to fit, where nothing does."""
    kept = "; ".join(kept_in_words(settings))
    needed = too_much or (memory.without_gpu if budget.gpu is None else memory.reserved)
    if budget.bytes == float("inf"):
        room = f"{_short(needed / GIB)} GiB predicted, budget unknown"
    else:
        room = f"{_short(needed / GIB)} of {_short(budget.bytes / GIB)} GiB ({budget.source})"
    if _moves(settings) and budget.gpu is not None and budget.host != float("inf"):
        room += (
            f", and {_short(memory.host / GIB)} of {_short(budget.host / GIB)} GiB of the host ({budget.host_source})"
        )
    if too_much is not None:
        return f"{NOTHING_FITS}: {room} with the least that can be kept: {kept}"
    added = f"adds {_short(seconds, 2)} s to a step, the least that fits" if seconds else "nothing is repeated"
    return f"{kept}; {room}; {added}"


def _moves(settings: TrialSettings) -> bool:
    """Whether a rank holds tensors of its GPU in host memory."""
    checkpoint = settings.checkpoint
    return bool(settings.optimizer_offload or checkpoint.offload != "none" or checkpoint.host_layers)


def _short(value: float, digits: int = 3) -> str:
    """To so many digits, and whole numbers in full."""
    return f"{value:,.0f}" if value >= 10**digits - 0.5 else f"{value:.{digits}g}"


def kept_in_words(settings: TrialSettings) -> list[str]:
    """What a trial keeps and where, one phrase each."""
    checkpoint, layers = settings.checkpoint, settings.model.layers
    again = checkpoint.layers_again(layers)
    words = []
    if whole := layers - again:
        which = f"all {layers}" if not again else f"the last {whole} of {layers}"
        mlp = checkpoint.mlp
        gates = "all" if mlp == 1 else "none" if mlp == 0 else f"{mlp:.0%}"
        words.append(f"{which} layers whole, with {gates} of the MLP's first products")
        words += [f"{hosted} of them on the host" for hosted in [len(checkpoint.hosted(layers))] if hosted]
    if again:
        where = {"none": "", "inputs": ", inputs on the host", "all": ", both on the host"}[checkpoint.offload]
        inputs = "input" if checkpoint.every == 1 else f"input of every {checkpoint.every}th ({checkpoint.replay})"
        part = "" if checkpoint.tail == 1 else f"{checkpoint.tail:.0%} of "
        attention = f"{part}attention" if checkpoint.tail else ""
        which = f"all {layers} layers" if not whole else f"{again} layer{'s' if again > 1 else ''}"
        kept = f"{inputs} and {attention}" if attention else inputs
        words.append(f"of {which} {kept}{where}")
    words += [f"MLP in {settings.mlp_tiles} tiles"] * (settings.mlp_tiles > 1)
    words += [f"projections in {settings.projection_tiles} tiles"] * (settings.projection_tiles > 1)
    if again and settings.head_groups > 1:  # layers that are kept whole attend with all heads at once
        words.append(f"attention's backward in at most {settings.head_groups} groups of heads")
    words += [f"LM head in {settings.head_tiles} tiles"] * (settings.head_tiles > 0)
    if settings.optimizer_offload:
        fraction = hosted_fraction(settings, settings.optimizer_offload)
        part = "" if fraction == 1 else f"{fraction:.0%} of the "
        what = "moments and gradients" if settings.gradient_offload else "moments"
        words.append(f"{part}{what} on the host")
    words += ["moments in 8 bits"] * (settings.optimizer_states == "8bit")
    return words
