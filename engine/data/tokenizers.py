"""Text to token ids: bytes, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from engine.data.chat import ChatTemplate, Message
from engine.reader import read_json, read_regular
from engine.settings import BYTE_VOCABULARY

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

BYTES = "bytes"
MAX_FILE_BYTES = 256 << 20  # of a tokenizer.json: published ones have up to 40 MB
PIECE_BYTES = 1 << 16  # of text in one call of a Hugging Face tokenizer
_BATCH_PIECES = 64  # pieces it may tokenize at once, on all cores
_LONGEST_LINE = 1 << 24  # text without a place to cut is cut here
# A line's end between two characters that are no white space. Byte-level pre-tokenizers (GPT-2, Llama 3, Qwen) split
# the text there in any case, so cutting there changes no token; they read runs of white space as one.
_CUT = re.compile(rb"(?<=\S\n)(?=\S)")
# Tokens that end a text in published tokenizers, where no tokenizer_config.json beside the file names one.
_END_OF_TEXT = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer(Protocol):
    """Turns text into the token ids of a store."""

    name: str  # as headers and records show it
    sha256: str  # of its file; empty for bytes
    vocabulary: int  # ids are below this
    end_of_text: int | None  # the id that separates documents, where there is one

    def encode(self, chunks: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Token ids of one document, given as UTF-8 chunks cut anywhere."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> tuple[str, np.ndarray, np.ndarray]:
        """A chat in the words of the tokenizer's template, its token ids, and which of these the model is to learn.
        Raises ValueError where there is no template, or it refuses the chat."""
        ...


class ByteTokenizer:
    """Every byte is a token: needs no file, and any text can be written in it."""

    name = BYTES
    sha256 = ""
    vocabulary = BYTE_VOCABULARY
    end_of_text: int | None = None

    def encode(self, chunks: Iterable[bytes]) -> Iterator[np.ndarray]:
        return (np.frombuffer(chunk, dtype=np.uint8) for chunk in chunks)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[str, np.ndarray, np.ndarray]:
        raise ValueError(
            "tokenizer bytes has no chat template; give --tokenizer the tokenizer.json of a model that has one"
        )


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, read by the library that wrote it.

    Long documents are tokenized in pieces that end where a line does. Tokenizers that mark the beginning of a text
    (SentencePiece's, such as Llama 2's) put that mark before every piece; byte-level ones give the same tokens as for
    the whole text.
    """

    def __init__(self, path: Path) -> None:
        """Raises ValueError when the library is missing or the file is no tokenizer."""
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise ValueError(
                f"tokenizer {str(path)!r} needs the tokenizers library, which cannot be imported here ({error}); "
                "install it with: pip install 'burst-harness[train]'"
            ) from error
        try:
            content = read_regular(path, MAX_FILE_BYTES)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ValueError(
                f"tokenizer {str(path)!r} cannot be read ({reason}); give bytes or the path of a tokenizer.json"
            ) from error
        try:
            self._backend: Backend = Backend.from_str(content.decode())
        except Exception as error:  # the library raises nothing more precise for a file it cannot parse
            raise ValueError(
                f"tokenizer {str(path)!r} is no Hugging Face tokenizer ({' '.join(str(error).split())}); "
                "give bytes or the path of a tokenizer.json"
            ) from error
        # Files often hold the limits of the model they came with.
        self._backend.no_truncation()
        self._backend.no_padding()
        ids = self._backend.get_vocab(with_added_tokens=True)
        self.name = path.name if path.name != "tokenizer.json" else path.resolve().parent.name
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._path = path
        self.vocabulary = max(ids.values(), default=-1) + 1
        self.end_of_text: int | None = next((ids[token] for token in _named_ends(path) if token in ids), None)

    def encode(self, chunks: Iterable[bytes]) -> Iterator[np.ndarray]:
        pieces = (piece.decode() for piece in cut_at_lines(chunks, PIECE_BYTES))
        while batch := list(islice(pieces, _BATCH_PIECES)):
            for encoding in self._backend.encode_batch_fast(batch, add_special_tokens=False):
                yield np.asarray(encoding.ids, dtype=np.uint32)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[str, np.ndarray, np.ndarray]:
        text, answers = self._template.rendered(messages)
        encoding = self._backend.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)  # characters
        learnt = np.zeros(len(starts), dtype=bool)
        for start, stop in answers:
            learnt |= (start <= starts) & (starts < stop)
        return text, np.asarray(encoding.ids, dtype=np.uint32), learnt

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._path)


def tokenizer_named(name: str) -> Tokenizer:
    """`bytes`, or the tokenizer of a `tokenizer.json`. Raises ValueError."""
    return ByteTokenizer() if name == BYTES else FileTokenizer(Path(name))


def vocabulary_of_file(path: Path) -> int | None:
    """Number of ids of a `tokenizer.json`, read without the library; None where there is no such file."""
    try:
        content = json.loads(read_regular(path, MAX_FILE_BYTES))
        words = content["model"]["vocab"]
        ids = words.values() if isinstance(words, dict) else range(len(words))
        return 1 + max((*ids, *(token["id"] for token in content.get("added_tokens") or ())), default=-1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def cut_at_lines(chunks: Iterable[bytes], piece_bytes: int) -> Iterator[bytes]:
    """The same bytes in pieces of at least `piece_bytes` that end where a line does; the last may be shorter.

    A text without such a place for 16 MiB is cut between two characters.
    """
    held = b""
    for chunk in chunks:
        held += chunk
        start = 0
        while len(held) - start >= piece_bytes:
            if match := _CUT.search(held, start + piece_bytes):
                cut = match.start()
            elif len(held) - start >= _LONGEST_LINE:
                cut = next(at for at in range(len(held) - 1, start, -1) if held[at] & 0xC0 != 0x80)
            else:
                break
            yield held[start:cut]
            start = cut
        held = held[start:]
    if held:
        yield held


def _named_ends(path: Path) -> Iterator[str]:
    """Candidates for the end-of-text token: the one in the model's own configuration, then the usual ones."""
    beside = path.with_name("tokenizer_config.json")
    if beside.is_file():
        try:
            token = cast(dict[str, object], read_json(beside)).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(f"{beside} cannot be read ({error}); repair it, or move it away") from error
        if isinstance(token, dict):  # written with the token's properties
            token = token.get("content")
        if isinstance(token, str):
            yield token
    yield from _END_OF_TEXT
