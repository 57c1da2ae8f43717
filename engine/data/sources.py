"""A text as a stream of bytes: the built-in one, or any UTF-8 file. A text is never in memory whole."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path

from engine.data.formats import format_unsupported_reason

PYTHON_DOCS = "python_docs"  # the language reference that ships inside every Python (`pydoc_data.topics`)
_CHUNK_BYTES = 1 << 20


def chunks_of(source: str) -> Iterator[bytes]:
    """The bytes of a text, checked to be UTF-8 while they are read.

    Args:
        source: `python_docs`, or the path of a text file.

    Raises:
        ValueError: the file is missing, of a format that is no text (`formats`), or not UTF-8 (naming the first
            offending byte).
    """
    if source == PYTHON_DOCS:
        return _python_docs()
    if unsupported_reason := text_unsupported_reason(source):
        raise ValueError(unsupported_reason)
    return _utf8_file(Path(source))


def text_unsupported_reason(source: str) -> str | None:
    """One sentence why a source cannot be read as text, as far as its first bytes tell, or None."""
    if source == PYTHON_DOCS:
        return None
    if not os.path.isfile(source):  # which no name is too long for
        return f"data {source!r} is no file; give {PYTHON_DOCS} or the path of a UTF-8 text file"
    return format_unsupported_reason(Path(source))


def name_of(source: str) -> str:
    """The text's name without its folders, which mean nothing on another machine."""
    return "pydoc_data.topics" if source == PYTHON_DOCS else Path(source).name


def _python_docs() -> Iterator[bytes]:
    from pydoc_data.topics import topics  # half a megabyte of text: only where a store is built

    for topic in sorted(topics):
        yield topics[topic].strip().encode() + b"\n\n"


def _utf8_file(path: Path) -> Iterator[bytes]:
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
