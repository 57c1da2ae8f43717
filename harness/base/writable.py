"""Checks that results can be written to a directory, and overwrite nothing of a user's."""

from __future__ import annotations

import errno
import re
import tempfile
from pathlib import Path

from cluster.files.filesystem import is_foreign
from harness.base.errors import UsageError

_REFUSED = frozenset({errno.EACCES, errno.ENOENT, errno.EPERM, errno.EROFS})


def make_writable(directory: Path) -> None:
    """Make `directory` and its parents. Raises UsageError when that, or making files in it, is not possible."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"{directory} is a file; give --out a directory") from None
    except OSError as error:
        raise UsageError(f"{directory} cannot be made ({error.strerror}); give --out another directory") from error
    try:
        # Permissions alone do not tell: root has them in /proc, and where a server of files refuses.
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        if error.errno not in _REFUSED:  # no room, or a fault of the file system: said as it is everywhere
            raise
        raise UsageError(
            f"{directory} cannot be written to ({error.strerror}); give --out another directory"
        ) from error


def refuse_foreign(path: Path, beginning: str) -> None:
    """Raise UsageError where `path` is a file that does not begin as those do that are written there: a user's own."""
    if is_foreign(path, re.compile(re.escape(beginning.encode()))):
        raise UsageError(
            f"{path} is no earlier {path.name} of burst and would be overwritten; rename it, or give another --out"
        )
