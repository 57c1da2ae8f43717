"""A check that results can be written to a directory."""

from __future__ import annotations

import os
from pathlib import Path

from harness.base.errors import UsageError


def make_writable(directory: Path) -> None:
    """Make `directory` and its parents. Raises UsageError when that, or making files in it, is not possible."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"{directory} is a file; give --out a directory") from None
    except OSError as error:
        raise UsageError(f"{directory} cannot be made ({error.strerror}); give --out another directory") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"{directory} cannot be written to; give --out another directory")
