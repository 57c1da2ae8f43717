"""Speed against sequence length: tokens per second, MFU or TFLOP/s per GPU, and on a CPU the time of a step."""

from __future__ import annotations

from collections.abc import Sequence

from harness.metrics.throughput import FORMULAS
from harness.report.drawing.by_length import DrawnColumn, sheet_by_length
from harness.report.drawing.finding import all_equal, matches_of, span_of, title_of
from harness.report.drawing.notes import peak_note
from harness.report.drawing.points import FigureLayout, laid_out, range_text
from harness.report.drawing.sheet import Sheet
from harness.report.figures.speed_memory import shows_all
from harness.report.results import Row
from harness.report.variants import on_cpu

_WORK = {"train": "Training", "attention": "Attention, forward and backward", "lm_head": "LM head and loss"}


class Speed:
    def place(self, rows: Sequence[Row]) -> int:
        """First on GPUs; on a CPU, where times say little, last."""
        return 90 if all(map(on_cpu, rows)) else 10

    def draw(self, rows: Sequence[Row]) -> Sheet | str | None:
        if shows_all(rows):
            return None
        measure = _measure(rows)
        layout = laid_out(rows)
        if measure.more_is_better and all_equal(layout):
            return _equal(layout, measure)
        return sheet_by_length(rows, measure, lambda found: _title(rows, found, measure))


def _measure(rows: Sequence[Row]) -> DrawnColumn:
    task = rows[0]["task"]
    if all(map(on_cpu, rows)):
        return DrawnColumn(
            column="step_seconds_median", unit="ms of a step (less is better)", scale=1e3, timed=True,
            notes=["Median of the slowest rank. Ranks share the cores: such times do not rank methods on GPUs."],
        )  # fmt: skip
    if task != "train":
        return DrawnColumn(
            column="tflops_per_gpu", unit="TFLOP/s per GPU", ceiling="tflops_ceiling", timed=True, more_is_better=True,
            notes=[FORMULAS[f"tflops_per_gpu ({task})"] + ".", peak_note(rows)],
        )  # fmt: skip
    if len({row["method"] for row in rows}) == 1 and any(row["mfu"] for row in rows):
        return DrawnColumn(
            column="mfu", unit="% MFU", scale=100, ceiling="mfu_ceiling", timed=True, more_is_better=True,
            notes=[FORMULAS["mfu"] + ".", peak_note(rows)],
        )  # fmt: skip
    column = "tokens_per_gpu_per_second"
    return DrawnColumn(
        column=column, unit="tokens/s per GPU", timed=True, more_is_better=True, notes=[FORMULAS[column] + "."]
    )


def _title(rows: Sequence[Row], layout: FigureLayout, measure: DrawnColumn) -> str:
    work = _WORK[rows[0]["task"]]
    if not measure.more_is_better:
        return f"{work}: time of a step on the CPU"
    if matches := matches_of(rows, layout):
        return f"{work}: {title_of(matches)}"
    names = {one.series for one in layout.points}
    name = f"{names.pop()}, " if len(names) == 1 else ""
    return f"{work}: {name}{_range(layout, measure)} {measure.unit}, {span_of(layout.lengths)}".replace(" %", "%")


def _equal(layout: FigureLayout, measure: DrawnColumn) -> str:
    *names, last = layout.looks
    where = f"{_range(layout, measure)} {measure.unit}, {span_of(layout.lengths)}"
    return f"No difference in speed between {', '.join(names)} and {last}: {where}."


def _range(layout: FigureLayout, measure: DrawnColumn) -> str:
    return range_text((one.value(measure.column) for one in layout.points), measure.scale)


FIGURE = Speed()
