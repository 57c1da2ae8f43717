"""Where commands print tables."""

from __future__ import annotations

import sys

from rich.console import Console

PIPE_COLUMNS = 160  # in a file or a pipe there is no width to keep to, and 80 columns would fold reasons into ribbons


def stdout_console() -> Console:
    """A console on stdout: as wide as the terminal, or wide enough to read where there is none."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
