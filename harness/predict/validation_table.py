"""`python -m harness.predict.validation_table`: every published configuration, predicted, into results/paper."""

from __future__ import annotations

import csv
import io

from engine.atomic import write_atomic
from harness.predict.published_rows import REFERENCE
from harness.predict.validation import FIT, HELD_OUT, compare, median_error

TABLE_FILE = REFERENCE.with_name("predicted.csv")
PAGE = REFERENCE.parents[2] / "docs" / "prediction.md"
BEGIN, END = "<!-- errors -->", "<!-- end of errors -->"
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
    """Markdown: median errors by side and kind of row, for docs/prediction.md."""
    lines = ["| rows | side | configurations | median error | nine of ten within |", "|---|---|---|---|---|"]
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


def main() -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table_rows())
    write_atomic(TABLE_FILE, text.getvalue())
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    write_atomic(PAGE, before + BEGIN + "\n" + summary() + "\n" + END + after)
    print(f"{TABLE_FILE.name}: {len(table_rows()) - 1} rows")


if __name__ == "__main__":
    main()
