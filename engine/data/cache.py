"""Token stores built on first use, of the built-in text or of one text file, with bytes as tokens.

They are in <cache>/tokens/<name>; ranks that build one at the same time build equal stores, and one is kept.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

from engine.data.build import build_store
from engine.data.sources import PYTHON_DOCS, text_unsupported_reason
from engine.data.store import TokenStore, is_store, read_header
from engine.data.tokenizers import ByteTokenizer


def cache_dir() -> Path:
    """Directory of the stores: $BURST_CACHE, else burst/ in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("BURST_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burst"


def is_built(source: str) -> bool:
    """Whether `source` is a store that `burst data` built, rather than a text."""
    return source != PYTHON_DOCS and is_store(Path(source))


def open_tokens(source: str) -> TokenStore:
    """The tokens of `source`: a store that `burst data` built, or the store of a text, built on first use.

    Args:
        source: the directory of a token store, `python_docs`, or the path of a UTF-8 text file.

    Raises:
        ValueError: the file is missing, empty, not UTF-8 or of a format that is no text, or the cache directory
            cannot be written.
    """
    if is_built(source):
        return TokenStore(Path(source))
    directory = cache_dir() / "tokens" / _store_name(source)
    if unsupported_reason := text_unsupported_reason(source):  # also where a store was built before this check existed
        raise ValueError(unsupported_reason)
    if not directory.exists():
        try:
            build_store([source], directory, ByteTokenizer())
        except OSError as error:
            if not directory.exists():  # else another process finished first, with the same content
                raise ValueError(
                    f"the token store {directory} cannot be built ({error}); point BURST_CACHE at a writable directory"
                ) from error
    return TokenStore(directory)


def vocabulary_of(source: str) -> int:
    """Number of token ids of `source`; reads at most a store's header. Raises ValueError."""
    if is_built(source):
        return read_header(Path(source)).vocabulary
    return ByteTokenizer.vocabulary


def _store_name(source: str) -> str:
    """Differs whenever the text does: by Python version, or by the file's path, size and time of change."""
    if source == PYTHON_DOCS:
        return f"{PYTHON_DOCS}-{platform.python_version()}"
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"data {source!r} is no file and no token store; give {PYTHON_DOCS}, the path of a UTF-8 text file, or a "
            "directory that `burst data` built"
        )
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return f"file-{key}"
