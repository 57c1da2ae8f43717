"""A sorted dot plot as values: positions in percent of a strip, so that the page draws it at any width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.metrics.intervals import Interval, TwoRounds
from harness.report.digits import MeasuredNumber, ratio_spread_text, ratio_text, spread_text, supported
from harness.report.rankings import RankedSeries, SizeRanking, word_beside
from harness.report.tables.table import significant

MOST_DOTS = 16  # of one plot; a longer list is read in its table
_MARGIN = 4.0  # percent of the strip, left and right, so that a dot at an end is whole
_FROM_ZERO = 0.4  # an axis starts at 0 where its smallest value is below this share of the largest


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One row. `at`, `low` and `high` are percent of the strip; `at` is None for a row without a number."""

    name: str
    link: str = ""
    about: str = ""  # below the name, smaller
    at: float | None = None
    low: float | None = None
    high: float | None = None
    hover: str = ""
    cells: Sequence[str] = ()
    verdict: str = ""  # in words, with the ratio behind it
    kind: str = ""  # subject, faster, slower or same: how the dot is coloured


@dataclass(frozen=True, kw_only=True, slots=True)
class Dots:
    """Rows under common headers. `line` is where a vertical line stands: the 1 of ratios."""

    headers: Sequence[str]  # of the strip, of the cells, of the verdict
    rows: Sequence[Dot]
    ticks: Sequence[tuple[float, str]]
    line: float | None = None
    note: str = ""


class Axis:
    """A linear axis from the smallest to the largest of the values and their intervals."""

    def __init__(self, values: Sequence[MeasuredNumber], holds: Sequence[float] = ()) -> None:
        ends = [end for value in values for end in (value, *_ends(value))] + list(holds)
        low, high = min(ends), max(ends)
        if low < _FROM_ZERO * high:
            low = 0.0
        if low == high:
            low, high = 0.95 * low, 1.05 * high
        self.low, self.high = low, high

    def at(self, value: float) -> float:
        """Percent of the strip."""
        share = (value - self.low) / (self.high - self.low)
        return round(_MARGIN + (100 - 2 * _MARGIN) * share, 2)

    def ticks(self, at_most: int = 4) -> list[tuple[float, str]]:
        """Round numbers along the axis with their places."""
        rough = (self.high - self.low) / at_most
        unit: float = 10 ** math.floor(math.log10(rough))
        step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
        decimals = max(0, -math.floor(math.log10(step)))
        first = math.ceil(self.low / step - 1e-9)
        values = [step * number for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [(self.at(value), f"{value:,.{decimals}f}") for value in values]


def dots_of(ranking: SizeRanking) -> Dots | None:
    """The ranking as a plot of speeds, the fastest first; None for a single series."""
    if len(ranking.compared) + len(ranking.lost) < 2:
        return None
    shown = ranking.compared[:MOST_DOTS]
    if ranking.subject not in shown:
        shown[-1] = ranking.subject
    axis = Axis([series.speed for series in shown])
    training = ranking.rows[0]["task"] == "train"
    use = ("mfu", "MFU %", 100.0) if training else ("tflops_per_gpu", "TFLOP/s", 1.0)
    used = any(series.of(use[0]) is not None for series in shown)
    rows = []
    for series in shown:
        low, high = (axis.at(end) for end in (_ends(series.speed) or (series.speed, series.speed)))
        verdict, kind = _beside(ranking, series)
        speed, memory = series.speed, series.of("peak_memory_gib")
        figures = [supported()(speed)]
        figures += [_number(series.of(use[0]), use[2])] if used else []
        figures += [_number(memory)]
        between = f", {spread_text(speed.spread)}" if speed.spread else ""
        rows.append(Dot(
            name=series.name, at=axis.at(speed), low=low, high=high, verdict=verdict, kind=kind, cells=figures,
            hover=f"{series.name}: {figures[0]} tokens/s per GPU{between}",
        ))  # fmt: skip
    blank = [""] * (2 if used else 1)
    rows += [Dot(name=name, cells=[status, *blank], kind="lost") for name, status in ranking.lost[:MOST_DOTS]]
    left = len(ranking.compared) - len(shown)
    return Dots(
        headers=("", "tokens/s per GPU", *([use[1]] if used else []), "peak GiB", f"against {ranking.subject.short}"),
        rows=rows,
        ticks=axis.ticks(),
        note=f"The fastest {len(shown)} of {len(ranking.compared)}; the table of all trials has the others." if left
        else "",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioRow:
    """One row of a plot of ratios: `ratio` is of the speed of `subject`, over that of `other`."""

    subject: str = "burst"
    name: str
    link: str
    about: str
    ratio: MeasuredNumber
    verdict: str
    other: str


def ratio_dots(found: Sequence[RatioRow], note: str = "") -> Dots | None:
    """A plot of ratios around 1, the largest first; None without one."""
    if not found:
        return None
    axis = Axis([one.ratio for one in found], holds=(1.0,))
    rows = []
    for one in sorted(found, key=lambda one: -one.ratio):
        low, high = (axis.at(end) for end in (_ends(one.ratio) or (one.ratio, one.ratio)))
        kind = {"faster": "faster", "slower": "slower"}.get(one.verdict.partition(" ")[0], "same")
        spread = f" ({ratio_spread_text(one.ratio.spread)})" if one.ratio.spread else ""
        rows.append(Dot(
            name=one.name, link=one.link, about=one.about, at=axis.at(one.ratio), low=low, high=high, kind=kind,
            cells=[f"{ratio_text(one.ratio)}×"], verdict=f"{one.verdict}{spread}; {one.other}",
            hover=f"{one.name}: {ratio_text(one.ratio)} times as fast as {one.other}{spread}",
        ))  # fmt: skip
    headers = ("", "times as fast", "against the fastest other")
    return Dots(headers=headers, rows=rows, ticks=axis.ticks(), line=axis.at(1.0), note=note)


def _beside(ranking: SizeRanking, series: RankedSeries) -> tuple[str, str]:
    """The verdict on a row against the subject, in words with the ratio, and what colours its dot. Of several methods
    none is put beside itself with other settings."""
    subject = ranking.subject
    if series is subject:
        return "", "subject"
    found = ranking.beside(series)
    if found is None or (ranking.of_methods and series.method == subject.method):
        return "", "same"
    word = word_beside(found)
    kind = "same" if word.startswith("not") else word.split()[0]
    spread = f" ({found.between})" if found.spread else ""
    name = subject.method if ranking.of_methods else subject.name
    return f"{word}; {name} {ratio_text(found.ratio)}×{spread}", kind


def _ends(value: MeasuredNumber) -> tuple[float, ...]:
    spread = value.spread
    if isinstance(spread, TwoRounds):
        return (min(spread), max(spread))
    return (spread.low, spread.high) if isinstance(spread, Interval) and not spread.too_wide else ()


def _number(value: float | None, scale: float = 1.0) -> str:
    return "" if value is None else significant(3, scale)(value)
