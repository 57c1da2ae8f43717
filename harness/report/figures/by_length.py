"""A column against sequence length: speed, peak memory, bytes sent.

Lines where there are several lengths, else bars, the best first. Every planned trial has its place: where the number is
missing stands the status that explains it. Where a figure would show that all is equal, a sentence says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from harness.base.lengths import format_length
from harness.metrics.intervals import Interval
from harness.metrics.throughput import FORMULAS
from harness.report.digits import rounded
from harness.report.drawing.charts import Bar, Bars, LineAxes, PlottedValue, SeriesLine, paint_bars, paint_lines
from harness.report.drawing.looks import MUTED
from harness.report.drawing.points import (
    IN_CSV,
    FigureLayout,
    FigureRows,
    Panel,
    SeriesPoint,
    about,
    ceiling_note,
    decimals_between,
    laid_out,
    memory_column,
    number_text,
    peak_note,
    range_text,
    samples_note,
    span_of,
    whisker_note,
    whole_text,
)
from harness.report.drawing.sheet import Sheet
from harness.report.figures.speed_memory import shows_all
from harness.report.rankings import rankings_of
from harness.report.results import Row
from harness.report.speedup import Speedup, speedup
from harness.report.variants import OWN_METHOD, on_cpu

LINES_FROM = 3  # lengths of one series
MAX_LINES = 8  # told apart by their names; more are bars
MAX_BARS = 40
CLOSE = 0.05  # ratios of speeds nearer to 1, with their intervals, are called no difference
SAME_MEMORY, SAME_BYTES = 1.03, 1.005  # largest ratio, at any length and size, that needs no figure
_WORK = {
    "train": "Training", "attention": "Attention, forward and backward", "lm_head": "LM head and loss",
    "linear": "Recurrence of a linear layer, forward and backward",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnColumn:
    """What is drawn: `column` x `scale`, in `unit`.

    `ceiling` names a column with what the hardware's kernels would allow. `timed` columns are proportional to the step
    time or to its inverse, so that whiskers can be drawn. `more_is_better` decides which bar is first.
    """

    column: str
    unit: str
    scale: float = 1.0
    ceiling: str | None = None
    timed: bool = False
    more_is_better: bool = False
    notes: Sequence[str] = ()

    def value(self, point: SeriesPoint) -> float | None:
        """The point's median in the figure's unit."""
        value = point.value(self.column)
        return None if value is None else value * self.scale

    def ends(self, point: SeriesPoint) -> tuple[float, float] | None:
        """Of the point's whisker, in the figure's unit."""
        return point.drawn_whisker(self.column, self.scale) if self.timed else None

    def highest(self, point: SeriesPoint) -> float | None:
        """The point's ceiling in the figure's unit."""
        value = point.value(self.ceiling)
        return None if value is None else value * self.scale

    def range(self, layout: FigureLayout) -> str:
        """From the smallest to the largest value, with the unit and the lengths."""
        ends = range_text((point.value(self.column) for point in layout.points), self.scale)
        return f"{ends} {self.unit}, {span_of(layout.lengths)}"


class Speed:
    """Tokens per second, MFU or TFLOP/s per GPU, and on a CPU the time of a step."""

    def place(self, rows: Sequence[Row]) -> int:
        """First on GPUs; on a CPU, where times say little, last."""
        return 90 if all(map(on_cpu, rows)) else 10

    def draw(self, rows: Sequence[Row]) -> Sheet | str | None:
        if shows_all(rows):
            return None
        layout, measure = laid_out(rows), _speed_of(rows)
        if measure.more_is_better and _all_equal(layout):
            *names, last = layout.looks
            return f"No difference in speed between {', '.join(names)} and {last}: {measure.range(layout)}."
        return _sheet(rows, layout, measure, _speed_title)


def _speed_of(rows: Sequence[Row]) -> DrawnColumn:
    task = rows[0]["task"]
    if all(map(on_cpu, rows)):
        return DrawnColumn(
            column="step_seconds_median", unit="ms of a step (less is better)", scale=1e3, timed=True,
            notes=["Median of the slowest rank. Ranks share the cores: such times do not rank methods on GPUs."],
        )  # fmt: skip
    if task != "train":
        return DrawnColumn(
            column="tflops_per_gpu", unit="TFLOP/s per GPU", ceiling="tflops_ceiling", timed=True, more_is_better=True,
            notes=[FORMULAS[f"tflops_per_gpu ({task})"] + ".", peak_note(rows)],
        )  # fmt: skip
    if len({row["method"] for row in rows}) == 1 and any(row["mfu"] for row in rows):
        return DrawnColumn(
            column="mfu", unit="% MFU", scale=100, ceiling="mfu_ceiling", timed=True, more_is_better=True,
            notes=[FORMULAS["mfu"] + ".", peak_note(rows)],
        )  # fmt: skip
    column = "tokens_per_gpu_per_second"
    return DrawnColumn(
        column=column, unit="tokens/s per GPU", timed=True, more_is_better=True, notes=[FORMULAS[column] + "."]
    )


def _speed_title(layout: FigureLayout, measure: DrawnColumn) -> str:
    """What the figure shows, only as strong as the intervals behind it: at each size as in the report's verdict."""
    rows = [row for point in layout.points for row in point.rows]
    work = _WORK[rows[0]["task"]]
    if not measure.more_is_better:
        return f"{work}: time of a step on the CPU"
    names = {id(row): point.series for point in layout.points for row in point.rows}
    pairs = []
    for ranking in rankings_of(rows):
        if (other := ranking.other) and (found := ranking.beside(other)):
            first, second = (names[id(series.rows[0])] for series in (ranking.subject, other))
            pairs.append((first, second, ranking.rows[0]["seq_len"], found))
    if pairs:
        return f"{work}: {_pairs_title(pairs)}"
    series = list(layout.looks)
    name = f"{series[0]}, " if len(series) == 1 else ""
    return f"{work}: {name}{measure.range(layout)}".replace(" %", "%")


def _pairs_title(pairs: Sequence[tuple[str, str, int, Speedup]]) -> str:
    """`burst is 1.10 to 1.16 times as fast as torchtitan, 16K to 128K tokens`; `no difference between ...`."""
    firsts, seconds, lengths, found = zip(*pairs, strict=True)
    first, second = _common_name(firsts, "the fastest"), _common_name(seconds, "the best other")
    if first == second:
        first, second = "the fastest", "the next"
    where, spreads = span_of(lengths), [one.spread for one in found]
    ends = [end for one in found for end in (one.spread.ends if one.spread else (one.value,))]
    low, high = min(ends), max(ends)
    # An end that is not 1 never reads 1.00.
    digits = next((n for n in (2, 3) if all(end == 1 or round(end, n) != 1 for end in (low, high))), 4)
    between = " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in (low, high)))
    sure = [isinstance(one, Interval) for one in spreads]
    if not all(sure):
        rounds = "one round" if None in spreads else "two rounds or more" if any(sure) else "two rounds"
        return f"{first} at {between} times the speed of {second} in {rounds}, {where}"
    verdicts = Counter(one.verdict for one in found)
    if set(verdicts) == {"not distinguishable"}:
        if low > 1 - CLOSE and high < 1 + CLOSE:
            return f"no difference between {first} and {second}, {where}"
        return f"{first} and {second} are not told apart ({between} times), {where}"
    told = f"{first} is {between} times as fast as {second}"
    if len(verdicts) > 1:
        parts = [f"{word} at {verdicts[word]}" for word in ("faster", "slower") if verdicts[word]]
        told += f": {' and '.join(parts)} of {len(pairs)} points"
    return f"{told}, {where}"


def _common_name(names: Sequence[str], several: str) -> str:
    """The name, or what series of burst have in common: two schedules are `burst`."""
    if len(set(names)) == 1:
        return names[0]
    return OWN_METHOD if all(name.replace(",", " ").split()[0] == OWN_METHOD for name in names) else several


def _all_equal(layout: FigureLayout) -> bool:
    """Whether no series can be distinguished from the fastest at any length and size; false without intervals."""
    found = []
    for _, _, here in layout.places:
        speeds = [point.value("tokens_per_gpu_per_second") or 0.0 for point in here]
        best = here[speeds.index(max(speeds))]
        found += [speedup(best.rows, point.rows) for point in here if point is not best]
    return bool(found) and all(
        one is not None
        and isinstance(one.spread, Interval)
        and one.verdict == "not distinguishable"
        and one.value <= 1 + CLOSE
        for one in found
    )


class Memory:
    """Peak memory: the allocator's on GPUs, the process's resident set without."""

    def place(self, rows: Sequence[Row]) -> int:
        return 40

    def draw(self, rows: Sequence[Row]) -> Sheet | str | None:
        column = memory_column(rows)
        if shows_all(rows) or not any(row[column] for row in rows):
            return None
        layout = laid_out(rows)
        unit = "GiB per GPU" if column == "peak_memory_gib" else "GiB of host memory per rank"
        measure = DrawnColumn(column=column, unit=unit, notes=[f"P{FORMULAS[column][1:]}."])
        if (most := _largest_ratio(layout, column)) < SAME_MEMORY and (most or len(layout.lengths) < 3):
            return _same_memory(layout, measure)
        return _sheet(rows, layout, measure, _memory_title)


def _memory_title(layout: FigureLayout, measure: DrawnColumn) -> str:
    """Who takes the least at the longest length that the most series reached."""
    best: list[tuple[float, str]] = []
    where = ""
    for panel, seq_len, points in layout.places:
        here = sorted((value, point.series) for point in points if (value := measure.value(point)))
        if len(here) >= max(2, len(best)):
            best, where = here, ", ".join(filter(None, (span_of([seq_len]), panel.title)))
    if not best:
        return f"Peak memory: {measure.range(layout)}".replace(measure.unit, "GiB", 1)
    (least, name), (most, last) = best[0], best[-1]
    return f"Peak memory: {number_text(least)} GiB with {name} to {number_text(most)} with {last}, {where}"


def _same_memory(layout: FigureLayout, measure: DrawnColumn) -> str | None:
    if sum(measure.value(point) is not None for point in layout.points) < 2:
        return None
    if len(layout.looks) == 1:
        return f"{next(iter(layout.looks))} takes {measure.range(layout)}."
    who = f"ll {len(layout.looks)} take the same peak memory within 3%: {measure.range(layout)}."
    return f"A{who}" if len(layout.lengths) == 1 else f"At every length a{who}"


class BytesSent:
    """Bytes that each GPU sends for attention in one step."""

    def place(self, rows: Sequence[Row]) -> int:
        return 60

    def draw(self, rows: Sequence[Row]) -> Sheet | str | None:
        column = "sent_gib_per_gpu"
        sending = FigureRows(row for row in rows if row["cp_size"] > 1 and row[column])  # one rank sends nothing
        if not sending:
            return None
        most = max(row[column] for row in sending)
        unit, scale = ("GiB", 1.0) if most >= 1 else ("MiB", 1024.0) if most >= 1 / 1024 else ("KiB", 1024.0**2)
        unit = f"{unit} per {'rank' if all(map(on_cpu, rows)) else 'GPU'} and step"
        measure = DrawnColumn(column=column, unit=unit, scale=scale, notes=[f"S{FORMULAS[column][1:]}."])
        layout = laid_out(sending)
        if _largest_ratio(layout, column) < SAME_BYTES:
            who = "whatever the method" if len(layout.looks) > 1 else f"with {next(iter(layout.looks))}"
            return f"Attention sends {measure.range(layout).replace(f'{unit},', f'{unit} {who},')}."
        return _sheet(sending, layout, measure, _bytes_title)


def _bytes_title(layout: FigureLayout, measure: DrawnColumn) -> str:
    """Who sends the least and the most where they are furthest apart."""
    places = [
        [(value, point.series) for point in here if (value := measure.value(point))] for _, _, here in layout.places
    ]
    best = max(filter(None, places), key=lambda here: max(here)[0] / min(here)[0])
    (least, name), (most, last) = min(best), max(best)
    return f"Attention sends {number_text(most / least)} times as much with {last} as with {name}"


def _largest_ratio(layout: FigureLayout, column: str) -> float:
    """The largest ratio of two series at one length and size; 0 where no two have a value there."""
    found = [[value for point in here if (value := point.value(column))] for _, _, here in layout.places]
    return max((max(values) / min(values) for values in found if len(values) > 1), default=0.0)


def _sheet(
    rows: Sequence[Row], layout: FigureLayout, measure: DrawnColumn, title: Callable[[FigureLayout, DrawnColumn], str]
) -> Sheet | None:
    """The figure of `measure`, titled by what `title` reads in it; None for fewer than two values."""
    if sum(measure.value(point) is not None for point in layout.points) < 2:
        return None
    notes = [*measure.notes, samples_note(rows)]
    notes += [whisker_note([point.rows for point in layout.points])] if measure.timed else []
    notes += [ceiling_note(rows)] if measure.ceiling else []
    notes += layout.notes
    lines, ceiling = _lines(layout, measure)
    if len(lines) <= MAX_LINES and any(len(line.spots) >= LINES_FROM for line in lines):
        lost = {f"{line.name} at {format_length(at).upper()} ({why})" for line in lines for at, why in line.lost}
        notes += [f"Without a number: {', '.join(sorted(lost))}."] if lost else []
        notes += ["Dashed: the ceiling."] if ceiling else []
        plot = partial(paint_lines, lines=lines, axes=LineAxes(unit=measure.unit), ceiling=ceiling)
    else:
        groups = _groups(layout, measure)
        if (left := sum(len(group.bars) for group in groups) - MAX_BARS) > 0:
            notes.append(f"The {left} bars of the smallest sizes are not drawn; {IN_CSV}.")
            groups = _largest(groups)
        notes += ["Black mark: the ceiling."] if any(bar.ceiling for group in groups for bar in group.bars) else []
        plot = partial(paint_bars, groups=groups, unit=measure.unit)
    return Sheet(
        title=title(layout, measure), about=about(rows), notes=list(filter(None, notes)), footnotes=layout.footnotes,
        plot=plot,
    )  # fmt: skip


def _lines(layout: FigureLayout, measure: DrawnColumn) -> tuple[list[SeriesLine], dict[int, float]]:
    """A line for each series of each panel, and the highest ceiling of each length."""
    lines = []
    for place, panel in enumerate(layout.panels):
        for name, look in layout.looks.items():
            points = [point for point in panel.points if point.series == name]
            spots = [
                PlottedValue(
                    at=point.seq_len, value=value, ends=measure.ends(point), tip=_tip(point, panel, measure)
                )
                for point in points
                if (value := measure.value(point)) is not None
            ]  # fmt: skip
            if points:
                lines.append(
                    SeriesLine(
                        name=", ".join(filter(None, (name, panel.title))), spots=spots,
                        look=replace(look, variant=look.variant + place), strong=_is_strong(points[0], layout),
                        lost=[(point.seq_len, point.lost) for point in points if measure.value(point) is None],
                    )
                )  # fmt: skip
    ceiling: dict[int, float] = {}
    for point in layout.points:
        if (best := measure.highest(point)) is not None:
            ceiling[point.seq_len] = max(best, ceiling.get(point.seq_len, 0.0))
    return lines, ceiling


def _is_strong(point: SeriesPoint, layout: FigureLayout) -> bool:
    """Whether a point is of burst beside other methods, so that it is set in bold."""
    return point.own and not all(one.own for one in layout.points)


def _groups(layout: FigureLayout, measure: DrawnColumn) -> list[Bars]:
    """A group for each panel and length, the best bar first, what has no value last."""
    found = []
    for panel, seq_len, points in layout.places:
        numbers = [(value, measure.ends(point)) for point in points if (value := measure.value(point))]
        supported = sorted(decimals_between(*one) for one in numbers)
        decimals = supported[(len(supported) - 1) // 2] if supported else 0  # alike for bars that are compared
        sign = -1 if measure.more_is_better else 1
        bars = [_bar(point, panel, layout, measure, decimals) for point in points]
        bars.sort(key=lambda bar: (bar.value is None, sign * (bar.value or 0.0)))
        length = span_of([seq_len]) if len(layout.lengths) > 1 else ""
        found.append(Bars(title=", ".join(filter(None, (panel.title, length))), bars=bars))
    return found


def _bar(point: SeriesPoint, panel: Panel, layout: FigureLayout, measure: DrawnColumn, decimals: int) -> Bar:
    look, value, strong = layout.looks[point.series], measure.value(point), _is_strong(point, layout)
    lost = sorted({row["status"] for row in point.rows} - {"ok"})
    quiet = not point.own and any(one.own for one in layout.points)
    return Bar(
        name=point.series,
        value=value,
        text=point.lost if value is None else " ".join([rounded(value, decimals), *lost]),
        tip=_tip(point, panel, measure),
        colour=MUTED if quiet else look.colour,
        alpha=0.75 if quiet and point.upstream else 0.5 if quiet else look.alpha,
        strong=strong,
        ends=measure.ends(point),
        ceiling=measure.highest(point),
    )


def _largest(groups: Sequence[Bars]) -> list[Bars]:
    """The last groups, as far as their bars find room."""
    kept, room = [], MAX_BARS
    for group in reversed(groups):
        if room > 0:
            kept.append(replace(group, bars=group.bars[:room]))
            room -= len(kept[-1].bars)
    return kept[::-1]


def _tip(point: SeriesPoint, panel: Panel, measure: DrawnColumn) -> str:
    where = ", ".join(filter(None, (point.series, panel.title, span_of([point.seq_len]))))
    value = measure.value(point)
    return f"{where}: {point.lost if value is None else f'{whole_text(value, measure.ends(point))} {measure.unit}'}"


FIGURES = {"speed": Speed(), "memory": Memory(), "bytes_sent": BytesSent()}
