"""Peak memory against sequence length: the allocator's on GPUs, the process's resident set without."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from harness.metrics.throughput import FORMULAS
from harness.report.figures._bars import draw_bars
from harness.report.results import Row


class PeakMemory:
    title = "Peak memory"
    place = 50

    def applies(self, rows: Sequence[Row]) -> bool:
        return any(row["peak_memory_gib"] or row["peak_rss_gib"] for row in rows)

    def draw(self, rows: Sequence[Row]) -> Figure:
        on_gpu = any(row["peak_memory_gib"] for row in rows)
        column = "peak_memory_gib" if on_gpu else "peak_rss_gib"
        task = rows[0]["task"]
        return draw_bars(
            rows,
            column=column,
            title=f"{self.title if on_gpu else 'Peak host memory'}, task {task}",
            unit="GiB per GPU" if on_gpu else "GiB per rank",
            notes=[f"P{FORMULAS[column][1:]}."],
        )


FIGURE = PeakMemory()
