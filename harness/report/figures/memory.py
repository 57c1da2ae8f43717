"""Peak memory against sequence length: the allocator's on GPUs, the process's resident set without."""

from __future__ import annotations

from collections.abc import Sequence

from harness.metrics.throughput import FORMULAS
from harness.report.drawing.by_length import DrawnColumn, sheet_by_length
from harness.report.drawing.finding import span_of
from harness.report.drawing.points import FigureLayout, laid_out, memory_column, number_text, range_text
from harness.report.drawing.sheet import Sheet
from harness.report.figures.speed_memory import shows_all
from harness.report.results import Row

EQUAL = 1.03  # memory that differs by less, at every length and size, needs no figure


class Memory:
    def place(self, rows: Sequence[Row]) -> int:
        return 40

    def draw(self, rows: Sequence[Row]) -> Sheet | str | None:
        column = memory_column(rows)
        layout = laid_out(rows)
        if shows_all(rows) or not any(row[column] for row in rows):
            return None
        unit = "GiB per GPU" if column == "peak_memory_gib" else "GiB of host memory per rank"
        if (most := apart(layout, column)) < EQUAL and (most or len(layout.lengths) < 3):
            return _equal(layout, column, unit)
        measure = DrawnColumn(column=column, unit=unit, notes=[f"P{FORMULAS[column][1:]}."])
        return sheet_by_length(rows, measure, lambda found: _title(found, column))


def apart(layout: FigureLayout, column: str) -> float:
    """The largest ratio of two series at one length and size; 0 where no two have a value there."""
    most = 0.0
    for panel in layout.panels:
        for seq_len in layout.lengths:
            here = [one.value(column) or 0.0 for one in panel.points if one.seq_len == seq_len]
            if len(found := [value for value in here if value]) > 1:
                most = max(most, max(found) / min(found))
    return most


def _title(layout: FigureLayout, column: str) -> str:
    """Who takes the least at the longest length that the most series reached."""
    best: list[tuple[float, str]] = []
    where = ""
    for panel in layout.panels:
        for seq_len in layout.lengths:
            here = [
                (value, one.series) for one in panel.points if one.seq_len == seq_len and (value := one.value(column))
            ]
            if len(here) >= max(2, len(best)):
                best, where = sorted(here), ", ".join(filter(None, (span_of([seq_len]), panel.title)))
    if not best:
        return f"Peak memory: {range_text(one.value(column) for one in layout.points)} GiB, {span_of(layout.lengths)}"
    (least, name), (most, last) = best[0], best[-1]
    return f"Peak memory: {number_text(least)} GiB with {name} to {number_text(most)} with {last}, {where}"


def _equal(layout: FigureLayout, column: str, unit: str) -> str | None:
    values = [value for one in layout.points if (value := one.value(column)) is not None]
    if len(values) < 2:
        return None
    ends = range_text(values)
    if len(layout.looks) == 1:
        return f"{next(iter(layout.looks))} takes {ends} {unit}, {span_of(layout.lengths)}."
    where = "" if len(layout.lengths) == 1 else "At every length "
    told = (
        f"{where}all {len(layout.looks)} take the same peak memory within 3%: {ends} {unit}, {span_of(layout.lengths)}."
    )
    return told[:1].upper() + told[1:]


FIGURE = Memory()
