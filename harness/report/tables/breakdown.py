"""Where a step's time goes, from the trials that were run with `--profile`: shares that add up to the traced step."""

from __future__ import annotations

from collections.abc import Sequence

from harness.base.lengths import format_length
from harness.report.results import Row
from harness.report.tables.table import Column, Table, significant, without_empty_columns
from harness.report.tables.trials import series_names
from harness.report.variants import masks_of, models_of, panel_name, panel_of

_PROFILE = "extra_profile."
# What the worker calls a category, and how the table does; the order is that of precedence where several run at once.
HEADERS = {
    "attention_forward": "attention forward %",
    "attention_backward": "attention backward %",
    "attention_recomputed": "attention recomputed %",
    "matmul": "matmul %",
    "recomputed": "other recomputed %",
    "lm_head": "LM head %",
    "optimizer": "optimizer %",
    "other_compute": "other compute %",
    "merge": "merging %",
    "communication": "exposed communication %",
    "copies": "exposed copies %",
    "idle": "idle %",
}
_STEPS = {"extra_step": "one more", "measured_step": "the measured one"}


def breakdown_table(rows: Sequence[Row]) -> Table | None:
    """A line per profiled trial; categories in which no trial spent any time have no column. None without a profile."""
    if not any(row.get(f"{_PROFILE}span_seconds") for row in rows):
        return None
    lines = [
        (row, placed)
        for row, *placed in zip(rows, models_of(rows), masks_of(rows), series_names(rows), strict=True)
        if row.get(f"{_PROFILE}span_seconds")
    ]
    met = [name for name in HEADERS if any(row.get(f"{_PROFILE}seconds.{name}") for row, _ in lines)]
    columns = (
        Column(header="task"),
        Column(header="model"),
        Column(header="mask"),
        Column(header="method"),
        Column(header="tokens", form=format_length, numeric=True),
        Column(header="parallel"),
        Column(header="step ms", form=significant(3, 1e3), numeric=True),
        Column(header="traced step"),
        Column(header="of rank", numeric=True),
        Column(header="on"),
        Column(header="traced ms", form=significant(3, 1e3), numeric=True),
        *(Column(header=HEADERS[name], form=_percent, numeric=True) for name in met),
    )
    return without_empty_columns(
        Table(
            name="breakdown",
            title="Where a step's time goes",
            columns=columns,
            rows=tuple(_line(row, placed, met) for row, placed in lines),
            trials=tuple(row for row, _ in lines),
            note="Of the rank whose events span the longest time. From its first event to its last every instant "
            "belongs to one column, the leftmost of those that run then, so transfers count only where nothing "
            "computes beside them; idle: nothing runs, because the host or another rank is waited for. The profiler "
            "slows the host down, so the traced time may exceed that of the measured steps, short ones most of all.",
        )
    )


def _line(row: Row, placed: Sequence[str | None], met: Sequence[str]) -> tuple[object, ...]:
    span = row[f"{_PROFILE}span_seconds"]
    return (
        row["task"],
        *placed,
        row["seq_len"],
        panel_name(panel_of(row)),
        row["step_seconds_median"],
        _STEPS[row[f"{_PROFILE}of"]],
        row.get(f"{_PROFILE}rank"),
        row.get(f"{_PROFILE}on"),
        span,
        *(row.get(f"{_PROFILE}seconds.{category}", 0.0) / span for category in met),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
