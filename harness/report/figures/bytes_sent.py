"""Bytes each GPU sends for attention in one step."""

from __future__ import annotations

from collections.abc import Sequence

from harness.metrics.throughput import FORMULAS
from harness.report.drawing.by_length import DrawnColumn, sheet_by_length
from harness.report.drawing.finding import span_of
from harness.report.drawing.points import FigureLayout, FigureRows, laid_out, number_text, range_text
from harness.report.drawing.sheet import Sheet
from harness.report.figures.memory import apart
from harness.report.results import Row
from harness.report.variants import on_cpu

COLUMN = "sent_gib_per_gpu"
EQUAL = 1.005


class BytesSent:
    def place(self, rows: Sequence[Row]) -> int:
        return 60

    def draw(self, rows: Sequence[Row]) -> Sheet | str | None:
        sending = FigureRows(row for row in rows if row["cp_size"] > 1 and row[COLUMN])  # one rank sends nothing
        if not sending:
            return None
        most = max(row[COLUMN] for row in sending)
        unit, scale = ("GiB", 1.0) if most >= 1 else ("MiB", 1024.0) if most >= 1 / 1024 else ("KiB", 1024.0**2)
        unit = f"{unit} per {'rank' if all(map(on_cpu, rows)) else 'GPU'} and step"
        layout = laid_out(sending)
        if apart(layout, COLUMN) < EQUAL:
            return _equal(layout, unit, scale)
        measure = DrawnColumn(column=COLUMN, unit=unit, scale=scale, notes=[f"S{FORMULAS[COLUMN][1:]}."])
        return sheet_by_length(sending, measure, _title)


def _title(layout: FigureLayout) -> str:
    """Who sends the least and the most where they are furthest apart."""
    places: dict[tuple[str, int], list[tuple[float, str]]] = {}
    for panel in layout.panels:
        for one in panel.points:
            if value := one.value(COLUMN):
                places.setdefault((panel.title, one.seq_len), []).append((value, one.series))
    best = max(places.values(), key=lambda here: max(here)[0] / min(here)[0])
    (least, name), (most, last) = min(best), max(best)
    return f"Attention sends {number_text(most / least)} times as much with {last} as with {name}"


def _equal(layout: FigureLayout, unit: str, scale: float) -> str:
    ends = range_text((one.value(COLUMN) for one in layout.points), scale)
    who = "whatever the method" if len(layout.looks) > 1 else f"with {next(iter(layout.looks))}"
    return f"Attention sends {ends} {unit} {who}, {span_of(layout.lengths)}."


FIGURE = BytesSent()
