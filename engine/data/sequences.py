"""The sequences of a training step: the same for every method, CP size and number of ranks.

A run of `burst train` divides a store into training text, whose sequences it takes in shuffled order, and validation
text. The shuffled order needs no memory. A Feistel network permutes the numbers below a power of four; applying it
until the result is below `size` makes it a permutation of those (cycle walking, Black and Rogaway, CT-RSA 2002). Unlike
a random generator's shuffle it is the same for every version of every library.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from engine.data.store import StoreHeader, TokenStore


class Sequences(ABC):
    """Training sequences by number. A sequence overlaps the next by one token: the last one's label."""

    @abstractmethod
    def sequence(self, number: int, seq_len: int) -> Tensor:
        """`seq_len` tokens and the one after them, int64 [seq_len + 1]. `number` has no upper limit."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Every token id is below it."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Origin of the tokens, as plain values."""

    def batch(self, step: int, replica: int, dp_size: int, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """(tokens_BS, labels_BS) of one step and data-parallel replica: whole sequences, labels one token ahead.

        Sequences are assigned in order of (step, replica, place in the batch), independent of method and CP size.
        """
        import torch

        first = (step * dp_size + replica) * batch_size
        tokens = torch.stack([self.sequence(first + place, seq_len) for place in range(batch_size)])
        return tokens[:, :-1], tokens[:, 1:]


# Default fraction of a text held out, by `burst train data` and by `burst train` from a plain text.
VALIDATION = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Tokens `start` to `stop` (exclusive) of a store."""

    start: int
    stop: int

    def sequences(self, seq_len: int) -> int:
        """Whole sequences in it, each with the token after its last one."""
        return max(0, self.stop - self.start - 1) // seq_len


def spans(header: StoreHeader, *, built: bool) -> tuple[TokenSpan, TokenSpan]:
    """(training, validation) of the tokens of a store. One that `burst train data` built has the split chosen
    there, which may hold out nothing; of a text read without a store of its own the last 1% is held out."""
    edge = header.count - (header.validation if built else int(header.count * VALIDATION))
    return TokenSpan(start=0, stop=edge), TokenSpan(start=edge, stop=header.count)


class ShuffledSequences(Sequences):
    """A span's sequences, each once per epoch, every epoch in an order of its own.

    The order is a function of seed and sequence number alone, so a resumed run needs no state of it.
    """

    def __init__(self, store: TokenStore, span: TokenSpan, seed: int) -> None:
        self._store, self._span, self._seed = store, span, seed

    def sequence(self, number: int, seq_len: int) -> Tensor:
        epoch, place = divmod(number, self._span.sequences(seq_len))
        place = permuted(place, self._span.sequences(seq_len), f"{self._seed}:{epoch}")
        return self._store.window(self._span.start + place * seq_len, seq_len + 1)

    @property
    def vocabulary(self) -> int:
        return self._store.vocabulary

    def describe(self) -> dict[str, object]:
        return self._store.describe()


_ROUNDS = 4


def permuted(number: int, size: int, key: str) -> int:
    """Place of `number` in the order of `key`; a permutation of 0 .. size - 1."""
    assert 0 <= number < size, (number, size)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        number = _feistel(number, half_bits, key)
        if number < size:
            return number


def _feistel(number: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = number >> half_bits, number & mask
    for index in range(_ROUNDS):
        digest = hashlib.blake2b(f"{key}:{index}:{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ int.from_bytes(digest, "big") & mask
    return left << half_bits | right
