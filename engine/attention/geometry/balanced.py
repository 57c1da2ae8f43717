"""The layout of packed documents: `engine.attention.geometry.dealing` deals them to the ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from engine.attention.geometry.dealing import deal
from engine.attention.geometry.document_parts import Work, bounds_in
from engine.attention.geometry.layout import Segment, tail_cut
from engine.attention.geometry.shards import ShardSegments


@dataclass(frozen=True, slots=True)
class Balanced:
    """Documents dealt to ranks so that all have equal tokens and nearly equal visible pairs.

    Any mask may be used with it; ranks have equal work under the mask `Documents` of the same fields.

    Args:
        lengths: tokens of each document, in the order of the sequence; none: one document fills the sequence.
        causal: a token sees only earlier keys of its document.
        repeat: the lengths start again until the sequence is full, and the last document is cut short.
        tail: fraction of the sequence, from its end, that is dealt by itself, as what comes before it: both evenly.
        left: a token sees at most so many tokens before itself; None for no limit.
        spans: (start, stop) of runs of positions whose tokens also see the later tokens of their run.
    """

    lengths: tuple[int, ...] = ()
    causal: bool = True
    repeat: bool = False
    tail: float = 1.0
    left: int | None = None
    spans: tuple[tuple[int, int], ...] = ()
    name: str = "balanced"
    _hash: int = field(init=False, repr=False, compare=False)  # formed once: plans are looked up by layouts

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "_hash", hash((self.lengths, self.causal, self.repeat, self.tail, self.left, self.spans))
        )

    def __hash__(self) -> int:
        return self._hash

    def chunks(self, cp_size: int) -> int:
        return cp_size

    def segments(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Segment, ...]:
        """Raises ValueError when the documents do not have `seq_len` tokens."""
        return self.shards(seq_len, cp_size).segments(cp_rank)

    def shards(self, seq_len: int, cp_size: int) -> ShardSegments:
        """Those of all ranks. Raises ValueError when the documents do not have `seq_len` tokens."""
        return _dealt(self, seq_len, cp_size)

    def documents(self, seq_len: int) -> tuple[int, ...]:
        """Lengths of the documents of a sequence. Raises ValueError when they do not sum to it."""
        if not self.lengths:
            return (seq_len,)
        tokens = sum(self.lengths)
        if self.repeat:
            return tuple(np.diff(bounds_in(np.cumsum((0, *self.lengths)), seq_len, True)).tolist())
        if tokens != seq_len:
            raise ValueError(
                f"layout balanced deals {len(self.lengths)} documents of {tokens} tokens and the sequence has "
                f"{seq_len}; make a layout for its own documents"
            )
        return self.lengths


@lru_cache(maxsize=64)
def _dealt(layout: Balanced, seq_len: int, cp_size: int) -> ShardSegments:
    if cp_size == 1:
        return ShardSegments.of((Segment(0, seq_len),))
    work = Work(layout.causal, layout.left, layout.spans)
    return deal(layout.documents(seq_len), cp_size, work, cut=tail_cut(layout.tail, seq_len, cp_size))
