"""A token store: one memory-mapped file of token ids, where their documents start, and a header with their origin.

DIR/tokens.bin     one unsigned integer per token: uint8, uint16 or uint32, little-endian
DIR/documents.bin  int64, little-endian: the first token of each document
DIR/learnt.bin     where it exists, one byte per token: 1 for those that the model is to learn, 0 for others
DIR/header.json    `StoreHeader`

A store is written aside, flushed and renamed, so that it appears whole or not at all. A text without a store of its own
gets one on first use, of bytes as tokens, in <cache>/tokens/<name>; ranks that build one at the same time build equal
stores, and one is kept.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

import numpy as np

from engine.atomic import cache_dir
from engine.data.documents import documents_of, is_text_alone
from engine.data.sequences import Sequences
from engine.data.sources import PYTHON_DOCS, name_of, text_unsupported_reason
from engine.data.tokenizers import ByteTokenizer, Tokenizer
from engine.reader import from_json, read_json

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

SCHEMA = 2  # of a store: 1 had no documents.bin, and each of its texts is read as one document
TOKENS_FILE = "tokens.bin"
DOCUMENTS_FILE = "documents.bin"
LEARNT_FILE = "learnt.bin"
HEADER_FILE = "header.json"

_NEXT_STEP = "remove it; that of a text is built again when it is next read, any other with `burst train data`"

_PARTS, _PART_BYTES = 1024, 4096  # of a file, that are hashed

TokenType = Literal["uint8", "uint16", "uint32"]


class StoredSource(TypedDict):
    """What one argument of `burst train data` brought to a store."""

    name: str
    sha256: str  # of its texts
    tokens: int
    documents: int


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
    end_of_text: int | None = None  # token after each document that is a text
    schema: int = 1
    sources: list[StoredSource] = field(default_factory=list)
    documents: int = 1
    documents_sha256: str = ""  # of documents.bin, and of learnt.bin where there is one
    answers_only: bool = False  # some documents are chats: learnt.bin says which tokens are learnt
    tokens_sha256: str = ""  # of parts of tokens.bin (`sha256_of_parts`)


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
        self._directory = directory

    def check_tokens(self) -> None:
        """Raises ValueError where the tokens are not those that the store was built with, as after a copy that was cut
        short and filled with zeros. Of parts alone: a single changed token of a large store may pass."""
        expected = self.header.tokens_sha256
        if expected and sha256_of_parts([self._directory / TOKENS_FILE], ends=True) != expected:
            raise ValueError(
                f"token store {self._directory} has other tokens than it was built with; copy it again, or {_NEXT_STEP}"
            )

    @cached_property
    def document_starts(self) -> NDArray[np.int64]:
        """The first token of each document, ascending from 0. Raises ValueError for a damaged file."""
        header = self.header
        if header.schema == 1:
            return np.cumsum([0, *(source["tokens"] for source in header.sources[:-1])], dtype=np.int64)
        try:
            starts = np.fromfile(self._directory / DOCUMENTS_FILE, dtype="<i8").astype(np.int64, copy=False)
        except OSError as error:
            raise _unreadable(self._directory, error) from error
        whole = len(starts) == header.documents > 0 and starts[0] == 0 and starts[-1] < header.count
        if not whole or (np.diff(starts) <= 0).any():
            raise ValueError(f"token store {self._directory} has a damaged {DOCUMENTS_FILE}; {_NEXT_STEP}")
        return starts

    @cached_property
    def _learnt(self) -> NDArray[np.bool_]:
        try:
            learnt = np.memmap(self._directory / LEARNT_FILE, dtype=np.bool_, mode="r")
        except (OSError, ValueError) as error:
            raise _unreadable(self._directory, error) from error
        if learnt.size != self.header.count:
            raise ValueError(f"token store {self._directory} has a damaged {LEARNT_FILE}; {_NEXT_STEP}")
        return learnt

    def learnt(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of the tokens at these places, which ones the model is to learn: all, but for chats, of which the answers."""
        return self._learnt[places] if self.header.answers_only else np.ones(len(places), dtype=bool)

    def at(self, places: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """The tokens at these places, as they are stored."""
        return self._tokens[places]

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


def sha256_of_parts(paths: Sequence[Path], *, ends: bool = False) -> str:
    """A hash of the sizes of files and of parts of each, spread evenly, so that no start waits until a large file is
    read; with `ends` also of their last bytes, which hashes of weights in checkpoints of adapters lack."""
    found = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        found.update(f"{size};".encode())
        with open(path, "rb") as file:
            starts = range(0, size, max(_PART_BYTES, size // _PARTS))
            for start in (*starts, max(0, size - _PART_BYTES)) if ends else starts:
                file.seek(start)
                found.update(file.read(_PART_BYTES))
    return found.hexdigest()


def is_store(path: Path) -> bool:
    """Whether `path` is a token store; it may still be unreadable."""
    return os.path.isfile(path / HEADER_FILE)  # which no name is too long for


def read_header(directory: Path) -> StoreHeader:
    """The header of a store. Raises ValueError."""
    try:
        values = cast(dict[str, Any], read_json(directory / HEADER_FILE))
        if values.get("schema", 1) > SCHEMA:
            raise ValueError(f"its schema is {values['schema']}, and this version reads up to {SCHEMA}")
        if "schema" not in values:
            texts = values.pop("documents", [])
            values["sources"] = [{**text, "documents": 1} for text in texts]
            values["documents"] = max(1, len(texts))
        return from_json(StoreHeader, values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _unreadable(directory, error) from error


def _unreadable(directory: Path, error: Exception) -> ValueError:
    return ValueError(f"token store {directory} cannot be read ({error}); {_NEXT_STEP}")


def build_store(
    sources: Sequence[str], directory: Path, tokenizer: Tokenizer, validation: float = 0.0, field: str | None = None
) -> StoreHeader:
    """Tokenize documents into a new store at `directory`.

    Args:
        sources: as of `documents_of`, in the order in which they are to be read.
        directory: must not exist; its parent is made.
        tokenizer: decides ids, their width in the file, and whether a token separates the documents.
        validation: fraction of the tokens held out, at the end; of records whole ones.
        field: of each record of files of records, its text or chat.

    Raises:
        ValueError: a source is missing, empty, not UTF-8 or of another form, or too short for the fraction held out;
            also for a field where all sources are texts.
        FileExistsError: `directory` exists, possibly since another process finished first.
        OSError: it cannot be written.
    """
    if field is not None and all(map(is_text_alone, sources)):
        others = ", as the others do" if len(sources) > 1 else ""
        raise ValueError(
            f"--field {field} is for files of records (JSON Lines, JSON lists, Parquet, Arrow), and data "
            f"{sources[0]!r} holds text alone{others}; leave --field out"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    aside.chmod(0o755)  # mkdtemp's is for the user alone
    try:
        with _StoreWriter(aside, tokenizer) as writer:
            listed = [writer.add(source, field) for source in sources]
        held_out = int(writer.count * validation)
        if validation and not held_out:
            raise ValueError(
                f"{validation:g} of {writer.count} tokens is less than one token; "
                "give `burst train data` a larger --validation, or 0"
            )
        if held_out and field is not None:
            held_out = writer.count - _whole_from(writer.starts, writer.count - held_out)
        header = StoreHeader(
            origin=", ".join(source["name"] for source in listed),
            python=platform.python_version(),
            sha256=writer.digest.hexdigest(),
            tokenizer=tokenizer.name,
            count=writer.count,
            vocabulary=tokenizer.vocabulary,
            dtype=token_type(tokenizer.vocabulary),
            validation=held_out,
            tokenizer_sha256=tokenizer.sha256,
            end_of_text=tokenizer.end_of_text,
            schema=SCHEMA,
            sources=listed,
            documents=len(writer.starts),
            documents_sha256=writer.documents_digest.hexdigest(),
            answers_only=writer.answers_only,
            tokens_sha256=sha256_of_parts([aside / TOKENS_FILE], ends=True),
        )
        (aside / HEADER_FILE).write_text(json.dumps(asdict(header), indent=1) + "\n", encoding="utf-8")
        if directory.exists():  # renaming would replace an empty directory
            raise FileExistsError(f"{directory} exists")
        aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # gone already when the rename succeeded
    return header


def _whole_from(starts: Sequence[int], place: int) -> int:
    """Where the records begin that are held out from `place` on: at the first one that begins there or later, else at
    the last one. Half a record would be learnt, and the other half, without its beginning, be evaluated. A single
    record is cut."""
    first = min(bisect.bisect_left(starts, place), len(starts) - 1)
    return starts[first] if first else place


def token_type(vocabulary: int) -> TokenType:
    """The narrowest unsigned integer that holds every id below `vocabulary`."""
    for dtype, bits in (("uint8", 8), ("uint16", 16)):
        if vocabulary <= 1 << bits:
            return dtype  # type: ignore[return-value]
    return "uint32"


class _StoreWriter:
    """The files of a new store but its header, written and flushed when the context ends without an error."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self._directory, self._tokenizer = directory, tokenizer
        self._saved = np.dtype(token_type(tokenizer.vocabulary)).newbyteorder("<")
        self.digest, self.documents_digest = hashlib.sha256(), hashlib.sha256()
        self.count, self.starts = 0, list[int]()
        self.answers_only = False

    def __enter__(self) -> _StoreWriter:
        self._tokens = open(self._directory / TOKENS_FILE, "wb")
        self._learnt = open(self._directory / LEARNT_FILE, "wb")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._tokens, self._learnt:
            if kind is not None:
                return
            starts = np.array(self.starts, dtype="<i8").tobytes()
            self.documents_digest.update(starts)
            with open(self._directory / DOCUMENTS_FILE, "wb") as file:
                file.write(starts)
                for each in (self._tokens, self._learnt, file):
                    each.flush()
                    os.fsync(each.fileno())
        if not self.answers_only:
            (self._directory / LEARNT_FILE).unlink()

    def add(self, source: str, field: str | None) -> StoredSource:
        """Append a source's documents, those of no text left out."""
        own, tokens, documents = hashlib.sha256(), self.count, len(self.starts)
        for place, document in documents_of(source, field):
            before = self.count
            if isinstance(document, list):
                try:
                    text, ids, learnt = self._tokenizer.encode_chat(document)
                except ValueError as error:
                    raise ValueError(f"{place}: {error}") from error
                self._hash(text.encode(), own)
                self.answers_only = True
                self._append(ids, learnt)
            else:
                for ids in self._tokenizer.encode(self._hashed(document, own)):
                    self._append(ids)
                if self.count > before and self._tokenizer.end_of_text is not None:
                    self._append(np.array([self._tokenizer.end_of_text]))
            if self.count > before:
                self.starts.append(before)
        if self.count == tokens:
            found = "is empty" if field is None else f"holds no text in field {field!r}"
            raise ValueError(f"data {source!r} {found}; give a text of at least one byte")
        return {
            "name": name_of(source),
            "sha256": own.hexdigest(),
            "tokens": self.count - tokens,
            "documents": len(self.starts) - documents,
        }

    def _append(self, ids: np.ndarray, learnt: np.ndarray | None = None) -> None:
        self._tokens.write(ids.astype(self._saved, copy=False).tobytes())
        kept = np.ones(len(ids), dtype=bool) if learnt is None else learnt
        self._learnt.write(kept.tobytes())
        if learnt is not None:
            self.documents_digest.update(kept.tobytes())
        self.count += len(ids)

    def _hash(self, content: bytes, own: Any) -> None:
        self.digest.update(content)
        own.update(content)

    def _hashed(self, chunks: Iterable[bytes], own: Any) -> Iterator[bytes]:
        for chunk in chunks:
            self._hash(chunk, own)
            yield chunk


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
        return f"{PYTHON_DOCS}-{platform.python_version()}-{SCHEMA}"
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"data {source!r} is no file and no token store; give {PYTHON_DOCS}, the path of a UTF-8 text file, or a "
            "directory that `burst train data` built"
        )
    stat = path.stat()
    key = hashlib.sha256(f"{SCHEMA}:{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return f"file-{key}"
