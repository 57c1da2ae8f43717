"""A token store: one memory-mapped file of token ids, and a header with their origin.

DIR/tokens.bin    one unsigned integer per token: uint8, uint16 or uint32, little-endian
DIR/header.json   `StoreHeader`

A store is written aside, flushed and renamed, so that it appears whole or not at all. A text without a store of its own
gets one on first use, of bytes as tokens, in <cache>/tokens/<name>; ranks that build one at the same time build equal
stores, and one is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypedDict

import numpy as np

from engine.atomic import cache_dir
from engine.data.sequences import Sequences
from engine.data.sources import PYTHON_DOCS, chunks_of, name_of, text_unsupported_reason
from engine.data.tokenizers import ByteTokenizer, Tokenizer
from engine.reader import from_json, read_json

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

TOKENS_FILE = "tokens.bin"
HEADER_FILE = "header.json"

_NEXT_STEP = "remove it; that of a text is built again when it is next read, any other with `burst train data`"

TokenType = Literal["uint8", "uint16", "uint32"]


class Document(TypedDict):
    """One text of a store."""

    name: str
    sha256: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHeader:
    """Origin of a store's tokens. Defaults are those of byte stores written before a field existed."""

    origin: str  # names of the tokenized texts
    python: str  # version that built the store; the built-in text differs between versions
    sha256: str  # of the texts, one after the other
    tokenizer: str  # bytes, or the name of a tokenizer file
    count: int  # tokens
    vocabulary: int = 256  # every token id is below it
    dtype: TokenType = "uint8"
    validation: int = 0  # tokens held out, at the end
    tokenizer_sha256: str = ""  # of the tokenizer's file; empty for bytes
    end_of_text: int | None = None  # token after each document
    documents: list[Document] = field(default_factory=list)


class TokenStore(Sequences):
    """An endless sequence of tokens: past its end the text starts again."""

    def __init__(self, directory: Path) -> None:
        """Open a built store. Raises ValueError when its files do not fit together."""
        self.header = read_header(directory)
        try:
            saved = np.dtype(self.header.dtype).newbyteorder("<")
            self._tokens = np.memmap(directory / TOKENS_FILE, dtype=saved, mode="r")
        except (OSError, ValueError, TypeError) as error:
            raise _unreadable(directory, error) from error
        if self._tokens.size != self.header.count:
            raise ValueError(
                f"token store {directory} holds {self._tokens.size} tokens and its header says {self.header.count}; "
                f"{_NEXT_STEP}"
            )

    def numbers(self, start: int, count: int) -> NDArray[np.unsignedinteger]:
        """`count` consecutive tokens from position `start` of the endless sequence, as they are stored."""
        first = start % self.header.count
        return np.take(self._tokens, np.arange(first, first + count), mode="wrap")

    def window(self, start: int, count: int) -> Tensor:
        """`count` consecutive tokens from position `start` of the endless sequence, int64."""
        import torch

        return torch.from_numpy(self.numbers(start, count).astype(np.int64))

    def sequence(self, number: int, seq_len: int) -> Tensor:
        return self.window(number * seq_len, seq_len + 1)

    @property
    def vocabulary(self) -> int:
        return self.header.vocabulary

    def describe(self) -> dict[str, object]:
        """The header as plain values, for the record."""
        return asdict(self.header)


def is_store(path: Path) -> bool:
    """Whether `path` is a token store; it may still be unreadable."""
    return os.path.isfile(path / HEADER_FILE)  # which no name is too long for


def read_header(directory: Path) -> StoreHeader:
    """The header of a store. Raises ValueError."""
    try:
        return from_json(StoreHeader, read_json(directory / HEADER_FILE))
    except (OSError, ValueError) as error:
        raise _unreadable(directory, error) from error


def _unreadable(directory: Path, error: Exception) -> ValueError:
    return ValueError(f"token store {directory} cannot be read ({error}); {_NEXT_STEP}")


def build_store(sources: Sequence[str], directory: Path, tokenizer: Tokenizer, validation: float = 0.0) -> StoreHeader:
    """Tokenize texts, each one document, into a new store at `directory`.

    Args:
        sources: `python_docs` or paths of UTF-8 text files, in the order in which they are to be read.
        directory: must not exist; its parent is made.
        tokenizer: decides ids, their width in the file, and whether a token separates the documents.
        validation: fraction of the tokens held out, at the end.

    Raises:
        ValueError: a text is missing, empty or not UTF-8, or too short for the fraction held out.
        FileExistsError: `directory` exists, possibly since another process finished first.
        OSError: it cannot be written.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    aside.chmod(0o755)  # mkdtemp's is for the user alone
    dtype = token_type(tokenizer.vocabulary)
    try:
        digest, documents = hashlib.sha256(), []
        with open(aside / TOKENS_FILE, "wb") as file:
            for source in sources:
                documents.append(_write_document(source, file, tokenizer, dtype, digest))
            file.flush()
            os.fsync(file.fileno())
        count = sum(document["tokens"] for document in documents)
        held_out = int(count * validation)
        if validation and not held_out:
            raise ValueError(
                f"{validation:g} of {count} tokens is less than one token; "
                "give `burst train data` a larger --validation, or 0"
            )
        header = StoreHeader(
            origin=", ".join(document["name"] for document in documents),
            python=platform.python_version(),
            sha256=digest.hexdigest(),
            tokenizer=tokenizer.name,
            count=count,
            vocabulary=tokenizer.vocabulary,
            dtype=dtype,
            validation=held_out,
            tokenizer_sha256=tokenizer.sha256,
            end_of_text=tokenizer.end_of_text,
            documents=documents,
        )
        (aside / HEADER_FILE).write_text(json.dumps(asdict(header), indent=1) + "\n", encoding="utf-8")
        if directory.exists():  # renaming would replace an empty directory
            raise FileExistsError(f"{directory} exists")
        aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # gone already when the rename succeeded
    return header


def token_type(vocabulary: int) -> TokenType:
    """The narrowest unsigned integer that holds every id below `vocabulary`."""
    for dtype, bits in (("uint8", 8), ("uint16", 16)):
        if vocabulary <= 1 << bits:
            return dtype  # type: ignore[return-value]
    return "uint32"


def _write_document(source: str, file: BinaryIO, tokenizer: Tokenizer, dtype: TokenType, digest: Any) -> Document:
    """Append one text's tokens; returns its name, sha256 and number of tokens. `digest` is of all texts together."""
    own, size, tokens = hashlib.sha256(), 0, 0
    saved = np.dtype(dtype).newbyteorder("<")

    def read() -> Iterator[bytes]:
        nonlocal size
        for chunk in chunks_of(source):
            digest.update(chunk)
            own.update(chunk)
            size += len(chunk)
            yield chunk

    for ids in tokenizer.encode(read()):
        file.write(ids.astype(saved, copy=False).tobytes())
        tokens += len(ids)
    if size == 0:
        raise ValueError(f"data {source!r} is empty; give a text of at least one byte")
    if tokenizer.end_of_text is not None:
        file.write(np.array([tokenizer.end_of_text], dtype=saved).tobytes())
        tokens += 1
    return {"name": name_of(source), "sha256": own.hexdigest(), "tokens": tokens}


def is_built(source: str) -> bool:
    """Whether `source` is a store that `burst train data` built, rather than a text."""
    return source != PYTHON_DOCS and is_store(Path(source))


def open_tokens(source: str) -> TokenStore:
    """The tokens of `source`: a store that `burst train data` built, or the store of a text, built on first use.

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
            "directory that `burst train data` built"
        )
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return f"file-{key}"
