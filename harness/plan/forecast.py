"""What a trial would take on given GPUs: time by phase, memory, and how far off such predictions were."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from engine.checkpoint.planning.plan import least_gpu_bytes
from engine.measurement import Forecast
from engine.settings import TrialSettings
from harness.machine.this_machine import Machine, imagined
from harness.metrics.hardware import Hardware
from harness.metrics.throughput import GIB, TERA
from harness.plan.checkpointing import plan_fits, with_plan
from harness.plan.predict import (
    engine_memory,
    fits_gpu,
    gpu_room,
    memory_is_modelled,
    ranks_of_node,
    ranks_per_node,
    time_or_reason,
)
from harness.plan.unsupported import no_trial_reason, unsupported_reason
from harness.predict.packed import step_tokens, step_work
from harness.predict.step import StepTime
from harness.predict.systems import SYSTEM_OF, system_memory
from harness.predict.validation import HELD_OUT, compare_times

_INTERVAL = 0.9  # of the held-out configurations were predicted within the interval
# Of a trial in new processes: joining, building, compiling, the check. Wall time less the steps: 2 to 4 s on one H200
# with kernels of cuDNN; median 16 s of the first trials of published runs, 7 s of which are the imports of a run.
START_SECONDS = 10.0
_STEP_TOKENS = 1024  # the longest sequence is a multiple of it on every rank


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialForecast:
    """Of one trial on one GPU type."""

    settings: TrialSettings
    hardware: Hardware
    nodes: int
    time: StepTime | None  # None where the trial is refused or not modelled
    reason: str  # why, else empty
    gpu_gib: float | None  # of the fullest rank; None for other tasks than train, and for other systems
    host_gib: float | None = None  # of one rank's process, approximately
    system_gib: float | None = None  # with the same settings in the system that the method stands for, where known
    plan: Forecast | None = None  # what the planner expects, where it chose

    @property
    def fits(self) -> bool | None:
        """Whether a GPU of this kind holds it, within the setting `memory` where there is one."""
        if self.gpu_gib is None:
            return None
        return fits_gpu(self.gpu_gib, self.settings, self.hardware, self.plan)

    @property
    def plan_words(self) -> str:
        """What the planner chose and why; empty where nothing was left open."""
        return self.plan.words if self.plan else ""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Seconds between which nine of ten held-out configurations of this task were found."""
        if self.time is None:
            return None
        width = held_out_width(self.settings.task == "train")
        return self.time.seconds / width, self.time.seconds * width

    @property
    def tokens_per_gpu_per_second(self) -> float | None:
        if self.time is None:
            return None
        return step_tokens(self.settings) / self.settings.world_size / self.time.seconds

    @property
    def mfu(self) -> float | None:
        if self.time is None:
            return None
        flops = step_work(self.settings).model / self.settings.world_size / self.time.seconds
        return flops / (self.hardware.peak_bf16_tflops * TERA)


def forecast(
    settings: TrialSettings,
    hardware: Hardware,
    *,
    node_ranks: int | None = None,
    plan: Forecast | None = None,
) -> TrialForecast:
    """Time and memory of a trial, or one sentence why there is none; `plan` is the planner's, where it chose. A node
    gives the trial `node_ranks` GPUs, by default as many as the hardware file says."""
    node_ranks = ranks_per_node(settings, hardware, node_ranks)
    memory, time, reason = engine_memory(settings), None, no_trial_reason(settings)
    if reason is None:
        time, reason = time_or_reason(settings, hardware, node_ranks=node_ranks)
    return TrialForecast(
        settings=settings, hardware=hardware, nodes=-(-settings.world_size // node_ranks), time=time, reason=reason,
        gpu_gib=memory.allocated / GIB if memory else None, host_gib=memory.host / GIB if memory else None,
        system_gib=_system_gib(settings, hardware, time), plan=plan,
    )  # fmt: skip


def knows_system(settings: TrialSettings, hardware: Hardware) -> bool:
    """Whether the memory of a trial in the published system is known: of training, on a GPU type with which its
    software was fitted."""
    return settings.task == "train" and settings.method in SYSTEM_OF and hardware.waiting_layers is not None


def _system_gib(settings: TrialSettings, hardware: Hardware, time: StepTime | None) -> float | None:
    """Of training in the published system, where it is known and has a time."""
    if time is None or not knows_system(settings, hardware):
        return None
    waiting_layers = hardware.waiting_layers or 0.0
    return system_memory(settings, SYSTEM_OF[settings.method], time.attention, waiting_layers) / GIB


@cache
def held_out_width(training: bool) -> float:
    """The factor within which nine of ten held-out published configurations were predicted: of training, or of
    attention alone."""
    held_out = (row for row in compare_times() if row.side == HELD_OUT and row.training == training)
    errors = sorted(abs(math.log1p(row.error)) for row in held_out if row.error is not None)
    return math.exp(statistics.quantiles(errors, n=100, method="inclusive")[round(100 * _INTERVAL) - 1])


def machine_of(hardware: Hardware) -> Machine:
    """Any number of nodes of such GPUs. No hardware file states how much memory the hosts have; the planner assumes a
    share for each GPU (`harness.plan.checkpointing`)."""
    return imagined(hardware.gpu_names[0], hardware.memory_gib, hardware.gpus_per_node)


def longest(settings: TrialSettings, hardware: Hardware) -> TrialSettings | None:
    """The trial with the longest sequence that a GPU of this kind holds, by this prediction; None where none is. Each
    length has its own plan where the planner may choose."""
    unit, machine = _STEP_TOKENS * settings.cp_size, machine_of(hardware)

    def fits(units: int) -> bool:
        try:
            tried = replace(settings, seq_len=units * unit)
        except ValueError:  # more tokens than a trial may have
            return False
        if (found := plan_fits(tried, machine, hardware)) is not None:
            return found
        memory = engine_memory(tried)
        if memory is None or memory.host > tried.host_bytes:
            return False
        return fits_gpu(memory.allocated / GIB, tried, hardware, None)

    if not memory_is_modelled(settings) or not fits(1):
        return None
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return replace(settings, seq_len=low * unit)


# Budgets of the frontier as parts of a GPU's memory; each further one is half of that two places before.
_PARTS = (1.0, 0.75)


def frontier(settings: TrialSettings, hardware: Hardware) -> Iterator[TrialForecast]:
    """The trial planned under falling budgets: all that a GPU of this kind has or the setting `memory` allows, three
    quarters, half, three eighths and so on, in whole GiB, and at last the least whole GiB that hold it, by this
    prediction. Empty where nothing fits.

    Raises ValueError where the settings are no trial, or one that cannot run on such GPUs, and where the planner
    chooses nothing or no memory is predicted, because no budget then changes anything.
    """
    if reason := no_trial_reason(settings):
        raise ValueError(reason)
    if not settings.planned or not memory_is_modelled(settings):
        raise ValueError(
            f"less memory changes nothing that is predicted of task {settings.task}, method {settings.method} and "
            f"checkpoint.plan {settings.checkpoint.plan}; ask for training with a method of this project, and "
            "checkpoint.plan auto"
        )
    machine, room = machine_of(hardware), gpu_room(settings, hardware)
    if reason := unsupported_reason(settings, machine):
        raise ValueError(reason)

    def fits(gib: int) -> bool:
        return plan_fits(replace(settings, memory=f"{gib}GiB"), machine, hardware) is True

    least = math.ceil(least_gpu_bytes(settings) / GIB)
    if room >= least and not fits(least):  # where the host bounds the plan, more of the GPU is needed
        least = bisect_left(range(math.floor(room) + 1), True, lo=least, key=fits)
    parts = (part / 2**halvings for halvings in itertools.count() for part in _PARTS)
    smaller = (math.floor(room * part) for part in itertools.islice(parts, 1, None))
    budgets = [room, *itertools.takewhile(lambda gib: gib >= least, smaller)] if room >= least else []
    if budgets and least < budgets[-1]:
        budgets.append(least)
    for gib in budgets:
        budget = settings.memory if gib == room else f"{gib}GiB"
        chosen, plan = with_plan(replace(settings, memory=budget), machine, hardware=hardware)
        yield forecast(chosen, hardware, plan=plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of trials one after another."""

    trials: int
    seconds: float  # start-up included
    gpu_hours: float
    unknown: int  # further trials, of which no time is predicted


def cost_of(
    trials: Iterable[TrialSettings],
    hardware: Hardware,
    *,
    rounds: int = 1,
    hosts: Machine | None = None,
) -> Cost:
    """Wall time and GPU-hours: start-up, warm-up and measured steps of each trial, in every round; on these hosts, by
    default on nodes as the hardware file has them."""
    seconds = gpu_seconds = 0.0
    count = unknown = 0
    for settings in trials:
        time, _ = time_or_reason(settings, hardware, node_ranks=ranks_of_node(settings, hosts))
        if time is None:
            unknown += 1
            continue
        count += 1
        warm_up = _warm_up_seconds(settings, hardware, hosts, time)
        taken = rounds * (START_SECONDS + warm_up + settings.steps.after_warmup * time.seconds)
        seconds += taken
        gpu_seconds += taken * settings.world_size
    return Cost(trials=count, seconds=seconds, gpu_hours=gpu_seconds / 3600, unknown=unknown)


def _warm_up_seconds(settings: TrialSettings, hardware: Hardware, hosts: Machine | None, own: StepTime) -> float:
    """Of all warm-up steps, which may have a length of their own; where that has no prediction, they take what the
    trial's step does. One linear layer then runs at the trial's length, for about an average layer's part of a step."""
    length, count = settings.steps.warmup_seq_len, settings.steps.warmup
    if settings.task != "train" or length in (0, settings.seq_len) or not count:
        return count * own.seconds
    shorter, _ = time_or_reason(
        replace(settings, seq_len=length), hardware, node_ranks=ranks_of_node(settings, hosts)
    )  # fmt: skip
    layer = own.seconds / settings.model.layers if any(settings.model.linear_layers) else 0.0
    return count * (shorter or own).seconds + layer
