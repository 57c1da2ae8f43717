"""The plan of `checkpoint: auto` of a training run, and the parallel sizes with which it goes on on fewer ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import cast

from engine.checkpoint.planning.memory import GIB
from engine.measurement import Forecast
from engine.reader import from_json, read_json
from engine.settings import TrialSettings
from engine.training.config import Order, TrainingConfig
from engine.training.files import ORDER_FILE, attempt_directory, read_metrics
from harness.machine.this_machine import Machine
from harness.plan.checkpointing import with_plan
from harness.plan.unsupported import unsupported_reason
from harness.records.forecasts import (
    NO_CORRECTION,
    Correction,
    correction_of,
    factor_after_oom,
    factor_of_peaks,
    records_with_plan,
    same_shape,
)

_UNREADABLE = (OSError, ValueError, KeyError, TypeError)


def planned_for(settings: TrialSettings, machine: Machine, run: Path | None) -> tuple[TrialSettings, Forecast | None]:
    """The settings with the planner's values for this machine, and its forecast; None where nothing is left open.

    `run` is the directory of a run that is resumed; None for a new run. The planner takes into account the peaks of the
    run's earlier starts, and those of trials on this machine.
    """
    if not settings.planned:
        return settings, None
    shown = [correction_of(settings, machine.gpu_name or "cpu", records_with_plan())]
    if run is not None:
        shown.append(_shown_in(run, settings))
    return with_plan(settings, machine, max(shown, key=lambda correction: correction.factor))


def _shown_in(run: Path, settings: TrialSettings) -> Correction:
    """The largest factor that earlier starts with the same model and parallel sizes show. A file that cannot be read
    shows nothing."""
    found, number = NO_CORRECTION, 0
    largest: Forecast | None = None
    while (attempt := attempt_directory(run, number := number + 1)).is_dir():
        try:
            order = from_json(Order, read_json(attempt / ORDER_FILE))
        except _UNREADABLE:
            continue
        if order.plan is None or not same_shape(order.config.settings, settings):
            continue
        if largest is None or order.plan.allocated_bytes > largest.allocated_bytes:
            largest = order.plan
        if _ran_out(attempt) and (factor := factor_after_oom(order.plan)) > found.factor:
            found = Correction(factor=factor, source=f"start {number} of this run: out of memory")
    if largest is not None:  # metrics do not tell which start had which peak
        peak = _peak_bytes(run)
        if (factor := factor_of_peaks(largest, peak, 0)) > found.factor:
            found = Correction(factor=factor, source=f"peak {peak / GIB:.3g} GiB in earlier starts")
    return found


def _peak_bytes(run: Path) -> int:
    """The largest peak in the run's metrics; 0 where there is none."""
    try:
        peaks = [line.get("peak_memory_gib", 0.0) for line in read_metrics(run)]
    except ValueError:
        return 0
    return int(max((peak for peak in peaks if math.isfinite(peak)), default=0.0) * GIB)


def _ran_out(attempt: Path) -> bool:
    """Whether a rank of the start ran out of memory."""
    for path in sorted((attempt / "errors").glob("rank*.json")):
        try:
            if cast(dict[str, object], read_json(path))["kind"] == "oom":
                return True
        except _UNREADABLE:
            continue
    return False


def settings_that_fit(config: TrainingConfig, machine: Machine) -> dict[str, int] | None:
    """Values of world_size, cp_size and gradient_accumulation that differ from the run's, such that it goes on here
    with the same sequences per step; empty where its own will do, None where no others were found.

    As many ranks as possible are taken, and of these arrangements the one with the most context-parallel ranks.
    """
    now = config.settings
    accumulated = now.gradient_accumulation * now.dp_size  # micro-batches of a step, over all replicas
    for ranks in range(min(machine.max_ranks, now.world_size), 0, -1):
        for cp_size in range(now.cp_size, 0, -1):
            replicas, rest = divmod(ranks, cp_size * now.tp_size)
            if rest or not replicas or accumulated % replicas or now.cp_size % cp_size:
                continue
            accumulation = accumulated // replicas
            changed = replace(now, world_size=ranks, cp_size=cp_size, gradient_accumulation=accumulation)
            if unsupported_reason(changed, machine) is None:
                names = ("world_size", "cp_size", "gradient_accumulation")
                return {name: getattr(changed, name) for name in names if getattr(changed, name) != getattr(now, name)}
    return None
