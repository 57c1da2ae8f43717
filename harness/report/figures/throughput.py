"""Training throughput against sequence length: tokens per second per GPU, per method and CP size."""

from __future__ import annotations

from collections.abc import Sequence

from harness.metrics.throughput import FORMULAS
from harness.report.drawing.by_length import draw_by_length
from harness.report.drawing.points import Measure, measured_points, said_by_memory_time
from harness.report.drawing.sheet import Sheet
from harness.report.figures.mfu import FIGURE as UTILISATION
from harness.report.results import Row

COLUMN = "tokens_per_gpu_per_second"


class Throughput:
    title = "Training throughput"
    place = 10

    def applies(self, rows: Sequence[Row]) -> bool:
        if rows[0]["task"] != "train" or measured_points(rows, COLUMN) < 2 or said_by_memory_time(rows):
            return False
        # At one length MFU is proportional to it, and says more.
        return len({row["seq_len"] for row in rows}) > 1 or not UTILISATION.applies(rows)

    def draw(self, rows: Sequence[Row]) -> Sheet:
        return draw_by_length(
            rows,
            self.title,
            Measure(
                column=COLUMN,
                unit=f"tokens/s per {'GPU' if any(row['peak_memory_gib'] for row in rows) else 'rank'}",
                timed=True,
                notes=[FORMULAS[COLUMN] + "."],
            ),
        )


FIGURE = Throughput()
