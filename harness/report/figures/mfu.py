"""Model FLOPs utilisation against sequence length, beside what the hardware's own kernels would allow."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from harness.metrics.throughput import FORMULAS
from harness.report.figures._bars import draw_bars
from harness.report.results import Row


class Utilisation:
    title = "Model FLOPs utilisation against sequence length"
    place = 20

    def applies(self, rows: Sequence[Row]) -> bool:
        return any(row["task"] == "train" and row["mfu"] for row in rows)

    def draw(self, rows: Sequence[Row]) -> Figure:
        return draw_bars(
            rows,
            column="mfu",
            title=self.title,
            unit="MFU (%)",
            scale=100,
            ceiling="mfu_ceiling",
            notes=[FORMULAS["mfu"] + ".", FORMULAS["forward FLOPs"] + ".", FORMULAS["mfu_ceiling"] + "."],
            spread=True,
        )


FIGURE = Utilisation()
