"""A column against sequence length: lines where there are several lengths, else bars, the best first.

Every planned trial has its place: where the number is missing stands the status that explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from harness.base.lengths import format_length
from harness.report.digits import rounded
from harness.report.drawing.bars import Bar, Bars, paint_bars
from harness.report.drawing.lines import PlottedValue, SeriesLine, paint_lines
from harness.report.drawing.looks import MUTED
from harness.report.drawing.notes import ceiling_note, samples_note, whisker_note
from harness.report.drawing.points import (
    IN_CSV,
    FigureLayout,
    Panel,
    SeriesPoint,
    about,
    decimals_between,
    laid_out,
    number_text,
)
from harness.report.drawing.sheet import Sheet
from harness.report.results import Row

LINES_FROM = 3  # lengths of one series
MAX_LINES = 8  # told apart by their names; more are bars
MAX_BARS = 40


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


def sheet_by_length(rows: Sequence[Row], measure: DrawnColumn, title: Callable[[FigureLayout], str]) -> Sheet | None:
    """The figure of `measure`, titled by what `title` reads in it; None for fewer than two values."""
    layout = laid_out(rows)
    values = [point for point in layout.points if point.value(measure.column) is not None]
    if len(values) < 2:
        return None
    notes = [*measure.notes, samples_note(rows)]
    if measure.timed:
        notes.append(whisker_note([point.rows for point in layout.points]))
    if measure.ceiling:
        notes.append(ceiling_note(rows))
    notes += layout.notes
    lines, ceiling = _lines(layout, measure)
    if len(lines) <= MAX_LINES and any(len(line.spots) >= LINES_FROM for line in lines):
        lost = sorted(
            {f"{line.name} at {format_length(at).upper()} ({why})" for line in lines for at, why in line.lost}
        )
        notes += [f"Without a number: {', '.join(lost)}."] if lost else []
        notes += ["Dashed: the ceiling."] if ceiling else []
        plot = partial(paint_lines, lines=lines, unit=measure.unit, ceiling=ceiling)
    else:
        groups = _groups(layout, measure)
        if (left := sum(len(group.bars) for group in groups) - MAX_BARS) > 0:
            notes.append(f"The {left} bars of the smallest sizes are not drawn; {IN_CSV}.")
            groups = _largest(groups)
        notes += ["Black mark: the ceiling."] if any(bar.ceiling for group in groups for bar in group.bars) else []
        plot = partial(paint_bars, groups=groups, unit=measure.unit)
    return Sheet(
        title=title(layout),
        about=about(rows),
        notes=[note for note in notes if note],
        footnotes=layout.footnotes,
        plot=plot,
    )


def _lines(layout: FigureLayout, measure: DrawnColumn) -> tuple[list[SeriesLine], dict[int, float]]:
    """A line for each series of each panel, and the highest ceiling of each length."""
    lines = []
    for panel in layout.panels:
        for name, look in layout.looks.items():
            points = [point for point in panel.points if point.series == name]
            found = [
                (point, value * measure.scale) for point in points if (value := point.value(measure.column)) is not None
            ]
            spots = [
                PlottedValue(
                    seq_len=point.seq_len, value=value, ends=_ends(point, measure), tip=_tip(point, panel, measure)
                )
                for point, value in found
            ]
            lost = [(point.seq_len, point.lost) for point in points if point.value(measure.column) is None]
            if points:
                called = ", ".join(filter(None, (name, panel.title)))
                strong = _beside_others(layout) and points[0].own
                variant = look.variant + layout.panels.index(panel)
                lines.append(
                    SeriesLine(name=called, look=replace(look, variant=variant), spots=spots, lost=lost, strong=strong)
                )
    ceiling: dict[int, float] = {}
    for point in layout.points:
        if (best := point.value(measure.ceiling)) is not None:
            ceiling[point.seq_len] = max(best * measure.scale, ceiling.get(point.seq_len, 0.0))
    return lines, ceiling


def _beside_others(layout: FigureLayout) -> bool:
    """Whether burst stands beside other methods, so that it is set in bold."""
    return len({point.own for point in layout.points}) > 1


def _groups(layout: FigureLayout, measure: DrawnColumn) -> list[Bars]:
    """A group for each panel and length, the best bar first, what has no value last."""
    found = []
    for panel in layout.panels:
        for seq_len in layout.lengths:
            points = [point for point in panel.points if point.seq_len == seq_len]
            supported = sorted(
                decimals_between(value * measure.scale, _ends(one, measure))
                for one in points
                if (value := one.value(measure.column))
            )
            decimals = supported[(len(supported) - 1) // 2] if supported else 0  # alike for bars that are compared
            sign = -1 if measure.more_is_better else 1
            bars = [_bar(point, panel, layout, measure, decimals) for point in points]
            bars.sort(key=lambda bar: (bar.value is None, sign * (bar.value or 0.0)))
            length = f"{format_length(seq_len).upper()} tokens" if len(layout.lengths) > 1 else ""
            if bars:
                found.append(Bars(title=", ".join(filter(None, (panel.title, length))), bars=bars))
    return found


def _bar(point: SeriesPoint, panel: Panel, layout: FigureLayout, measure: DrawnColumn, decimals: int) -> Bar:
    look, value, ceiling = layout.looks[point.series], point.value(measure.column), point.value(measure.ceiling)
    lost = sorted({row["status"] for row in point.rows} - {"ok"})
    scaled = None if value is None else value * measure.scale
    quiet = _beside_others(layout) and not point.own
    return Bar(
        name=point.series,
        value=scaled,
        text=point.lost if scaled is None else " ".join([rounded(scaled, decimals), *lost]),
        tip=_tip(point, panel, measure),
        colour=MUTED if quiet else look.colour,
        alpha=0.75 if quiet and point.upstream else 0.5 if quiet else look.alpha,
        strong=_beside_others(layout) and point.own,
        ends=_ends(point, measure),
        ceiling=None if ceiling is None else ceiling * measure.scale,
    )


def _largest(groups: Sequence[Bars]) -> list[Bars]:
    """The last groups, as far as their bars find room."""
    kept, room = [], MAX_BARS
    for group in reversed(groups):
        if room > 0:
            kept.append(Bars(title=group.title, bars=group.bars[:room]))
            room -= len(kept[-1].bars)
    return kept[::-1]


def _ends(point: SeriesPoint, measure: DrawnColumn) -> tuple[float, float] | None:
    """Of the whisker, in the figure's unit; none where it is so wide that no axis should hold it."""
    ends = point.whisker(measure.column) if measure.timed else None
    if ends is None or ends[1] > 10 * ends[0]:
        return None
    return ends[0] * measure.scale, ends[1] * measure.scale


def _tip(point: SeriesPoint, panel: Panel, measure: DrawnColumn) -> str:
    value = point.value(measure.column)
    where = ", ".join(filter(None, (point.series, panel.title, f"{_length(point)} tokens")))
    if value is None:
        return f"{where}: {point.lost}"
    ends = _ends(point, measure)
    between = f" ({number_text(ends[0], ends)} to {number_text(ends[1], ends)})" if ends else ""
    return f"{where}: {number_text(value * measure.scale, ends)}{between} {measure.unit}"


def _length(point: SeriesPoint) -> str:
    return format_length(point.seq_len).upper()
