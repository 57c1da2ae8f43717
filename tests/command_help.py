"""What `burst --help` and `burst COMMAND --help` print, for tests that hold pages against it."""

from __future__ import annotations

import contextlib
import io
from functools import cache

from harness.cli import main


@cache
def burst_help(command: str) -> str | None:
    """What `burst [COMMAND] --help` prints, or None when there is no such command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main([*command.split(), "--help"])
        except SystemExit as end:
            code = int(end.code or 0)
    return out.getvalue() if code == 0 else None
