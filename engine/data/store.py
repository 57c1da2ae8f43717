"""A token store: one memory-mapped file of token ids, and a header with their origin.

DIR/tokens.bin    one unsigned integer per token: uint8, uint16 or uint32, little-endian
DIR/header.json   `Header`
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from engine.data.sequences import Sequences
from engine.plain_json import read_json

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

TOKENS_FILE = "tokens.bin"
HEADER_FILE = "header.json"

_NEXT_STEP = "remove it; that of a text is built again when it is next read, any other with `burst data`"

TokenType = Literal["uint8", "uint16", "uint32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
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
    documents: list[dict[str, Any]] = field(default_factory=list)  # per text: name, sha256, tokens


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

    def numbers(self, start: int, count: int) -> NDArray[Any]:
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

    def describe(self) -> dict[str, Any]:
        """The header as plain values, for the record."""
        return asdict(self.header)


def is_store(path: Path) -> bool:
    """Whether `path` is a token store; it may still be unreadable."""
    return os.path.isfile(path / HEADER_FILE)  # which no name is too long for


def read_header(directory: Path) -> Header:
    """The header of a store. Raises ValueError."""
    try:
        header = Header(**read_json(directory / HEADER_FILE))
        np.dtype(header.dtype)
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(directory, error) from error
    return header


def _unreadable(directory: Path, error: Exception) -> ValueError:
    return ValueError(f"token store {directory} cannot be read ({error}); {_NEXT_STEP}")
