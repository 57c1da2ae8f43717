"""Rectangles between the blocks of many pairs of shards at once, in arrays.

The cells of a pair are its blocks of queries x its blocks of keys that have local tokens. Everything is in the order of
`engine.attention.masks.block_rows`, which forms the rectangles of one pair with few blocks, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.shard_table import Integers, SegmentTable, ShardTable, numbered
from engine.attention.geometry.tile_table import NO_LIMIT

FEW_RECTANGLES = 256  # up to so many are also formed column by column
Cells = NDArray[np.bool_]


class Rectangles(NamedTuple):
    """Rectangles of cells [top, bottom) x [left, right) of several grids, ascending in `of`."""

    of: Integers  # the grid
    top: Integers
    bottom: Integers
    left: Integers
    right: Integers

    def chosen(self, which: NDArray[np.bool_] | Integers) -> Rectangles:
        return Rectangles(*(each[which] for each in self))

    @classmethod
    def joined(cls, parts: Sequence[Rectangles]) -> Rectangles:
        """Those of one after another."""
        if len(parts) == 1:
            return parts[0]
        nothing = cls(*[np.zeros(0, dtype=np.int64)] * 5)
        return cls(*map(np.concatenate, zip(nothing, *parts, strict=True)))


@dataclass(frozen=True, eq=False)
class BlockRuns:
    """Local tokens of several shards by block, [shards, runs]; a shard with fewer runs has empty ones at its end."""

    blocks: Integers
    cuts: Integers  # [shards, runs + 1]: run i is local tokens cuts[i] to cuts[i + 1] - 1
    count: Integers  # runs of each shard

    @property
    def held(self) -> NDArray[np.bool_]:
        """Which runs are a shard's own."""
        return np.arange(self.blocks.shape[1]) < self.count[:, None]

    def chosen(self, which: slice) -> BlockRuns:
        return BlockRuns(self.blocks[which], self.cuts[which], self.count[which])


class Parts(NamedTuple):
    """Pairs of shards, or of their segments, with one causal limit each."""

    pair: Integers  # ascending
    sides: SegmentTable  # the queries of every part, then the keys of every part
    hi: Integers  # key j is no later than query i when j - i <= hi, both counted in the part
    offsets: Integers  # [parts, 2]: local tokens in front of the part's queries and keys


def parts_of_pairs(shards: ShardTable, q_ranks: Integers, k_ranks: Integers, causal: bool) -> Parts:
    """The parts of each pair that have work. Local order is position order, so that one diagonal serves a shard against
    itself, and none is needed where the mask is not causal."""
    ranks = np.stack((q_ranks, k_ranks))
    start, count = shards.start[ranks], shards.count[ranks]  # [2, pairs, segments]
    own = (
        (start[0] == start[1]).all(axis=1) & (count[0] == count[1]).all(axis=1)
        if causal
        else np.full(len(q_ranks), True)
    )
    whole, apart = np.flatnonzero(own), ~own[:, None, None]
    hi = (start[0, :, :, None] - start[1, :, None, :]) // shards.step
    rows, columns = count[0, :, :, None], count[1, :, None, :]
    pair, *segment = np.nonzero(apart & (hi + rows > 0) & (rows > 0) & (columns > 0))
    alone = np.zeros((4, 2, len(pair), start.shape[2]), dtype=np.int64)
    for side in range(2):
        for index, numbers in enumerate((start[side], count[side], shards.offset[ranks[side]])):
            alone[index, side, :, 0] = numbers[pair, segment[side]]
    hi = hi[pair, segment[0], segment[1]]
    hi = np.where(hi >= alone[1, 1, :, 0] - 1, NO_LIMIT, hi)
    start, count = (np.concatenate((each[:, whole], alone[index]), axis=1) for index, each in enumerate((start, count)))
    offsets = np.concatenate((np.zeros((len(whole), 2), dtype=np.int64), alone[2, :, :, 0].T))
    hi = np.concatenate((np.full(len(whole), 0 if causal else NO_LIMIT), hi))
    of_part = np.concatenate((whole, pair))
    if len(whole) and len(pair):
        order = np.argsort(of_part, kind="stable")
        start, count, offsets, hi, of_part = start[:, order], count[:, order], offsets[order], hi[order], of_part[order]
    segments = start.shape[2]
    sides = SegmentTable(start.reshape(-1, segments), count.reshape(-1, segments), shards.step)
    return Parts(of_part, sides, hi, offsets)


def under_diagonal(cells: Cells, queries: BlockRuns, keys: BlockRuns, hi: Integers) -> Cells:
    """Cells [parts, query runs, key runs] without those that the diagonal hides; a run of cells that it cuts goes on to
    the end, where the diagonal hides it anyway."""
    limited = np.flatnonzero(hi < NO_LIMIT)
    if not len(limited):
        return cells
    runs, parts = keys.cuts.shape[1] - 1, np.arange(len(limited))[:, None]
    future = queries.cuts[limited, 1:] + hi[limited, None]  # first key that no query of this row sees
    # The runs of keys that start before it: a search in those of all parts, each part's after the one before.
    far = np.arange(len(limited))[:, None] * (4 * NO_LIMIT)
    starts = (keys.cuts[limited, :-1] + far).reshape(-1)
    seen = np.searchsorted(starts, future + far) - parts * runs
    last = np.maximum(seen - 1, 0)
    cut = np.take_along_axis(cells[limited], last[..., None], axis=2)[..., 0] & (seen > 0)
    cut &= np.take_along_axis(keys.cuts[limited, 1:], last, axis=1) >= future
    columns = np.arange(runs, dtype=np.int32)
    end = np.where(cut, keys.count[limited, None], seen).astype(np.int32)[..., None]
    under = (cells[limited] | (columns >= seen.astype(np.int32)[..., None])) & (columns < end)
    return under if len(limited) == len(cells) else _replaced(cells, limited, under)


def _replaced(cells: Cells, which: Integers, by: Cells) -> Cells:
    cells = cells.copy()
    cells[which] = by
    return cells


def pairs_below(rows: Integers, columns: Integers, limit: Integers, step: int) -> Integers:
    """Pairs (i, j) of rectangles of rows x columns with j - step * i <= limit."""
    # Row i holds clamp(step * i + limit + 1, 0, columns) of them: zero first, then an arithmetic rise, then full rows.
    first = np.clip(-(limit // step), 0, rows)
    full = np.clip(-((limit + 1 - columns) // step), first, rows)
    rising = full - first
    return rising * (step * first + limit + 1) + step * rising * (rising - 1) // 2 + (rows - full) * columns


def cover(cells: Cells) -> Rectangles:
    """Few disjoint rectangles of the true cells of each grid [grids, rows, columns]: swept along the rows, or along the
    columns where those are fewer."""
    packed = np.packbits(cells.reshape(len(cells), -1), axis=1)
    kinds = numbered(packed)
    _, first = np.unique(kinds, return_index=True)
    cells = cells[first]
    by_rows = _sweep(cells)
    counts = np.bincount(by_rows.of, minlength=len(cells))
    asked = np.flatnonzero((counts > 1) & (counts <= FEW_RECTANGLES))
    if len(asked):
        of, left, right, top, bottom = _sweep(cells[asked].swapaxes(1, 2))
        fewer = np.zeros(len(cells), dtype=bool)
        fewer[asked] = np.bincount(of, minlength=len(asked)) < counts[asked]
        taken = Rectangles(asked[of], top, bottom, left, right).chosen(fewer[asked[of]])
        kept = by_rows.chosen(~fewer[by_rows.of])
        found = Rectangles.joined((kept, taken))
        by_rows = found.chosen(np.argsort(found.of, kind="stable"))
    # The rectangles of each kind, for every grid of it.
    bounds = np.searchsorted(by_rows.of, np.arange(len(cells) + 1))
    counts = np.diff(bounds)[kinds]
    of = np.repeat(np.arange(len(kinds)), counts)
    place = np.arange(len(of)) + np.repeat(bounds[kinds] - (np.cumsum(counts) - counts), counts)
    return by_rows.chosen(place)._replace(of=of)


def _sweep(cells: Cells) -> Rectangles:
    """Rectangles extended downwards while the same run stays visible, in the order of their corners."""
    grids, rows, columns = cells.shape
    framed = np.zeros((grids, rows, columns + 2), dtype=bool)
    framed[..., 1:-1] = cells
    edges = np.flatnonzero(framed[..., 1:] != framed[..., :-1])  # where a run starts, and behind its end, in turn
    row, first = np.divmod(edges[::2], columns + 1)
    grid, row_of = np.divmod(row, rows)
    stop = edges[1::2] - row * (columns + 1)
    ends = np.full((grids, columns, rows + 2), -1, dtype=np.int32)  # by first column and row: where a run ends that
    ends[grid, first, row_of + 1] = stop  # starts there, between rows without any
    changes = np.flatnonzero(ends[..., 1:] != ends[..., :-1])
    column, top = np.divmod(changes, rows + 1)  # the run in row `top` starts there, or is another than the one before
    bottom = np.append(changes[1:] - column[:-1] * (rows + 1), 0)  # the next change is the end of each
    grid, left = np.divmod(column, columns)
    right = ends[grid, left, top + 1].astype(np.int64)
    found = Rectangles(grid, top, bottom, left, right).chosen(right >= 0)
    return found.chosen(np.lexsort((found.left, found.bottom, found.top, found.of)))
