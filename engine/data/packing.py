"""Documents packed into rows of equal length: which pieces of which documents share a row.

A piece is a whole document, or a part of one that is longer than a row. Pieces of a row follow one another, no token
sees another piece (`engine.attention.masks.Documents`), and what a row leaves free is padding at its end. Everything is
integer arithmetic on the lengths of the documents: the same rows for every method, number of ranks and version of
numpy.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from engine.attention.geometry.document_parts import Work, pairs_of_whole
from engine.settings import LongerDocuments, PackingRule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

# Padding is documents too, of at most so many tokens: attention over them takes a small part of the time of their MLP.
PADDING_TOKENS = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Rows of at most `seq_len` tokens, and the pieces in each."""

    seq_len: int
    starts: Integers  # [pieces], row by row: position of a piece's first token among all tokens
    lengths: Integers  # [pieces]
    ends: NDArray[np.bool_]  # [pieces]: it ends its document, so its last token has no label
    bounds: Integers  # [rows + 1]: the first piece of each row
    dropped_documents: int  # longer than a row
    dropped_tokens: int
    documents: int  # that have pieces

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def row(self, number: int) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """`starts`, `lengths` and `ends` of the pieces of a row."""
        pieces = slice(self.bounds[number], self.bounds[number + 1])
        return self.starts[pieces], self.lengths[pieces], self.ends[pieces]

    @cached_property
    def tokens(self) -> Integers:
        """[rows]: tokens of documents."""
        return np.add.reduceat(self.lengths, self.bounds[:-1]) if len(self) else np.zeros(0, np.int64)

    def pairs(self, window: int = 0) -> Integers:
        """[rows]: (query, key) pairs that causal attention inside the documents shows, without those of padding. A
        query sees at most `window` tokens, itself among them; 0: all before it."""
        seen = pairs_of_whole(self.lengths, Work(left=window - 1 if window else None))
        return np.add.reduceat(seen, self.bounds[:-1]) if len(self) else np.zeros(0, np.int64)

    @property
    def padding(self) -> float:
        """The part of all rows that is padding."""
        return 1 - int(self.tokens.sum()) / (len(self) * self.seq_len) if len(self) else 0.0

    @property
    def words(self) -> str:
        """A sentence about the rows."""
        dropped = ""
        if self.dropped_documents:
            dropped = f"; {self.dropped_documents:,} longer documents are dropped ({self.dropped_tokens:,} tokens)"
        pieces = f" ({len(self.lengths):,} pieces)" if len(self.lengths) > self.documents else ""
        return (
            f"{self.documents:,} documents{pieces} in {len(self):,} rows of {self.seq_len:,} tokens, "
            f"{self.padding:.1%} of them padding{dropped}"
        )


def pack(
    starts: Integers,
    lengths: Integers,
    seq_len: int,
    *,
    rule: PackingRule = "best_fit",
    longer: LongerDocuments = "split",
    seed: int = 0,
) -> Packing:
    """Pack documents, given by their first positions and lengths, into rows of `seq_len` tokens.

    Args:
        rule: `greedy` takes documents in an order drawn from `seed` and begins a row where the next one does not fit.
            `best_fit` takes the longest first, each into the row that it leaves the least free.
        longer: a document of more than `seq_len` tokens is `split` into pieces of that length and a rest, or left out
            (`drop`). A piece's tokens do not see the piece before; its last token still has the next one as its label.

    Pieces of one token that end their document have no label and are left out. The order of rows is drawn from `seed`.
    """
    starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    is_longer = lengths > seq_len
    dropped = longer == "drop"
    dropped_documents, dropped_tokens = 0, 0
    if dropped and is_longer.any():
        dropped_documents, dropped_tokens = int(is_longer.sum()), int(lengths[is_longer].sum())
        starts, lengths = starts[~is_longer], lengths[~is_longer]
    documents = int((lengths > 1).sum())
    starts, lengths, ends = _pieces(starts, lengths, seq_len)
    order = shuffled(len(lengths), seed)
    starts, lengths, ends = starts[order], lengths[order], ends[order]
    if rule == "greedy":
        order, bounds = np.arange(len(lengths)), _next_fit(lengths, seq_len)
    else:
        order, bounds = _best_fit(lengths, seq_len)
    rows = shuffled(len(bounds) - 1, seed + 1)
    sizes = np.diff(bounds)[rows]
    places = _concatenated_ranges(bounds[:-1][rows], sizes)
    order = order[places]
    return Packing(
        seq_len=seq_len,
        starts=starts[order],
        lengths=lengths[order],
        ends=ends[order],
        bounds=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        dropped_documents=dropped_documents,
        dropped_tokens=dropped_tokens,
        documents=documents,
    )


def shuffled(count: int, seed: int) -> Integers:
    """0 to `count` - 1 in an order that depends on `seed` alone.

    They are sorted by a hash (splitmix64, Steele and others, 2014): a generator's shuffle differs between versions of
    numpy.
    """
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed % (1 << 64)) * np.uint64(0xD1B54A32D192ED03)
        x = x * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return np.argsort(x, kind="stable").astype(np.int64)


def padding_lengths(tokens: int) -> list[int]:
    """Lengths of the documents that so much padding is."""
    whole, rest = divmod(tokens, PADDING_TOKENS)
    return [PADDING_TOKENS] * whole + ([rest] if rest else [])


def positions_of(lengths: Integers) -> Integers:
    """Position of each token of a row inside its document: 0 to n - 1 for each of the lengths."""
    return _concatenated_ranges(np.zeros_like(lengths), lengths)


def _pieces(starts: Integers, lengths: Integers, seq_len: int) -> tuple[Integers, Integers, NDArray[np.bool_]]:
    """Starts, lengths and ends of all pieces that have a label, in the order of the documents."""
    counts = -(-lengths // seq_len)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    number = np.arange(int(counts.sum())) - first  # of a piece in its document
    of_starts, of_lengths = np.repeat(starts, counts), np.repeat(lengths, counts)
    piece_lengths = np.minimum(seq_len, of_lengths - number * seq_len)
    ends = number == np.repeat(counts, counts) - 1
    kept = ~ends | (piece_lengths > 1)
    return (of_starts + number * seq_len)[kept], piece_lengths[kept], ends[kept]


def _next_fit(lengths: Integers, seq_len: int) -> Integers:
    """First pieces of the rows, and their number at the end."""
    passed = np.cumsum(lengths)
    bounds, done = [0], 0
    while bounds[-1] < len(lengths):
        following = int(np.searchsorted(passed, done + seq_len, side="right"))
        done = int(passed[following - 1])
        bounds.append(following)
    return np.array(bounds, np.int64)


def _best_fit(lengths: Integers, seq_len: int) -> tuple[Integers, Integers]:
    """(order of the pieces by row, first places of the rows and their number of pieces at the end)."""
    longest_first = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), np.int64)  # by place in `longest_first`
    free: list[int] = []  # ascending: how many tokens are free, in rows that are not full
    rows_with: dict[int, list[int]] = {}  # rows by free tokens
    rows = 0
    for place, length in enumerate(lengths[longest_first].tolist()):
        at = bisect_left(free, length)
        if at == len(free):
            row, left = rows, seq_len - length
            rows += 1
        else:
            fitting = free[at]
            row, left = rows_with[fitting].pop(), fitting - length
            if not rows_with[fitting]:
                del rows_with[fitting], free[at]
        row_of[place] = row
        if left:
            if left not in rows_with:
                rows_with[left] = []
                insort(free, left)
            rows_with[left].append(row)
    by_row = np.argsort(row_of, kind="stable")
    sizes = np.bincount(row_of, minlength=rows)
    return longest_first[by_row], np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


def _concatenated_ranges(starts: Integers, counts: Integers) -> Integers:
    """start, start + 1, ... of so many numbers for each pair, one after the other."""
    first = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - first, counts)
