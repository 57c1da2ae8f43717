"""Attention alone, forward and backward: TFLOP/s per GPU, or milliseconds where no GPU gives TFLOP/s a scale."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.drawing.sheet import Sheet
from harness.report.figures._speed import compares_times, draw_speed
from harness.report.results import Row


class AttentionSpeed:
    title = "Attention alone, forward + backward"
    place = 30

    def applies(self, rows: Sequence[Row]) -> bool:
        return compares_times(rows, "attention")

    def draw(self, rows: Sequence[Row]) -> Sheet:
        return draw_speed(rows, self.title)


FIGURE = AttentionSpeed()
