"""The compact table that `burst run` ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.report.results import Row
from harness.report.speedup import slow_baselines, slow_sentence
from harness.report.tables.trials import results_table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

# Columns of the table of all trials that a terminal has room for.
SHOWN = ("task", "tokens", "parallel", "step ms", "tok/s/GPU", "tok/s/rank", "TFLOP/s/GPU", "MFU %", "peak GiB", "loss")


def terminal_table(rows: Sequence[Row]) -> RichTable:
    """One line per trial, in the order of results.csv, with the names and digits of the report."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    every = results_table(rows)
    headers = [column.header for column in every.columns]
    places = [(header, headers.index(header)) for header in SHOWN if header in headers]
    explained = slow_sentence(slow_baselines(rows).values())
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, caption=Text(explained) if explained else None)
    table.add_column("method", overflow="fold")  # gives way first: an ablation's names are long
    for header, place in places:
        table.add_column(header, justify="right" if every.columns[place].numeric else "left", no_wrap=True)
    table.add_column("status", overflow="fold")
    for row, texts in zip(rows, every.texts(), strict=True):
        ok = row["status"] == "ok"
        style = "green" if ok else "yellow" if row["status"] == "refused" else "red"
        # Text, not str: a reason may hold brackets, which rich would read as markup.
        status = Text(row["status"] if ok else f"{row['status']}: {row['reason'] or 'no reason recorded'}", style=style)
        table.add_row(Text(texts[0]), *(Text(texts[place]) for _, place in places), status)
    return table
