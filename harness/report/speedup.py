"""How many times as fast one method is as another, and the points at which methods may be compared.

Ratios are of speeds, so above 1 the method named first is faster. Runs are never mixed, and of a run whole rounds are
resampled (`harness.metrics.intervals`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from harness.metrics.intervals import Interval, Verdict, median_ratio
from harness.report.results import Row, given_names, method_rank
from harness.report.variants import OWN_METHOD, pooled, setting_of

ONE_ROUND = "one round"  # why there is no interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """How many times as fast one method is as another; `rounds` is the smaller number of rounds of the two."""

    value: float
    interval: Interval | None  # None with a single round
    verdict: Verdict
    rounds: int

    @property
    def text(self) -> str:
        """The verdict, with the reason where there is no interval."""
        return verdict_text(self.verdict, self.rounds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Trials by method that differ in nothing but the method, their seeds and how many steps they took."""

    by_method: dict[str, list[Row]]

    @property
    def first(self) -> Row:
        return next(iter(self.by_method.values()))[0]

    def measured(self) -> dict[str, float]:
        """Median step seconds of every method that gave a number, the fastest first."""
        found = {
            method: seconds
            for method, rows in self.by_method.items()
            if (seconds := pooled(rows, "step_seconds_median")) is not None
        }
        return dict(sorted(found.items(), key=lambda item: (item[1], method_rank(item[0]))))

    def best_other(self, method: str) -> str | None:
        """The fastest method but this one; None where no other gave a number."""
        return next((other for other in self.measured() if other != method), None)

    def subject(self, baseline: str | None = None) -> str | None:
        """The method that is put beside another: ours where it gave a number, else the fastest."""
        measured = [method for method in self.measured() if method != baseline]
        return OWN_METHOD if OWN_METHOD in measured else next(iter(measured), None)

    def speedup(self, method: str, other: str) -> Speedup | None:
        """Speed of `method` over that of `other`; None where one of them gave no number."""
        return speedup(self.by_method.get(method, ()), self.by_method.get(other, ()))


def verdict_text(verdict: Verdict, rounds: int) -> str:
    """A verdict in a table: with a single round it says why nothing can be told apart."""
    return f"{verdict} ({ONE_ROUND})" if rounds < 2 else verdict


def speedup(rows: Iterable[Row], others: Iterable[Row]) -> Speedup | None:
    """Speed of trials over that of other trials of the same run; None where one side has no steps.

    Rounds are drawn in pairs where both sides ran in the same rounds.
    """
    ours, theirs = rounds_of(rows), rounds_of(others)
    if not ours or not theirs:
        return None
    times = median_ratio(list(ours.values()), list(theirs.values()), paired=list(ours) == list(theirs))
    interval = times.interval and Interval(low=1 / times.interval.high, high=1 / times.interval.low)
    return Speedup(
        value=1 / times.value, interval=interval, verdict=times.verdict(), rounds=min(len(ours), len(theirs))
    )


def rounds_of(rows: Iterable[Row]) -> dict[int, list[float]]:
    """Measured steps by the number of their round, in order; several seeds of one round stand together."""
    rounds: dict[int, list[float]] = {}
    for row in rows:
        for number, steps in zip(row["round_numbers"], row["step_seconds_by_round"], strict=True):
            rounds.setdefault(number, []).extend(steps)
    return dict(sorted(rounds.items()))


def contested_points(rows: Iterable[Row]) -> list[Point]:
    """Points at which several methods were planned and at least one gave a number, in order of appearance."""
    points: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        points.setdefault(point_of(row), {}).setdefault(row["method"], []).append(row)
    return [
        Point(by_method=by_method)
        for by_method in points.values()
        if len(by_method) > 1 and any(row["status"] == "ok" for group in by_method.values() for row in group)
    ]


def point_of(row: Row) -> tuple[Any, ...]:
    """Key of trials whose speeds may be compared: same run, and equal settings but for method, seed and steps.

    Under `settings: as_published` or `tuned` each method has its own values of what the table fills, and under
    `checkpoint: auto` of what the planner chose.
    """
    settings = tuple(
        (name, setting_of(row, name))
        for name in given_names(row)
        if name not in ("method", "seed", "planned") and not name.startswith("steps.")
    )
    return (row["run"], row["experiment"], settings)


def times(value: float) -> str:
    """A ratio of speeds: `1.32×`, near 1 with a digit more."""
    return f"{value:.2f}×" if abs(value - 1) >= 0.05 else f"{value:.3f}×"
