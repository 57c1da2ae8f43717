"""How many times as fast one method is as another, and the points at which methods may be compared.

Ratios are of speeds, so above 1 the method named first is faster. Runs are never mixed, and of a run whole rounds are
resampled (`harness.metrics.intervals`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from baselines.originals import ORIGINALS
from harness.base.lengths import format_length
from harness.metrics.intervals import ROUNDS_FOR_INTERVAL, Interval, Ratio, TwoRounds, Verdict, median_ratio
from harness.report.digits import MeasuredNumber, ratio_spread_text, ratio_text
from harness.report.results import RoundMachine, Row, given_names, grouped, method_rank
from harness.report.variants import is_subject, on_cpu, panel_name, panel_of, pooled, setting_of

TWO_VALUES = "`a and b` is what each of two rounds gave, and no interval"


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """How many times as fast one side is as another, by the ratio of their median steps.

    `paired`: rounds of one number were taken together. `apart`: rounds that ran on two machines, which are left out
    unless no other is there. `later`: the sides have rounds of the same numbers, but one of them ran later, so that
    they are no pairs.
    """

    times: Ratio  # of the steps: below 1 the side named first is faster
    rounds: int  # of the side with fewer
    paired: bool
    apart: tuple[int, ...] = ()
    later: bool = False

    @property
    def value(self) -> float:
        """The speed of the side named first over that of the other."""
        return 1 / self.times.value

    @property
    def spread(self) -> Interval | TwoRounds | None:
        """Of the value; None with a single round."""
        spread = self.times.spread
        return spread and spread.inverse_times(1.0)

    @property
    def verdict(self) -> Verdict:
        return self.times.verdict()

    @property
    def text(self) -> str:
        """The verdict, with the reason where there is no interval."""
        return self.text_of(self.verdict)

    def text_of(self, verdict: str) -> str:
        """The same with other words for the verdict."""
        few = self.rounds < ROUNDS_FOR_INTERVAL and self.verdict == "not distinguishable"
        return "; ".join([f"{verdict} ({rounds_text(self.rounds)})" if few else verdict, *self.caveats])

    @property
    def caveats(self) -> list[str]:
        """What was unlike in the conditions of the two sides: `round 2 ran on two machines`, `one side ran later`."""
        apart = [f"{numbers_text(self.apart)} ran on two machines"] if self.apart else []
        return [*apart, *(["one side ran later"] if self.later else [])]

    @property
    def between(self) -> str:
        """What stands beside the ratio: `1.02 to 1.05`, of two rounds `1.08 and 1.10`."""
        return ratio_spread_text(self.spread) if self.spread else f"{rounds_text(self.rounds)}, no interval"

    @property
    def ratio(self) -> MeasuredNumber:
        """The value, which knows how many of its digits count."""
        return MeasuredNumber(self.value, self.spread)


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


def numbers_text(numbers: tuple[int, ...]) -> str:
    """Which rounds: `round 2`, `rounds 2, 3`."""
    return f"round{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def speedup(rows: Iterable[Row], others: Iterable[Row], *, one_run: bool = True) -> Speedup | None:
    """Speed of trials over that of others; None where one side has no steps.

    Of one run, rounds are drawn in pairs where both sides ran in the same ones. A round that the sides ran on two
    machines is no pair: it would compare the machines. Where every round is such a one, they are drawn one by one, and
    so they are where one side ran later: what slowed a round of the one did not slow that of the other.
    """
    rows, others = list(rows), list(others)
    ours, theirs = rounds_of(rows), rounds_of(others)
    if not ours or not theirs:
        return None
    apart = _apart(rows, others) if one_run else ()
    kept = [{n: steps for n, steps in side.items() if n not in apart} for side in (ours, theirs)]
    if all(kept):
        ours, theirs = kept
    same = one_run and list(ours) == list(theirs) and not set(ours) & set(apart)
    later = same and not _ran_together(rows, others, ours)
    paired = same and not later
    times = median_ratio(list(ours.values()), list(theirs.values()), paired=paired)
    rounds = min(len(ours), len(theirs))
    return Speedup(times=times, rounds=rounds, paired=paired and rounds > 1, apart=apart, later=later)


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


def _ran_together(rows: Iterable[Row], others: Iterable[Row], rounds: Collection[int]) -> bool:
    """Whether the two sides ran these rounds together: each trial beside one of the other side. Trials of a seed that
    was added in a later call ran beside each other then."""
    ours, theirs = ([row for row in side if row["round_numbers"]] for side in (rows, others))
    return all(
        any(_took_turns(one, other, rounds) for other in beside)
        for side, beside in ((ours, theirs), (theirs, ours))
        for one in side
    )


def _took_turns(one: Row, other: Row, rounds: Collection[int]) -> bool:
    """Whether both trials ran each of these rounds before the next round of either; True where a record does not tell
    when its rounds started.

    A trial that runs again keeps the numbers of its rounds, so that its first one starts after the other's last. The
    gap between the two starts of a round says nothing: a run may be resumed a day later. Hence a last round that one of
    the two ran again is not noticed.
    """
    starts: dict[int, list[str]] = {}
    for row in (one, other):
        for number, start in zip(row["round_numbers"], row["round_starts"], strict=True):
            if number in rounds:
                starts.setdefault(number, []).append(start)
    if not all(map(all, starts.values())):
        return True
    # Times in UTC by ISO 8601 are ordered as their texts. A round that both ran again is no longer in that of numbers.
    spans = sorted((min(found), max(found)) for found in starts.values())
    return all(last <= following for (_, last), (following, _) in itertools.pairwise(spans))


def rounds_of(rows: Iterable[Row]) -> dict[int, list[float]]:
    """Measured steps by the number of their round, in order; several seeds of one round stand together."""
    rounds: dict[int, list[float]] = {}
    for row in rows:
        for number, steps in zip(row["round_numbers"], row["step_seconds_by_round"], strict=True):
            rounds.setdefault(number, []).extend(steps)
    return dict(sorted(rounds.items()))


def contested_points(rows: Iterable[Row]) -> list[SpeedupPoint]:
    """Points at which several methods were planned and at least one gave a number, in order of appearance."""
    points = [grouped(group, lambda row: str(row["method"])) for group in grouped(rows, point_of).values()]
    return [
        SpeedupPoint(by_method=by_method)
        for by_method in points
        if len(by_method) > 1 and any(row["status"] == "ok" for group in by_method.values() for row in group)
    ]


def point_of(row: Row, but: tuple[str, ...] = ()) -> tuple[object, ...]:
    """Key of trials whose speeds may be compared: same run, and equal settings but for method, seed, steps and `but`.

    Under `settings: as_published` or `tuned` each method has its own values of what the table fills, and under
    `checkpoint: auto` of what the planner chose.
    """
    free = ("method", "seed", "planned", *but)
    names = (name for name in given_names(row) if name not in free and not name.startswith("steps."))
    return (row["run"], row["experiment"], tuple((name, setting_of(row, name)) for name in names))


def times(value: float) -> str:
    """A ratio of speeds with the digits that its interval supports, if it knows one: `1.32×`."""
    return f"{ratio_text(value)}×"


# Native baselines that are slower than the system they are written after, which every table and figure marks: a
# comparison with a native baseline says something about the system only where it is as fast as the system itself.

LEAST = 0.97  # of its original's speed: below it a native baseline is marked
MARK = "†"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowBaseline:
    """One native baseline at one point."""

    native: str
    original: str
    found: Speedup  # of the native baseline over the original: below LEAST
    first: Row

    @property
    def text(self) -> str:
        """`megatron_cp 0.91× (0.902 to 0.915) of megatron_lm_upstream at 64K tokens, CP 4`."""
        place = f"{format_length(self.first['seq_len'])} tokens, {panel_name(panel_of(self.first))}"
        return f"{self.native} {times(self.found.value)} ({self.found.between}) of {self.original} at {place}"


def slow_baselines(rows: Iterable[Row]) -> dict[int, SlowBaseline]:
    """Of the rows on GPUs, those of native baselines below LEAST of an original, by `id`; with the lowest ratio. An
    original may stand for a native baseline with some schedules alone, and is then compared whatever the schedule."""
    measured = grouped((row for row in rows if row["status"] == "ok" and not on_cpu(row)), lambda row: row["method"])
    found: dict[int, SlowBaseline] = {}
    for native, originals in ORIGINALS.items():
        ours = grouped(measured.get(native, ()), point_of).values()
        for original in originals if ours else ():
            but = ("schedule",) if original.schedules else ()
            alike = [
                row
                for row in measured.get(original.method, ())
                if not original.schedules or row["schedule"] in original.schedules
            ]
            theirs = grouped(alike, lambda row: point_of(row, but))  # noqa: B023 - called at once
            for group in ours:
                ratio = speedup(group, theirs.get(point_of(group[0], but), ()))
                if ratio is not None and ratio.value < LEAST:
                    slow = SlowBaseline(native=native, original=original.method, found=ratio, first=group[0])
                    for row in group:
                        before = found.setdefault(id(row), slow)
                        found[id(row)] = min(before, slow, key=lambda one: one.found.value)
    return found


def marked(name: str, slow: bool) -> str:
    """A name in a table, legend or sentence, marked where its trial is of a slow native baseline."""
    return f"{name} {MARK}" if slow else name


def slow_sentence(slow: Iterable[SlowBaseline]) -> str:
    """What the mark means, with the lowest ratio of each baseline and original; empty where nothing is marked."""
    texts = []
    for alike in grouped(slow, lambda one: (one.native, one.original)).values():
        points = len({id(one.first) for one in alike})
        worst = min(alike, key=lambda one: one.found.value)
        texts.append(worst.text + (f", the lowest of {points} points" if points > 1 else ""))
    return f"{MARK} Native baseline below {LEAST:g} of its original's speed: {'; '.join(texts)}." if texts else ""
