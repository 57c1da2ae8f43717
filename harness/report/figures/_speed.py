"""Speed of a part of the model timed alone: TFLOP/s per GPU, or milliseconds where no GPU gives TFLOP/s a scale."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from harness.metrics.throughput import FORMULAS
from harness.report.figures._bars import draw_bars
from harness.report.results import Row


def was_timed(rows: Sequence[Row], task: str) -> bool:
    """Whether these rows hold a time of `task`."""
    return any(row["task"] == task and row["step_seconds_median"] for row in rows)


def draw_speed(rows: Sequence[Row], title: str) -> Figure:
    """Bars of speed for rows of one task; `title` names the part."""
    if all(row["gpu"] in (None, "cpu") for row in rows):
        return draw_bars(
            rows,
            column="step_seconds_median",
            title=f"{title}: time",
            unit="ms, median (lower is better)",
            scale=1e3,
            notes=["Median over measured calls of one forward and one backward, slowest rank."],
            spread=True,
        )
    return draw_bars(
        rows,
        column="tflops_per_gpu",
        title=f"{title}: speed",
        unit="TFLOP/s per GPU",
        ceiling="tflops_ceiling",
        notes=[FORMULAS[f"tflops_per_gpu ({rows[0]['task']})"] + "."],
        spread=True,
    )
