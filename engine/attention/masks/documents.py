"""Packed documents: several texts share one sequence and none sees another."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.shard_table import Integers, ShardTable, by_pair
from engine.attention.masks.block_cells import BlockRuns, Rectangles
from engine.attention.masks.block_rows import Run
from engine.attention.masks.blocks import MAX_TILES, BlockMask
from engine.attention.masks.mask import PairSpans

FEW_TILES = 4  # up to so many tiles of a pair are told apart: `accumulate.WAITING_PARTS`


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
    # Where each document starts and the last one ends, and the hash: formed once, because calls ask for both.
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _first_positions: Integers = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = tuple(int(length) for length in self.lengths)
        if not lengths or min(lengths) < 1:
            raise ValueError(f"document lengths {list(lengths)[:8]} are not all positive; give tokens per document")
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "_starts", tuple(itertools.accumulate(lengths, initial=0)))
        object.__setattr__(self, "_first_positions", np.array(self._starts))
        object.__setattr__(self, "_hash", hash((lengths, self.causal, self.repeat)))

    def __hash__(self) -> int:
        return self._hash

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

    def boundaries(self, seq_len: int) -> Integers:
        """Where each document of a sequence starts, and the sequence's end."""
        whole, rest = divmod(seq_len, self.tokens)
        once = self._first_positions[:-1]
        starts = (np.arange(whole + (rest > 0))[:, None] * self.tokens + once).reshape(-1)
        return np.append(starts[starts < seq_len], seq_len)

    def area(self, seq_len: int) -> int:
        unsupported_reason = self.unsupported_reason(seq_len)
        if unsupported_reason:
            raise ValueError(unsupported_reason)
        lengths = np.diff(self.boundaries(seq_len))
        return int((lengths * (lengths + 1) // 2).sum() if self.causal else (lengths * lengths).sum())

    def pair_spans(self, shards: ShardTable) -> PairSpans | None:
        firsts = self.boundaries(int(shards.count.sum()))
        if shards.step > 1:
            return self._striped_spans(shards, firsts)
        return self._causal_spans(shards, firsts) if self.causal else self._full_spans(shards, firsts)

    def pair_keys(self, shards: ShardTable) -> Sequence[Integers] | None:
        if shards.step > 1:
            return super(Documents, self).pair_keys(shards)
        if not self.causal:
            return None
        seen, rows, first_keys = _seen_earlier(self, shards)
        own = np.diag(np.arange(len(shards.segments)) + 1)  # no two ranks' own documents are alike
        of_segments = (np.where(seen, each, 0).reshape(-1, *own.shape) for each in (rows, first_keys))
        return by_pair(shards.count, shards.count, (own, *itertools.chain.from_iterable(of_segments)))

    def _documents_of(self, shards: ShardTable, firsts: Integers) -> tuple[Integers, Integers]:
        """First and last document of each segment; each document once per rank: empty ranges have first > last."""
        first = np.searchsorted(firsts, shards.start, side="right") - 1
        last = np.searchsorted(firsts, shards.start + shards.count - 1, side="right") - 1
        last[shards.count == 0] = -1
        first[:, 1:] = np.maximum(first[:, 1:], np.maximum.accumulate(last, axis=1)[:, :-1] + 1)
        return first, last

    def _full_spans(self, shards: ShardTable, firsts: Integers) -> PairSpans:
        """A document in both shards is one tile; tiles of two documents share no token."""
        first, last = self._documents_of(shards, firsts)
        first, last = first.T.reshape(-1), last.T.reshape(-1)
        low = shards.by_segments(np.maximum(first[:, None], first))
        high = shards.by_segments(np.minimum(last[:, None], last))
        both = low <= high
        counts = np.where(both, high - low + 1, 0).sum(axis=(0, 1))
        some = counts > 0
        low = np.where(both, low, len(firsts)).min(axis=(0, 1))
        high = np.where(both, high, -1).max(axis=(0, 1))
        starts, stops = firsts[np.where(some, low, 0)], firsts[np.where(some, high, 0) + 1]
        queries = [np.where(some, shards.rows_before(cuts), 0) for cuts in (starts, stops)]
        keys = [np.where(some, shards.rows_before(cuts.T).T, 0) for cuts in (starts, stops)]
        spans = (queries[0], queries[1]), (keys[0], keys[1])
        return PairSpans(*spans, counts <= FEW_TILES, counts > MAX_TILES)

    def _causal_spans(self, shards: ShardTable, firsts: Integers) -> PairSpans:
        """A rank's own documents are a tile each, and so is the one document in which a segment sees an earlier one.
        Pairs with several such segments are asked for their tiles."""
        ranks, tokens = len(shards.segments), shards.count.sum(axis=1)
        first, last = self._documents_of(shards, firsts)
        seen, rows, first_keys = _seen_earlier(self, shards)
        counts = seen.sum(axis=(0, 1))
        before = shards.offset.T
        q_start, k_start = before[:, None, :, None], before[:, None] + first_keys
        k_stop = (before + shards.count.T)[:, None]
        # The sum over the segments of two ranks is the one number where one pair of segments is seen.
        spans = [np.where(seen, each, 0).sum(axis=(0, 1)) for each in (q_start, q_start + rows, k_start, k_stop)]
        apart, unknown = counts <= 1, counts > 1
        own = np.maximum(last - first + 1, 0).sum(axis=1)
        diagonal = np.arange(ranks)
        spans[1][diagonal, diagonal] = spans[3][diagonal, diagonal] = tokens
        apart[diagonal, diagonal], unknown[diagonal, diagonal] = own <= FEW_TILES, own > MAX_TILES
        return PairSpans((spans[0], spans[1]), (spans[2], spans[3]), apart, unknown)

    def _striped_spans(self, shards: ShardTable, firsts: Integers) -> PairSpans | None:
        """Of many long documents every pair of ranks sees all: the tiles are too many to be told apart, and the first
        and last documents decide which tokens they span. None where documents are few or short."""
        ranks, lengths = len(shards.segments), np.diff(firsts)
        sure = np.flatnonzero(lengths >= 3 * shards.step)  # two tokens at least of every rank, whichever is first
        if len(sure) <= FEW_TILES or 3 * len(lengths) > MAX_TILES:
            return None
        first = shards.start[:, 0]
        hi = np.where(first[:, None] >= first, 0, -1) if self.causal else None

        def visible(document: int) -> tuple[Integers, Integers, Integers, Integers, NDArray[np.bool_]]:
            """(query start, stop, key start, stop, any) of one document in every pair."""
            bounds = shards.rows_before(firsts[None, document : document + 2]).T
            (top, bottom), (left, right) = bounds[:, :, None], bounds[:, None]
            if hi is not None:
                top, right = np.maximum(top, left - hi), np.minimum(right, bottom + hi)
            return top, bottom, left, right, (top < bottom) & (left < right)

        q_start = q_stop = k_start = k_stop = np.full((ranks, ranks), -1)
        for document in range(int(sure[0]), -1, -1):  # the first one that is visible decides
            top, _, left, _, some = visible(document)
            q_start, k_start = np.where(some, top, q_start), np.where(some, left, k_start)
        for document in range(int(sure[-1]), len(lengths)):
            _, bottom, _, right, some = visible(document)
            q_stop, k_stop = np.where(some, bottom, q_stop), np.where(some, right, k_stop)
        nowhere = np.zeros((ranks, ranks), dtype=bool)
        return PairSpans((q_start, q_stop), (k_start, k_stop), nowhere, nowhere)

    def block_at(self, position: int) -> int:
        repeat, place = divmod(position, self.tokens)
        return repeat * len(self.lengths) + bisect_right(self._starts, place) - 1

    def first_position(self, block: int) -> int:
        repeat, index = divmod(block, len(self.lengths))
        return repeat * self.tokens + self._starts[index]

    def keys_seen(self, seq_len: int) -> tuple[Integers, Integers]:
        lengths = np.diff(self.boundaries(seq_len))
        nothing = np.zeros_like(lengths)
        return (nothing, lengths) if self.causal else (lengths, nothing)

    def blocks_at(self, positions: Integers) -> Integers:
        repeat, place = np.divmod(positions, self.tokens)
        return repeat * len(self.lengths) + np.searchsorted(self._first_positions, place, side="right") - 1

    def first_positions(self, blocks: Integers) -> Integers:
        repeat, index = np.divmod(blocks, len(self.lengths))
        return repeat * self.tokens + self._first_positions[index]

    def rectangles(self, queries: BlockRuns, keys: BlockRuns, hi: Integers) -> Rectangles:
        """One for each document that is in both shards."""
        most = max(int(each.blocks.max(initial=0)) for each in (queries, keys)) + 1
        sides = []
        for side in (queries, keys):
            of, run = np.nonzero(side.held)
            sides.append((of, run, of * most + side.blocks[of, run]))
        (of, row, documents), (_, column, others) = sides
        _, first, second = np.intersect1d(documents, others, assume_unique=True, return_indices=True)
        return Rectangles(of[first], row[first], row[first] + 1, column[second], column[second] + 1)

    def visible(self, block: int, first: int, last: int) -> Iterator[Run]:
        if first <= block < last:
            yield block, block + 1

    def __str__(self) -> str:
        lengths = ",".join(map(str, self.lengths)) + (",..." if self.repeat else "")
        return f"documents:{lengths}" + ("" if self.causal else ":full")


@lru_cache(maxsize=16)
def _seen_earlier(mask: Documents, shards: ShardTable) -> tuple[NDArray[np.bool_], Integers, Integers]:
    """Which segments see an earlier one, in the one document that has the last token of the one and the first of
    the other: (any, how many of the first queries, first key), [query and key segments, query ranks, key ranks]."""
    firsts, ranks = mask.boundaries(int(shards.count.sum())), np.arange(len(shards.segments))
    start, count = shards.start.T.reshape(-1), shards.count.T.reshape(-1)
    stop, some = start + count, count > 0
    head = np.searchsorted(firsts, start, side="right") - 1
    tail = np.searchsorted(firsts, stop - 1, side="right") - 1
    seen = (head[:, None] == tail) & (start[:, None] >= stop) & some[:, None] & some
    rows = np.minimum(stop, firsts[np.minimum(head, len(firsts) - 2) + 1]) - start
    first_keys = np.maximum(start, firsts[np.maximum(tail, 0)]) - start
    seen, rows, first_keys = map(shards.by_segments, np.broadcast_arrays(seen, rows[:, None], first_keys))
    seen[..., ranks, ranks] = False
    return seen, rows, first_keys
