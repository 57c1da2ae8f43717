"""Peak memory against sequence length: the allocator's on GPUs, the process's resident set without."""

from __future__ import annotations

from collections.abc import Sequence

from harness.metrics.throughput import FORMULAS
from harness.report.drawing.by_length import draw_by_length
from harness.report.drawing.points import Measure, measured_points, memory_column, said_by_memory_time
from harness.report.drawing.sheet import Sheet
from harness.report.results import Row

EQUAL = 1.03  # memory that differs by less, over all trials, needs no figure


class PeakMemory:
    title = "Peak memory"
    place = 50

    def applies(self, rows: Sequence[Row]) -> bool:
        column = memory_column(rows)
        found = [row[column] for row in rows if row[column]]
        return measured_points(rows, column) > 1 and max(found) > EQUAL * min(found) and not said_by_memory_time(rows)

    def draw(self, rows: Sequence[Row]) -> Sheet:
        column = memory_column(rows)
        on_gpu = column == "peak_memory_gib"
        return draw_by_length(
            rows,
            f"{self.title if on_gpu else 'Peak host memory'}, task {rows[0]['task']}",
            Measure(
                column=column,
                unit="GiB per GPU" if on_gpu else "GiB per rank",
                notes=[f"P{FORMULAS[column][1:]}."],
            ),
        )


FIGURE = PeakMemory()
