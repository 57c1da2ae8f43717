"""Speed of a part of the model timed alone: TFLOP/s per GPU, or milliseconds where no GPU gives TFLOP/s a scale."""

from __future__ import annotations

from collections.abc import Sequence

from harness.metrics.throughput import FORMULAS
from harness.report.drawing.by_length import draw_by_length
from harness.report.drawing.notes import peaks_of
from harness.report.drawing.points import Measure, measured_points, said_by_memory_time
from harness.report.drawing.sheet import Sheet
from harness.report.results import Row


def compares_times(rows: Sequence[Row], task: str) -> bool:
    """Whether these rows hold times of `task` at two points or more that no other figure shows."""
    return (
        rows[0]["task"] == task and measured_points(rows, "step_seconds_median") > 1 and not said_by_memory_time(rows)
    )


def draw_speed(rows: Sequence[Row], title: str) -> Sheet:
    """Speed for rows of one task; `title` names the part."""
    if all(row["gpu"] in (None, "cpu") for row in rows):
        return draw_by_length(
            rows,
            f"{title}: time",
            Measure(
                column="step_seconds_median",
                unit="ms (lower is better)",
                scale=1e3,
                timed=True,
                notes=["Median over measured calls of one forward and one backward, slowest rank."],
            ),
        )
    peaks = peaks_of(rows)
    return draw_by_length(
        rows,
        f"{title}: speed",
        Measure(
            column="tflops_per_gpu",
            unit="TFLOP/s per GPU",
            ceiling="tflops_ceiling",
            peak=max(peak for _, peak in peaks) if peaks else None,
            timed=True,
            notes=[FORMULAS[f"tflops_per_gpu ({rows[0]['task']})"] + "."],
        ),
    )
