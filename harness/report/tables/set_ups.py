"""What `settings: as_published` and `tuned` gave each method of a report, and what no setting of the engine says."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.results import Row, cell, method_rank
from harness.report.tables.table import Column, Table, without_empty_columns
from harness.spec.table import EQUAL


def set_ups_table(rows: Sequence[Row]) -> Table | None:
    """A line for each method and value of `settings`; None where every trial ran with equal ones."""
    lines: dict[tuple[str, str, str, str | None], Row] = {}
    for row in rows:
        if row["settings"] != EQUAL:
            lines.setdefault((row["method"], row["settings"], _filled(row), row["settings_by_hand"]), row)
    if not lines:
        return None
    ordered = sorted(lines, key=lambda line: (line[1], method_rank(line[0]), line[2]))
    return without_empty_columns(
        Table(
            name="settings",
            title="Set-ups of the methods",
            columns=(
                Column(header="method"),
                Column(header="settings"),
                Column(header="from the table"),
                Column(header="by hand"),
                Column(header="note"),
            ),
            rows=tuple((*line[:2], line[2] or None, line[3], lines[line]["settings_notes"]) for line in ordered),
            note="as_published: the set-up of the method's authors, or of the paper's artifact. tuned: what they would "
            "turn on. from the table: values of baselines/settings.yaml, where each has its source. by hand: settings "
            "that the table may fill and the experiment gave itself. note: what the original does and no setting says. "
            "Methods are compared under one value of settings, each with its own set-up.",
        )
    )


def _filled(row: Row) -> str:
    names = (row["settings_from_table"] or "").split(", ")
    return ", ".join(f"{name} {cell(row[name])}" for name in names if name)
