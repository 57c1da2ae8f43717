"""Consoles on stdout and stderr, and tables on them."""

from __future__ import annotations

import sys
from typing import Any, cast

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cluster.files.errors import shown, shown_value

PIPE_COLUMNS = 160  # in a file or a pipe there is no width to keep to, and 80 columns would fold reasons into ribbons
_UNLIMITED = 10_000  # columns, to measure the width of a cell that is not wrapped
_WORD_COLUMNS = 12  # a longer word, such as a commit's digest, may be broken where a column wraps


LONG_TABLE_ROWS = 500  # beyond which a table is no longer fitted to the terminal: rich takes seconds for thousands


class SafeConsole(Console):
    """A console on which no text controls the terminal: neither a record's, nor a node's, nor a file name."""

    def print(self, *objects: object, **options: object) -> None:
        super().print(*map(_safe, objects), **cast(dict[str, Any], options))


def _safe(thing: object) -> object:
    if isinstance(thing, str):
        return shown(thing)
    if isinstance(thing, Text):
        return thing if thing.plain == (plain := shown(thing.plain)) else Text(plain, style=thing.style)
    if isinstance(thing, Table):
        for column in thing.columns:
            column._cells = [_safe_cell(cell) for cell in column._cells]
    return thing


def _safe_cell(cell: Any) -> Any:
    plain = cell.plain if isinstance(cell, Text) else cell
    if not isinstance(plain, str) or plain == (safe := shown_value(plain)):
        return cell
    return Text(safe, style=cell.style if isinstance(cell, Text) else "")


def stdout_console() -> Console:
    """A console on stdout: as wide as the terminal, or wide enough to read where there is none.

    Neither console replaces emoji: a path may hold :x:, and their names would be imported by the first print, which a
    signal's handler that prints may have interrupted.
    """
    return SafeConsole(width=None if sys.stdout.isatty() else PIPE_COLUMNS, emoji=False)


def stderr_console() -> Console:
    """A console on stderr, for messages beside the results."""
    return SafeConsole(stderr=True, emoji=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table whole: on a narrow terminal rich alone would cut numbers and drop columns.

    Columns that may wrap give way first, then the gaps between columns. What is wider even so is printed at the width
    it needs, and the terminal folds its lines. A long table is printed so at once, and without colours.
    """
    _safe(table)
    if table.row_count > LONG_TABLE_ROWS:
        _print_long(console, table)
        return
    room = console.width
    if _least_width(console, table) > room:
        table.padding, table.show_edge = 0, False
    console.width = max(room, _least_width(console, table))
    try:
        console.print(table)
    finally:
        console.width = room


def _print_long(console: Console, table: Table) -> None:
    """One line for each row, every column as wide as its widest cell but the last, which ends where its text does."""
    columns = []
    for column in table.columns:
        cells = [cell.plain if isinstance(cell, Text) else str(cell) for cell in (column.header, *column.cells)]
        widths = [len(cell) if cell.isascii() else cell_len(cell) for cell in cells]
        width = max(widths)
        right = column.justify == "right"
        columns.append(
            [" " * (width - own) + cell if right else cell + " " * (width - own)
             for cell, own in zip(cells, widths, strict=True)]
        )  # fmt: skip
    lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    console.file.write("\n".join([*lines, ""]) + "\n")


def _least_width(console: Console, table: Table) -> int:
    """Columns of text the table takes with every `no_wrap` column whole and the others at their longest word."""
    options = console.options.update(max_width=_UNLIMITED)
    breakable = 0
    for column in table.columns:
        cells = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
        if column.no_wrap:
            column.min_width = max(cell.maximum for cell in cells)
        else:
            breakable += max(0, max(cell.minimum for cell in cells) - _WORD_COLUMNS)
    return Measurement.get(console, options, table).minimum - breakable
