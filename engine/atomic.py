"""Files and folders that appear whole or not at all, and the folder of what is kept between processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Write beside `path`, flush to disk, then rename; missing folders are made. Text is written as UTF-8.

    Raises OSError that names the file, also where writing or flushing failed: Python then gives only the reason.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    data = content.encode() if isinstance(content, str) else content
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # fails too on a file system that failed, and is not the reason
            aside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return path


def flush_to_disk(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a loss of power: before a rename, and again after it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_dir() -> Path:
    """Folder of token stores and compiled kernels: $BURST_CACHE, else burst/ in $XDG_CACHE_HOME or ~/.cache.

    Raises RuntimeError where the user has no home.
    """
    if chosen := os.environ.get("BURST_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burst"
