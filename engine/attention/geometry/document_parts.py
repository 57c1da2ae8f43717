"""Parts of packed documents that ranks hold, and the visible (query, key) pairs of their tokens. No torch."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.attention.geometry.tiles import NO_LIMIT, Integers


@dataclass(frozen=True, slots=True)
class Work:
    """What tokens of a document see: the fields of `engine.attention.masks.Documents`."""

    causal: bool = True
    left: int | None = None
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def window(self) -> int:
        """Keys that a token of a causal document sees at most, besides those of its span."""
        return NO_LIMIT if self.left is None or not self.causal else self.left + 1

    @property
    def irregular(self) -> bool:
        """Tokens have pairs that neither length nor position in their document tells, or fewer towards its end."""
        return bool(self.spans) or (self.left is not None and not self.causal)


PLAIN = Work()  # causal documents without windows and spans


@dataclass(slots=True)
class DocumentPart:
    """Tokens [first, last) of a document."""

    start: int  # global position of the document
    length: int  # of the whole document
    first: int
    last: int

    @property
    def tokens(self) -> int:
        return self.last - self.first


@dataclass(slots=True)
class RankDocuments:
    """What a rank has been given."""

    starts: list[int] = field(default_factory=list)  # global positions of whole documents
    lengths: list[int] = field(default_factory=list)  # of the same documents
    parts: list[DocumentPart] = field(default_factory=list)  # of documents that are cut

    def all_parts(self) -> list[DocumentPart]:
        """Whole documents among the parts, to be cut."""
        self.parts += map(DocumentPart, self.starts, self.lengths, itertools.repeat(0), self.lengths)
        self.starts, self.lengths = [], []
        return self.parts


def bounds_in(bounds: Integers, tokens: int, repeat: bool) -> Integers:
    """Where the documents of a sequence start, and the last one ends; `bounds` are those of the given documents, which
    `repeat` until the sequence is full. The last document is cut short."""
    given = int(bounds[-1])
    times = -(-tokens // given) if repeat else 1
    starts = (np.arange(times)[:, None] * given + bounds[:-1]).reshape(-1)
    return np.append(starts[starts < tokens], min(tokens, times * given))


def pairs_between(length: int, first: int, last: int, causal: bool, window: int) -> float:
    """Pairs of tokens [first, last) of a document, by its length and their position, without spans."""
    if not causal:
        return float(length * (last - first))
    if last <= window:
        return (last * (last + 1) - first * (first + 1)) / 2
    inside = min(first, window)
    return window * (last - max(first, window)) + (window * (window + 1) - inside * (inside + 1)) / 2


def pairs_of_whole(lengths: Integers, work: Work) -> Integers:
    """The same of whole documents."""
    if not work.causal:
        return lengths * lengths
    hidden = np.maximum(0, lengths - (work.left + 1)) if work.left is not None else 0
    return (lengths * (lengths + 1) - hidden * (hidden + 1)) // 2


def pair_counter(work: Work) -> Callable[[DocumentPart, int, int], float]:
    """Counts the pairs of tokens [first, last) of a document: all that `work` shows."""
    causal, window, spans = work.causal, work.window, work.spans

    def by_position(part: DocumentPart, first: int, last: int) -> float:
        return pairs_between(part.length, first, last, causal, window)

    if not work.irregular:
        return by_position
    if not causal and work.left is not None:
        reach = work.left + 1
        return lambda part, first, last: (
            by_position(part, first, last)
            - pairs_between(0, first, last, True, NO_LIMIT)
            + pairs_between(0, first, last, True, reach)
        )
    starts = [start for start, _ in spans]
    sizes = [stop - start for start, stop in spans]
    before = list(itertools.accumulate((size * (size - 1) // 2 for size in sizes), initial=0))

    def in_spans(position: int) -> int:
        """Pairs of all tokens before a position of the sequence with later ones of their span."""
        at = bisect_right(starts, position) - 1
        if at < 0:
            return 0
        count = min(position - starts[at], sizes[at])
        return before[at] + count * (sizes[at] - 1) - count * (count - 1) // 2

    return lambda part, first, last: (
        by_position(part, first, last) + in_spans(part.start + last) - in_spans(part.start + first)
    )


def first_with(most: int, holds: Callable[[int], bool]) -> int:
    """The first number up to `most` for which it holds, as for all later ones; `most` where there is none."""
    return bisect_left(range(most), True, key=holds)
