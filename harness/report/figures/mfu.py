"""Model FLOPs utilisation against sequence length, beside what the hardware's own kernels would allow."""

from __future__ import annotations

from collections.abc import Sequence

from harness.metrics.throughput import FORMULAS
from harness.report.drawing.by_length import draw_by_length
from harness.report.drawing.points import Measure, measured_points, said_by_memory_time
from harness.report.drawing.sheet import Sheet
from harness.report.results import Row


class Utilisation:
    title = "Model FLOPs utilisation"
    place = 20

    def applies(self, rows: Sequence[Row]) -> bool:
        return rows[0]["task"] == "train" and measured_points(rows, "mfu") > 1 and not said_by_memory_time(rows)

    def draw(self, rows: Sequence[Row]) -> Sheet:
        return draw_by_length(
            rows,
            self.title,
            Measure(
                column="mfu",
                unit="MFU (%)",
                scale=100,
                ceiling="mfu_ceiling",
                peak=100,
                timed=True,
                notes=[FORMULAS["mfu"] + ".", FORMULAS["forward FLOPs"] + "."],
            ),
        )


FIGURE = Utilisation()
