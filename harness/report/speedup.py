"""How many times as fast one method is as another, and the points at which methods may be compared.

Ratios are of speeds, so above 1 the method named first is faster. Runs are never mixed, and of a run whole rounds are
resampled (`harness.metrics.intervals`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.metrics.intervals import ROUNDS_FOR_INTERVAL, Interval, Ratio, TwoRounds, Verdict, median_ratio
from harness.report.digits import TOO_WIDE as TOO_WIDE
from harness.report.digits import MeasuredNumber, ratio_spread_text, ratio_text
from harness.report.results import RoundMachine, Row, given_names, method_rank
from harness.report.variants import is_subject, pooled, setting_of

TWO_VALUES = "`a and b` is what each of two rounds gave, and no interval"


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """How many times as fast one method is as another; `rounds` is the smaller number of rounds of the two."""

    value: float
    spread: Interval | TwoRounds | None  # None with a single round
    verdict: Verdict
    rounds: int
    apart: tuple[int, ...] = ()  # rounds that ran on two machines

    @property
    def text(self) -> str:
        """The verdict, with the reason where there is no interval."""
        return verdict_text(self.verdict, self.rounds, self.apart)

    @property
    def between(self) -> str:
        """What stands beside the ratio: `1.02 to 1.05`, of two rounds `1.08 and 1.10`."""
        return ratio_spread_text(self.spread) if self.spread else f"{rounds_text(self.rounds)}, no interval"

    @property
    def ratio(self) -> MeasuredNumber:
        """The value, which knows how many of its digits count."""
        return MeasuredNumber(self.value, self.spread)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedRatio:
    """The ratio of two sides' median steps, and the rounds behind it."""

    times: Ratio
    rounds: int  # of the side with fewer
    paired: bool  # whether rounds of one number were taken together
    apart: tuple[int, ...]  # rounds that ran on two machines: left out, unless no other is there


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedupPoint:
    """Trials by method that differ in nothing but the method, their seeds and how many steps they took."""

    by_method: dict[str, list[Row]]

    @property
    def first(self) -> Row:
        return next(iter(self.by_method.values()))[0]

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.by_method.values() for row in group]

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
        """The method that is put beside another: the subject where it gave a number, else the fastest."""
        measured = [method for method in self.measured() if method != baseline]
        subjects = (method for method in measured if is_subject(self.by_method[method][0]))
        return next(subjects, None) or next(iter(measured), None)

    def speedup(self, method: str, other: str) -> Speedup | None:
        """Speed of `method` over that of `other`; None where one of them gave no number."""
        return speedup(self.by_method.get(method, ()), self.by_method.get(other, ()))


def rounds_text(rounds: int) -> str:
    """How many rounds: `one round`, `two rounds`, `3 rounds`."""
    return {1: "one round", 2: "two rounds"}.get(rounds, f"{rounds} rounds")


def verdict_text(verdict: Verdict, rounds: int, apart: tuple[int, ...] = ()) -> str:
    """A verdict in a table: with too few rounds for an interval it says why nothing can be told apart."""
    few = rounds < ROUNDS_FOR_INTERVAL and verdict == "not distinguishable"
    text = f"{verdict} ({rounds_text(rounds)})" if few else verdict
    return f"{text}; {apart_text(apart)}" if apart else text


def apart_text(apart: tuple[int, ...]) -> str:
    """`round 2 ran on two machines`."""
    return f"round{'s' if len(apart) > 1 else ''} {', '.join(map(str, apart))} ran on two machines"


def speedup(rows: Iterable[Row], others: Iterable[Row]) -> Speedup | None:
    """Speed of trials over that of other trials of the same run; None where one side has no steps."""
    found = compared(rows, others)
    if found is None:
        return None
    times = found.times
    spread = times.interval or times.by_round
    return Speedup(
        value=1 / times.value,
        spread=spread and spread.inverse_times(1.0),
        verdict=times.verdict(),
        rounds=found.rounds,
        apart=found.apart,
    )


def compared(rows: Iterable[Row], others: Iterable[Row], *, one_run: bool = True) -> SpeedRatio | None:
    """Median step of trials over that of others; None where one side has no steps.

    Of one run, rounds are drawn in pairs where both sides ran in the same ones. A round that the sides ran on two
    machines is no pair: it would compare the machines. Where every round is such a one, they are drawn one by one.
    """
    rows, others = list(rows), list(others)
    ours, theirs = rounds_of(rows), rounds_of(others)
    if not ours or not theirs:
        return None
    apart = _apart(rows, others) if one_run else ()
    kept = [{n: steps for n, steps in side.items() if n not in apart} for side in (ours, theirs)]
    if all(kept):
        ours, theirs = kept
    paired = one_run and list(ours) == list(theirs) and not set(ours) & set(apart)
    times = median_ratio(list(ours.values()), list(theirs.values()), paired=paired)
    return SpeedRatio(times=times, rounds=min(len(ours), len(theirs)), paired=paired and len(ours) > 1, apart=apart)


def _apart(rows: Iterable[Row], others: Iterable[Row]) -> tuple[int, ...]:
    """Numbers of the rounds that the two sides ran on two machines."""
    sides: list[dict[int, list[RoundMachine]]] = [{}, {}]
    for side, members in zip(sides, (rows, others), strict=True):
        for row in members:
            for number, machine in zip(row["round_numbers"], row["machines"], strict=True):
                side.setdefault(number, []).append(machine)
    ours, theirs = sides
    both = sorted(ours.keys() & theirs.keys())
    return tuple(n for n in both if not all(one.is_same(other) for one in ours[n] for other in theirs[n]))


def rounds_of(rows: Iterable[Row]) -> dict[int, list[float]]:
    """Measured steps by the number of their round, in order; several seeds of one round stand together."""
    rounds: dict[int, list[float]] = {}
    for row in rows:
        for number, steps in zip(row["round_numbers"], row["step_seconds_by_round"], strict=True):
            rounds.setdefault(number, []).extend(steps)
    return dict(sorted(rounds.items()))


def contested_points(rows: Iterable[Row]) -> list[SpeedupPoint]:
    """Points at which several methods were planned and at least one gave a number, in order of appearance."""
    points: dict[tuple[object, ...], dict[str, list[Row]]] = {}
    for row in rows:
        points.setdefault(point_of(row), {}).setdefault(row["method"], []).append(row)
    return [
        SpeedupPoint(by_method=by_method)
        for by_method in points.values()
        if len(by_method) > 1 and any(row["status"] == "ok" for group in by_method.values() for row in group)
    ]


def point_of(row: Row) -> tuple[object, ...]:
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
    """A ratio of speeds with the digits that its interval supports, if it knows one: `1.32×`."""
    return f"{ratio_text(value)}×"
