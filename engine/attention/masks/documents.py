"""Packed documents: several texts share one sequence and none sees another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.attention.geometry.tile_table import Integers
from engine.attention.geometry.tiles import NO_LIMIT
from engine.attention.masks.mask import Mask

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Documents(Mask):
    """Consecutive documents of the given lengths; a query sees its own document, with `causal` only earlier keys.

    Args:
        lengths: tokens of each document. They sum to the sequence.
        causal: hide keys that come after the query.
        repeat: the lengths start again until the sequence is full, and the last document is cut short.
    """

    lengths: Sequence[int]  # kept as a tuple
    causal: bool = True
    repeat: bool = False
    # Positions at which the documents start, and the hash: formed once, because calls ask for both.
    _starts: Integers = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = tuple(int(length) for length in self.lengths)
        if not lengths or min(lengths) < 1:
            raise ValueError(f"document lengths {list(lengths)[:8]} are not all positive; give tokens per document")
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "_starts", np.cumsum((0, *lengths)))
        object.__setattr__(self, "_hash", hash((lengths, self.causal, self.repeat)))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor | Sequence[int], causal: bool = True) -> Documents:
        """From the positions at which documents start, and the last one ends: 0, ..., seq_len, as
        `flash_attn_varlen_func` takes them. Raises ValueError when they do not start with 0 and ascend."""
        bounds = [int(bound) for bound in cu_seqlens]
        if len(bounds) < 2 or bounds[0] != 0:
            raise ValueError(f"cu_seqlens {bounds[:8]} has to start with 0 and to end with the sequence's length")
        return cls(tuple(stop - start for start, stop in itertools.pairwise(bounds)), causal)

    def __hash__(self) -> int:
        return self._hash

    @property
    def tokens(self) -> int:
        """Tokens of all documents together."""
        return int(self._starts[-1])

    def unsupported_reason(self, seq_len: int) -> str | None:
        if self.repeat or self.tokens == seq_len:
            return None
        return (
            f"{len(self.lengths)} documents hold {self.tokens} tokens and the sequence has {seq_len}; give lengths "
            "that sum to it, or repeat them"
        )

    def regions(self, tokens: int) -> Integers:
        times = -(-tokens // self.tokens) if self.repeat else 1
        starts = (np.arange(times)[:, None] * self.tokens + self._starts[:-1]).reshape(-1)
        starts = starts[starts < tokens]
        stops = np.append(starts[1:], min(tokens, times * self.tokens))
        limits = np.full_like(starts, NO_LIMIT), np.full_like(starts, 0 if self.causal else NO_LIMIT)
        return np.stack((starts, stops, starts, stops, *limits), axis=-1)

    def __str__(self) -> str:
        lengths = ",".join(map(str, self.lengths)) + (",..." if self.repeat else "")
        return f"documents:{lengths}" + ("" if self.causal else ":full")
