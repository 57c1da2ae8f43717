"""Where commands print tables."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

PIPE_COLUMNS = 160  # in a file or a pipe there is no width to keep to, and 80 columns would fold reasons into ribbons
_UNLIMITED = 10_000  # columns, to measure what a cell would take if it could
_WORD_COLUMNS = 12  # a longer word, such as a commit's digest, may be broken where a column wraps


def stdout_console() -> Console:
    """A console on stdout: as wide as the terminal, or wide enough to read where there is none.

    Neither console replaces emoji: a path may hold :x:, and their names would be imported by the first print, which a
    signal's handler that prints may have interrupted.
    """
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, emoji=False)


def stderr_console() -> Console:
    """A console on stderr, for what is said beside the results."""
    return Console(stderr=True, emoji=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table without cutting a number or losing a column, which is what rich does on a narrow terminal.

    Columns that may wrap give way first, then the gaps between columns. What is wider even so is printed at the width
    it needs, and the terminal folds its lines.
    """
    room = console.width
    if _least_width(console, table) > room:
        table.padding, table.show_edge = 0, False
    console.width = max(room, _least_width(console, table))
    try:
        console.print(table)
    finally:
        console.width = room


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
