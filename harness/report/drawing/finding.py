"""What a figure of speed shows, in a title: only as strong as the intervals behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.base.lengths import format_length
from harness.metrics.intervals import Interval
from harness.report.drawing.points import FigureLayout, SeriesPoint
from harness.report.results import Row
from harness.report.speedup import Speedup, contested_points, speedup
from harness.report.speedup import SpeedupPoint as Contested
from harness.report.variants import OWN_METHOD, is_subject, panel_of

CLOSE = 0.05  # ratios nearer to 1, with their intervals, are called no difference


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesPair:
    """Two series at one length and parallel size: `found` is the speed of the first over that of the second."""

    first: str
    second: str
    seq_len: int
    found: Speedup


def matches_of(rows: Sequence[Row], layout: FigureLayout) -> list[SeriesPair]:
    """At each length and parallel size the subject beside the fastest other method with equal settings.

    Where it met no other anywhere, the fastest series beside the next.
    """
    names = {id(row): point.series for point in layout.points for row in point.rows}
    places: dict[object, list[Contested]] = {}
    for point in contested_points([row for row in rows if id(row) in names]):
        subject = point.subject()
        if subject and is_subject(point.by_method[subject][0]) and point.best_other(subject):
            first = point.first
            places.setdefault((first["seq_len"], first["mask"], panel_of(first)), []).append(point)
    found = []
    for points in places.values():
        point = min(points, key=lambda one: one.measured()[str(one.subject())])
        subject = str(point.subject())
        other = str(point.best_other(subject))
        found.append(_match(point.by_method[subject], point.by_method[other], names))
    return [one for one in found if one] or _of_series(layout)


def _of_series(layout: FigureLayout) -> list[SeriesPair]:
    names = {id(row): point.series for point in layout.points for row in point.rows}
    found = []
    for panel in layout.panels:
        for seq_len in layout.lengths:
            here = [one for one in panel.points if one.seq_len == seq_len and _seconds(one)]
            if len(here) > 1:
                best, following, *_ = sorted(here, key=_seconds)
                found.append(_match(best.rows, following.rows, names))
    return [one for one in found if one]


def _seconds(point: SeriesPoint) -> float:
    speed = point.value("tokens_per_gpu_per_second")
    return 1 / speed if speed else 0.0


def _match(rows: Sequence[Row], others: Sequence[Row], names: dict[int, str]) -> SeriesPair | None:
    found = speedup(rows, others)
    measured = [[row for row in side if row["status"] == "ok"] for side in (rows, others)]
    if found is None:
        return None
    first, second = (names[id(side[0])] for side in measured)
    return SeriesPair(first=first, second=second, seq_len=measured[0][0]["seq_len"], found=found)


def title_of(matches: Sequence[SeriesPair]) -> str:
    """`burst is 1.10 to 1.16 times as fast as torchtitan, 16K to 128K tokens`; `no difference between ...`."""
    first = _name([one.first for one in matches], "the fastest")
    second = _name([one.second for one in matches], "the best other")
    if first == second:
        first, second = "the fastest", "the next"
    where = span_of([one.seq_len for one in matches])
    verdicts = Counter(one.found.verdict for one in matches)
    spreads = [one.found.spread for one in matches]
    ends = [end for one in matches for end in _ends(one)]
    between = _between(min(ends), max(ends))
    if None in spreads:
        return f"{first} at {between} times the speed of {second} in one round, {where}"
    if not all(isinstance(one, Interval) for one in spreads):
        rounds = "two rounds or more" if any(isinstance(one, Interval) for one in spreads) else "two rounds"
        return f"{first} at {between} times the speed of {second} in {rounds}, {where}"
    if set(verdicts) == {"not distinguishable"}:
        if min(ends) > 1 - CLOSE and max(ends) < 1 + CLOSE:
            return f"no difference between {first} and {second}, {where}"
        return f"{first} and {second} are not told apart ({between} times), {where}"
    told = f"{first} is {between} times as fast as {second}"
    if len(verdicts) == 1:
        return f"{told}, {where}"
    parts = [f"{word} at {verdicts[word]}" for word in ("faster", "slower") if verdicts[word]]
    return f"{told}: {' and '.join(parts)} of {len(matches)} points, {where}"


def all_equal(layout: FigureLayout) -> bool:
    """Whether no series can be distinguished from the fastest at any length and size; false without intervals."""
    names = {id(row): point.series for point in layout.points for row in point.rows}
    compared = False
    for panel in layout.panels:
        for seq_len in layout.lengths:
            here = [one for one in panel.points if one.seq_len == seq_len]
            if len(here) > 1 and not all(_seconds(one) for one in here):
                return False
            best = min(here, key=_seconds, default=None)
            for one in here:
                if best is not None and one is not best:
                    match = _match(best.rows, one.rows, names)
                    if match is None or not isinstance(match.found.spread, Interval):
                        return False
                    if match.found.verdict != "not distinguishable" or match.found.value > 1 + CLOSE:
                        return False
                    compared = True
    return compared


def span_of(lengths: Sequence[int]) -> str:
    """`16K to 128K tokens`."""
    ends = (min(lengths), max(lengths))
    return f"{' to '.join(dict.fromkeys(format_length(one).upper() for one in ends))} tokens"


def _ends(match: SeriesPair) -> tuple[float, float]:
    spread = match.found.spread
    if isinstance(spread, Interval):
        return spread.low, spread.high
    return (min(spread), max(spread)) if spread else (match.found.value, match.found.value)


def _between(low: float, high: float) -> str:
    """Both ends of a ratio, or one where they read the same; an end that is not 1 never reads 1.00."""
    digits = next((n for n in (2, 3) if all(end == 1 or round(end, n) != 1 for end in (low, high))), 4)
    return " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in (low, high)))


def _name(names: Sequence[str], several: str) -> str:
    """The name, or what series of burst have in common: two schedules are `burst`."""
    if len(set(names)) == 1:
        return names[0]
    if all(name.partition(",")[0].partition(" ")[0] == OWN_METHOD for name in names):
        return OWN_METHOD
    return several
