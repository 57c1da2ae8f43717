"""One run beside a reference run: a pass or a fail for each row and quantity, within a tolerance."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from harness.metrics.intervals import median_ratio
from harness.records.record import Record
from harness.verify.finding import RowComparison

GIB = 1 << 30


def compared(records: Mapping[str, Record], reference: Mapping[str, Record], tolerance: float) -> list[RowComparison]:
    """Every row that both runs have, by trial id: status, GPU, step time, peak memory and loss.

    A time passes unless its ratio, with the whole interval where both have rounds, lies outside 1 +- `tolerance`.
    """
    both = [trial_id for trial_id in records if trial_id in reference]
    return [one for trial_id in both for one in _row(records[trial_id], reference[trial_id], tolerance)]


def partnerless(records: Mapping[str, Record], reference: Mapping[str, Record]) -> list[str]:
    """Rows that only one of the runs has, as sentences."""
    return [
        *(f"{trial_id}: not in the reference" for trial_id in records if trial_id not in reference),
        *(f"{trial_id}: only in the reference" for trial_id in reference if trial_id not in records),
    ]


def _row(record: Record, reference: Record, tolerance: float) -> Iterator[RowComparison]:
    def line(quantity: str, found: str, other: str, passed: bool, note: str = "") -> RowComparison:
        return RowComparison(
            trial_id=record.trial_id, quantity=quantity, found=found, reference=other, passed=passed, note=note
        )

    if record.status != reference.status or record.gpu != reference.gpu:
        yield line(
            "status and GPU",
            f"{record.status} on {record.gpu or 'an unknown device'}",
            f"{reference.status} on {reference.gpu or 'an unknown device'}",
            False,
        )
        return
    ours, theirs = record.measurement, reference.measurement
    if record.status != "ok" or ours is None or theirs is None:  # the same reasoned end, such as out of memory
        yield line("status", record.status, reference.status, True)
        return
    ratio = median_ratio(record.step_seconds_by_round, reference.step_seconds_by_round, paired=False)
    low, high = (ratio.interval.low, ratio.interval.high) if ratio.interval else (ratio.value, ratio.value)
    interval = f", 95% interval {low:.3f} to {high:.3f}" if ratio.interval else ", no interval: fewer than three rounds"
    yield line(
        "step time",
        f"{_median(record):.6g} s",
        f"{_median(reference):.6g} s",
        low <= 1 + tolerance and high >= 1 - tolerance,
        f"ratio {ratio.value:.3f}{interval}, tolerance {tolerance:.1%}",
    )
    for quantity, unit, found, other in (
        ("peak memory", " GiB", _peak(ours.peak_allocated_bytes), _peak(theirs.peak_allocated_bytes)),
        ("loss", "", _last(ours.loss), _last(theirs.loss)),
    ):
        if found is None or other is None:
            continue
        note = f"ratio {found / other:.3f}, tolerance {tolerance:.1%}" if other else ""
        passed = abs(found - other) <= tolerance * abs(other)
        yield line(quantity, f"{found:.6g}{unit}", f"{other:.6g}{unit}", passed, note)


def _median(record: Record) -> float:
    return statistics.median(value for part in record.step_seconds_by_round for value in part)


def _peak(ranks: list[int]) -> float | None:
    return max(ranks) / GIB if ranks else None


def _last(values: list[float]) -> float | None:
    return values[-1] if values else None
