"""Bytes each GPU sends for attention in one step."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from harness.metrics.throughput import FORMULAS
from harness.report.figures._bars import draw_bars
from harness.report.results import Row


class BytesSent:
    title = "Bytes sent by attention per step"
    place = 60

    def applies(self, rows: Sequence[Row]) -> bool:
        # All zero when every trial had a single CP rank: nothing to compare.
        return any(row["sent_gib_per_gpu"] for row in rows)

    def draw(self, rows: Sequence[Row]) -> Figure:
        most = max(row["sent_gib_per_gpu"] or 0.0 for row in rows)
        unit, scale = ("GiB", 1.0) if most >= 1 else ("MiB", 1024.0) if most >= 1 / 1024 else ("KiB", 1024.0**2)
        return draw_bars(
            rows,
            column="sent_gib_per_gpu",
            title=f"{self.title}, task {rows[0]['task']}",
            unit=f"{unit} per {'GPU' if any(row['peak_memory_gib'] for row in rows) else 'rank'} and step",
            scale=scale,
            notes=[f"S{FORMULAS['sent_gib_per_gpu'][1:]}."],
        )


FIGURE = BytesSent()
