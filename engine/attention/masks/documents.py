"""Packed documents: several texts share one sequence and none sees another."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from engine.attention.masks.blocks import BlockMask, Run


@lru_cache(maxsize=64)
def _starts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Where each document starts, and where the last one ends."""
    return tuple(itertools.accumulate(lengths, initial=0))


@dataclass(frozen=True, slots=True)
class Documents(BlockMask):
    """Consecutive documents of the given lengths; a query sees its own document, with `causal` only earlier keys.

    Args:
        lengths: tokens of each document. They sum to the sequence.
        causal: hide keys that come after the query.
        repeat: the lengths start again until the sequence is full, and the last document is cut short.
    """

    lengths: Sequence[int]  # kept as a tuple
    causal: bool = True
    repeat: bool = False

    def __post_init__(self) -> None:
        lengths = tuple(int(length) for length in self.lengths)
        if not lengths or min(lengths) < 1:
            raise ValueError(f"document lengths {list(lengths)[:8]} are not all positive; give tokens per document")
        object.__setattr__(self, "lengths", lengths)

    @property
    def _starts(self) -> tuple[int, ...]:
        return _starts(tuple(self.lengths))

    @property
    def tokens(self) -> int:
        """Tokens of all documents together."""
        return self._starts[-1]

    def unsupported_reason(self, seq_len: int) -> str | None:
        if self.repeat or self.tokens == seq_len:
            return None
        return (
            f"{len(self.lengths)} documents hold {self.tokens} tokens and the sequence has {seq_len}; give lengths "
            "that sum to it, or repeat them"
        )

    def block_at(self, position: int) -> int:
        repeat, place = divmod(position, self.tokens)
        return repeat * len(self.lengths) + bisect_right(self._starts, place) - 1

    def first_position(self, block: int) -> int:
        repeat, index = divmod(block, len(self.lengths))
        return repeat * self.tokens + self._starts[index]

    def visible(self, block: int, first: int, last: int) -> Iterator[Run]:
        if first <= block < last:
            yield block, block + 1

    def __str__(self) -> str:
        lengths = ",".join(map(str, self.lengths)) + (",..." if self.repeat else "")
        return f"documents:{lengths}" + ("" if self.causal else ":full")
