"""Attention alone, forward and backward: TFLOP/s per GPU, or milliseconds where no GPU gives TFLOP/s a scale."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from harness.report.figures._speed import draw_speed, was_timed
from harness.report.results import Row


class AttentionSpeed:
    title = "Attention alone, forward + backward"
    place = 30

    def applies(self, rows: Sequence[Row]) -> bool:
        return was_timed(rows, "attention")

    def draw(self, rows: Sequence[Row]) -> Figure:
        return draw_speed(rows, self.title)


FIGURE = AttentionSpeed()
