"""Training throughput against sequence length: tokens per second per GPU, per method and CP size."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from harness.metrics.throughput import FORMULAS
from harness.report.figures._bars import draw_bars
from harness.report.results import Row


class Throughput:
    title = "Training throughput against sequence length"
    place = 10

    def applies(self, rows: Sequence[Row]) -> bool:
        return any(row["task"] == "train" and row["tokens_per_gpu_per_second"] for row in rows)

    def draw(self, rows: Sequence[Row]) -> Figure:
        return draw_bars(
            rows,
            column="tokens_per_gpu_per_second",
            title=self.title,
            unit=f"tokens/s per {'GPU' if any(row['peak_memory_gib'] for row in rows) else 'rank'}",
            notes=[FORMULAS["tokens_per_gpu_per_second"] + "."],
            spread=True,
        )


FIGURE = Throughput()
