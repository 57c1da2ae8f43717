"""Attention alone, forward and backward: TFLOP/s per GPU, or milliseconds where no GPU gives TFLOP/s a scale."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from harness.figures._bars import draw_bars
from harness.metrics import FORMULAS
from harness.results import Row


class AttentionSpeed:
    title = "Attention alone, forward + backward"
    place = 30

    def applies(self, rows: Sequence[Row]) -> bool:
        return any(row["task"] == "attention" and row["step_seconds_median"] for row in rows)

    def draw(self, rows: Sequence[Row]) -> Figure:
        if all(row["gpu"] in (None, "cpu") for row in rows):
            return draw_bars(
                rows,
                column="step_seconds_median",
                title=f"{self.title}: time",
                unit="ms, median (lower is better)",
                scale=1e3,
                notes=["Median over measured calls of one forward and one backward, slowest rank."],
                spread=True,
            )
        return draw_bars(
            rows,
            column="tflops_per_gpu",
            title=f"{self.title}: speed",
            unit="TFLOP/s per GPU",
            ceiling="tflops_ceiling",
            notes=[FORMULAS["tflops_per_gpu (attention)"] + "."],
            spread=True,
        )


FIGURE = AttentionSpeed()
