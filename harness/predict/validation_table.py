"""`python -m harness.predict.validation_table`: every published configuration, predicted, into results/paper.

Times go to predicted.csv, peaks of memory to predicted_memory.csv, and their errors to docs/plan.md.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from engine.atomic import write_atomic
from harness.predict.published_memory import ComparedMemory, compare_memory, median_memory_error
from harness.predict.published_rows import REFERENCE
from harness.predict.validation import FIT, HELD_OUT, compare, median_error

TABLE_FILE = REFERENCE.with_name("predicted.csv")
PAGE = REFERENCE.parents[2] / "docs" / "plan.md"
ERRORS, MEMORY_ERRORS = "errors", "errors of memory"  # names of blocks of the page
MEMORY_FILE = REFERENCE.with_name("predicted_memory.csv")
HEADER = [
    "configuration", "side", "experiments", "gpu", "gpus", "cp_size", "model", "seq_len", "methods", "metric", "rows",
    "published_seconds", "predicted_seconds", "error_percent",
]  # fmt: skip


def table_rows() -> list[list[str]]:
    """The table with its header, worst prediction last."""
    rows = [
        [
            row.configuration, row.side, row.experiments, row.gpu, str(row.gpus), str(row.cp_size), row.model,
            str(row.seq_len), row.methods, row.metric, str(row.rows), f"{row.published_seconds:.4g}",
            f"{row.predicted_seconds:.4g}", f"{100 * row.error:+.1f}",
        ]
        for row in sorted(compare(), key=lambda row: (abs(row.error), row.configuration, row.metric))
    ]  # fmt: skip
    return [HEADER, *rows]


def summary() -> str:
    """Markdown: median errors by side and kind of row, for docs/plan.md."""
    lines = ["| published rows | side | configurations | median error | nine of ten within |", "|---|---|---|---|---|"]
    rows = compare()
    for label, end_to_end in (("end-to-end, ablation, checkpointing, CP scaling", True), ("all others", False)):
        for side in (FIT, HELD_OUT):
            chosen = [row for row in rows if row.side == side and row.end_to_end == end_to_end]
            errors = sorted(abs(row.error) for row in chosen)
            widest = errors[min(len(errors) - 1, round(0.9 * len(errors)))]
            said = "fitted" if side == FIT else "held out"
            lines.append(
                f"| {label} | {said} | {len(chosen)} | {100 * median_error(chosen):.1f}% | {100 * widest:.0f}% |"
            )
    return "\n".join(lines)


MEMORY_HEADER = [
    "configuration", "side", "experiments", "system", "task", "gpus", "cp_size", "model", "seq_len", "methods", "rows",
    "published_gib", "predicted_gib", "error_percent",
]  # fmt: skip


def memory_rows() -> list[list[str]]:
    """The same of memory; where the sheet says out of memory there is no error, and the row stands last."""

    def cells(row: ComparedMemory) -> list[str]:
        settings, error = row.configuration.settings, row.error
        return [
            row.configuration.name, row.side, row.experiments, row.system.name, settings.task,
            str(settings.world_size), str(settings.cp_size), settings.model.name, str(settings.seq_len), row.methods,
            str(row.rows), "oom" if row.published_gib is None else f"{row.published_gib:.4g}",
            f"{row.predicted_gib:.4g}", "" if error is None else f"{100 * error:+.1f}",
        ]  # fmt: skip

    def place(row: ComparedMemory) -> tuple[bool, float, str]:
        return row.error is None, abs(row.error or 0.0), row.configuration.name

    return [MEMORY_HEADER, *(cells(row) for row in sorted(compare_memory(), key=place))]


def memory_summary() -> str:
    """Markdown: median errors of memory by side and kind of row."""
    lines = ["| published rows | side | configurations | median error | largest error |", "|---|---|---|---|---|"]
    rows = [row for row in compare_memory() if row.error is not None]
    kinds = {
        "training, BurstEngine": lambda row: row.training and row.system.name == "BurstEngine",
        "training, other systems": lambda row: row.training and row.system.name != "BurstEngine",
        "attention alone": lambda row: not row.training,
        "all": lambda row: True,
    }
    for label, belongs in kinds.items():
        for side in (FIT, HELD_OUT):
            chosen = [row for row in rows if row.side == side and belongs(row)]
            said = "fitted" if side == FIT else "held out"
            largest = max(abs(row.error or 0.0) for row in chosen)
            median = 100 * median_memory_error(chosen)
            lines.append(f"| {label} | {said} | {len(chosen)} | {median:.1f}% | {100 * largest:.0f}% |")
    return "\n".join(lines)


def marks(name: str) -> tuple[str, str]:
    """Where a block of the page begins and ends."""
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def write_table(path: Path, rows: list[list[str]]) -> None:
    """Write a table as CSV and say how long it is."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomic(path, text.getvalue())
    print(f"{path.name}: {len(rows) - 1} rows")


def write_block(name: str, text: str, page: Path = PAGE) -> None:
    """Put the text between a block's marks in the page."""
    begin, end = marks(name)
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    write_atomic(page, before + begin + "\n" + text + "\n" + end + rest.partition(end)[2])


def main() -> None:
    write_table(TABLE_FILE, table_rows())
    write_table(MEMORY_FILE, memory_rows())
    write_block(ERRORS, summary())
    write_block(MEMORY_ERRORS, memory_summary())


if __name__ == "__main__":
    main()
