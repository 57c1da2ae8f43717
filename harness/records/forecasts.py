"""What came out of the plans of `checkpoint: auto`, and what the next plan of the same machine and shape makes of it.

Nothing is kept beside the records for that: a record holds what its trial was expected to take and what it took. A run
reads its own records and those of other runs on this machine, so one that is resumed or begun anew knows as much as one
that was not stopped, and there is no further file to lose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.planning.memory import GIB
from engine.checkpoint.planning.plan import ALLOCATED_WITHIN, RESERVED_WITHIN
from engine.measurement import Forecast
from engine.settings import TrialSettings
from harness.records.record import Record
from harness.records.stored import StoredRecord, is_run, stored_run

_AFTER_OOM = 1.1  # a plan that ran out of memory needs this much more at least

RUNS = Path("results") / "runs"  # below the working directory: what `burst run` leaves on this machine
_SHAPE = ("model", "dtype", "cp_size", "world_size", "sharding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """By how much the memory model is multiplied, and the trial that showed it."""

    factor: float = 1.0
    source: str = ""


NO_CORRECTION = Correction()


def records_with_plan() -> list[Record]:
    """Records of planned trials in the runs below results/runs. What is no record is passed over."""
    found = []
    for path in sorted(filter(is_run, RUNS.glob("*"))):
        for one in stored_run(path).records():
            # Most records have no plan, and reading one as a record takes longer than reading its JSON.
            if not isinstance(one, StoredRecord) or not isinstance(one.data, dict) or not one.data.get("plan"):
                continue
            try:
                found.append(one.record())
            except (ValueError, ArithmeticError):
                continue
    return found


def correction_of(settings: TrialSettings, gpu: str, earlier: Iterable[Record]) -> Correction:
    """The largest factor that trials of the same GPU, model and parallel sizes show."""
    found = NO_CORRECTION
    for record in earlier:
        if record.plan is None or record.gpu != gpu or not same_shape(record.settings, settings):
            continue
        factor = factor_shown(record)
        if factor > found.factor:
            found = Correction(factor=factor, source=f"{record.trial_id}: {outcome_in_words(record)}")
    return found


def same_shape(one: TrialSettings, other: TrialSettings) -> bool:
    """Whether the memory model errs alike for both."""
    return all(getattr(one, name) == getattr(other, name) for name in _SHAPE)


def factor_shown(record: Record) -> float:
    """The factor that one trial shows; 1 where it took what was predicted, or was not planned."""
    plan, measured = record.plan, record.measurement
    if plan is None:
        return 1.0
    if record.status == "oom":
        return factor_after_oom(plan)
    if record.status != "ok" or measured is None:
        return 1.0
    return factor_of_peaks(
        plan, max(measured.peak_allocated_bytes, default=0), max(measured.peak_reserved_bytes, default=0)
    )


def factor_after_oom(plan: Forecast) -> float:
    """A tenth more than it was taken for, and as much as would have filled the budget."""
    needed = max(plan.reserved_bytes, (1 + ALLOCATED_WITHIN) * plan.allocated_bytes)
    return max(_AFTER_OOM * plan.correction, (plan.budget_bytes or needed) / needed)


def factor_of_peaks(plan: Forecast, allocated: int, reserved: int) -> float:
    """How far the peaks were beyond the prediction, where that is more than the model's stated error; else 1."""
    shown = [(allocated / plan.allocated_bytes, ALLOCATED_WITHIN), (reserved / plan.reserved_bytes, RESERVED_WITHIN)]
    return max([1.0, *(factor for factor, within in shown if factor > 1 + within)])


def outcome_in_words(record: Record) -> str:
    """What came out of a plan: its peak beside the predicted one, or that memory ran out; empty without a plan."""
    plan, measured = record.plan, record.measurement
    if plan is None:
        return ""
    if record.status == "oom":
        return f"out of memory, with {plan.reserved_bytes / GIB:.3g} GiB predicted"
    if record.status != "ok" or measured is None or not measured.peak_allocated_bytes:
        return ""
    peak = max(measured.peak_allocated_bytes)
    apart = peak / plan.allocated_bytes - 1
    return f"peak {peak / GIB:.3g} GiB, {abs(apart):.1%} {'above' if apart > 0 else 'below'} the prediction"
