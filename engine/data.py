"""Tokens of real text in a memory-mapped file, and the batches every method and CP size reads alike.

The built-in text is the language reference that ships inside every Python (`pydoc_data.topics`); any UTF-8 file serves
as well. Tokens are bytes, so no tokenizer has to be fetched. A store is a directory of the cache

    <cache>/tokens/<name>/tokens.bin    one uint8 per token
    <cache>/tokens/<name>/header.json   where the tokens came from

built once, aside, and renamed into place: ranks that race build the same store and one of them wins.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

PYTHON_DOCS = "python_docs"
TOKENIZER = "bytes"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Where a store's tokens came from."""

    origin: str  # what was tokenized
    python: str  # version that built the store; the built-in text differs between versions
    sha256: str  # of the text
    tokenizer: str
    count: int  # tokens


class TokenStore:
    """An endless sequence of tokens: past its end the text starts again."""

    def __init__(self, directory: Path) -> None:
        """Open a built store. Raises ValueError when its files do not belong together."""
        try:
            self.header = Header(**json.loads((directory / "header.json").read_text(encoding="utf-8")))
            self._tokens = np.memmap(directory / "tokens.bin", dtype=np.uint8, mode="r")
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"token store {directory} cannot be read ({error}); remove it and it is built again"
            ) from error
        if self._tokens.size != self.header.count:
            raise ValueError(
                f"token store {directory} holds {self._tokens.size} tokens and its header says {self.header.count}; "
                "remove it and it is built again"
            )

    def window(self, start: int, count: int) -> Tensor:
        """`count` consecutive tokens from position `start` of the endless sequence, int64."""
        first = start % self.header.count
        tokens = np.take(self._tokens, np.arange(first, first + count), mode="wrap")
        return torch.from_numpy(tokens.astype(np.int64))

    def batch(self, step: int, replica: int, dp_size: int, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """(tokens_BS, labels_BS) of one step and data-parallel replica: whole sequences, labels one token ahead.

        Sequences are dealt in order of (step, replica, place in the batch); neither method nor CP size enters.
        """
        first = (step * dp_size + replica) * batch_size
        windows = [self.window((first + place) * seq_len, seq_len + 1) for place in range(batch_size)]
        tokens = torch.stack(windows)
        return tokens[:, :-1], tokens[:, 1:]

    def describe(self) -> dict[str, Any]:
        """The header as plain values, for the record."""
        return asdict(self.header)


def cache_dir() -> Path:
    """Where stores live: $BURST_CACHE, else burst/ in the user's cache directory ($XDG_CACHE_HOME or ~/.cache)."""
    if chosen := os.environ.get("BURST_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burst"


def open_tokens(source: str) -> TokenStore:
    """The token store of `source`, built on first use.

    Args:
        source: `python_docs`, or the path of a UTF-8 text file.

    Raises:
        ValueError: the file is missing, empty or not UTF-8, or the cache directory cannot be written.
    """
    directory = cache_dir() / "tokens" / _store_name(source)
    if not directory.exists():
        try:
            _build(source, directory)
        except OSError as error:
            raise ValueError(
                f"the token store {directory} cannot be built ({error}); point BURST_CACHE at a writable directory"
            ) from error
    return TokenStore(directory)


def _store_name(source: str) -> str:
    """Differs whenever the text does: by Python version, or by the file's path, size and time of change."""
    if source == PYTHON_DOCS:
        return f"{PYTHON_DOCS}-{platform.python_version()}"
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"data {source!r} is no file; give {PYTHON_DOCS} or the path of a UTF-8 text file")
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return f"file-{key}"


def _build(source: str, directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        digest, count = hashlib.sha256(), 0
        with open(aside / "tokens.bin", "wb") as file:
            for chunk in _python_docs() if source == PYTHON_DOCS else _utf8_file(Path(source)):
                file.write(chunk)
                digest.update(chunk)
                count += len(chunk)
        if count == 0:
            raise ValueError(f"data {source!r} is empty; give a text of at least one byte")
        header = Header(
            origin="pydoc_data.topics" if source == PYTHON_DOCS else Path(source).name,
            python=platform.python_version(),
            sha256=digest.hexdigest(),
            tokenizer=TOKENIZER,
            count=count,
        )
        (aside / "header.json").write_text(json.dumps(asdict(header), indent=1) + "\n", encoding="utf-8")
        try:
            aside.rename(directory)
        except OSError:
            if not directory.exists():
                raise
            # Another process finished first, with the same content.
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # gone already when the rename succeeded


def _python_docs() -> Iterator[bytes]:
    from pydoc_data.topics import topics  # half a megabyte of text: only where a store is built

    for topic in sorted(topics):
        yield topics[topic].strip().encode() + b"\n\n"


def _utf8_file(path: Path) -> Iterator[bytes]:
    """The file's bytes, checked to be UTF-8 on the way. Raises ValueError naming the first offending byte."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with open(path, "rb") as file:
        while True:
            chunk = file.read(_CHUNK_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"data {str(path)!r} is not UTF-8 at byte {done - pending + error.start}; give a text file"
                ) from error
            if not chunk:
                return
            done += len(chunk)
            yield chunk
