"""This machine's file systems: text of files that a user names, whole files, locks, and folders for state and caches.

`read_text` neither waits for a file's writer nor reads without end. The kernel drops a lock when its holder ends; some
file systems have no locks. Folders follow the XDG base directory specification.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import IO

from cluster.files.errors import UsageError, shown_value

_BEGINNING = 1 << 16  # bytes of a file, by which its writer is known
MAX_BYTES = 4 << 20  # of an inventory with a section of its own for each of ten thousand nodes

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def is_foreign(path: Path, ours: re.Pattern[bytes]) -> bool:
    """Whether a file stands there that does not begin as `ours`, whose place nothing of ours may take. An empty one
    holds nothing to lose. Of what is no file, writing says what is wrong: a pipe would be waited for."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            found = file.read(_BEGINNING)
    except OSError:
        return False
    return bool(found) and not ours.match(found)


def read_text(path: Path, what: str, most_bytes: int = MAX_BYTES) -> str:
    """A regular file of UTF-8 text, without a byte order mark. `what` names the file's role in errors.

    Raises UsageError for anything else: reading an empty pipe or an endless device would never end.
    """
    with open_regular(path, what) as file:
        try:
            content = file.read(most_bytes + 1)  # files of /proc have size 0 until they are read
        except OSError as error:
            raise _unreadable(path, what, error.strerror) from error
    if len(content) > most_bytes:
        raise UsageError(f"{path}: the {what} is larger than {most_bytes >> 20} MiB; give a smaller one")
    try:
        return content.decode("utf-8").removeprefix("\ufeff")  # a byte order mark, which editors put before it
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8; save the {what} as UTF-8 text") from error


def open_regular(path: Path, what: str) -> IO[bytes]:
    """A regular file, opened. `what` names the file's role in errors. Raises UsageError for anything else."""
    try:
        # O_NONBLOCK does not wait for a pipe's writer. The kind of a file is certain only once it is open.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "no file")
            raise UsageError(f"{path}: the {what} is {kind}; give a regular file")
        return open(descriptor, "rb")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such {what}; check the path") from None
    except OSError as error:
        raise _unreadable(path, what, error.strerror) from error
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise _unreadable(path, what, str(error)) from error


def _unreadable(path: Path, what: str, problem: str | None) -> UsageError:
    return UsageError(f"{shown_value(str(path))}: cannot read the {what} ({problem}); give a readable file")


def write_whole(path: Path, content: bytes, mode: int) -> None:
    """Write a file aside and rename it, so that a reader sees it whole or not at all. Raises OSError."""
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")  # for its owner alone
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


# Lustre mounted without flock, NFS without its lock service, and FUSE file systems that do not implement it.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


def try_lock(file: IO[bytes] | IO[str] | int, *, shared: bool = False, wait: bool = False) -> bool | None:
    """Lock a file; returns whether it is ours now, or None where the file system has no locks.

    Without `wait` a lock that another program holds is not waited for. Raises OSError for a file system that fails.
    """
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def state_folder(name: str) -> Path:
    """Folder for files that outlive a program: counters of nodes, the state of a cluster."""
    return _base("XDG_STATE_HOME", Path(".local", "state")) / "burst" / name


def cache_folder(name: str) -> Path:
    """Folder for files that can be made again."""
    return _base("XDG_CACHE_HOME", Path(".cache")) / "burst" / name


def _base(variable: str, below_home: Path) -> Path:
    chosen = Path(os.environ.get(variable, ""))
    return chosen if chosen.is_absolute() else Path.home() / below_home  # by the specification
