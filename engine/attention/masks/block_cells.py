"""Rectangles between the blocks of many pairs of shards at once, in arrays.

The cells of a pair are its blocks of queries x its blocks of keys that have local tokens. Everything is in the order of
`engine.attention.masks.blocks`, which forms the rectangles of one pair with few blocks, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.shard_table import Integers, ShardTable
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


class Shards(NamedTuple):
    """Segments of several shards, [shards, segments], empty ones last."""

    start: Integers
    count: Integers
    step: int

    def rows_before(self, cuts: Integers) -> Integers:
        """Local tokens of each shard before its global positions `cuts`, [shards, cuts]."""
        rows = np.zeros_like(cuts)
        for start, count in zip(self.start.T[..., None], self.count.T[..., None], strict=True):
            rows += np.clip(-((start - cuts) // self.step), 0, count)
        return rows


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
    q: Shards
    k: Shards
    hi: Integers  # key j is no later than query i when j - i <= hi, both counted in the part
    offsets: Integers  # [parts, 2]: local tokens in front of the part's queries and keys


def parts_of_pairs(shards: ShardTable, q_ranks: Integers, k_ranks: Integers, causal: bool) -> Parts:
    """The parts of each pair that have work. Local order is position order, so that one diagonal serves a shard against
    itself, and none is needed where the mask is not causal."""
    own = np.full(len(q_ranks), not causal)
    own |= ((shards.start[q_ranks] == shards.start[k_ranks]) & (shards.count[q_ranks] == shards.count[k_ranks])).all(1)
    whole, each = np.flatnonzero(own), np.flatnonzero(~own)
    segments = shards.start.shape[1]
    first, second = np.divmod(np.arange(segments * segments), segments)
    each, first, second = np.repeat(each, len(first)), np.tile(first, len(each)), np.tile(second, len(each))
    q, k = q_ranks[each], k_ranks[each]
    hi = (shards.start[q, first] - shards.start[k, second]) // shards.step
    q_count, k_count = shards.count[q, first], shards.count[k, second]
    some = (hi + q_count > 0) & (q_count > 0) & (k_count > 0)
    each, first, second, q, k, hi = (array[some] for array in (each, first, second, q, k, hi))
    hi = np.where(hi >= k_count[some] - 1, NO_LIMIT, hi)
    pair = np.concatenate((whole, each))
    order = np.argsort(pair, kind="stable")

    def side(ranks: Integers, of_part: Integers, segment: Integers) -> Shards:
        alone = np.zeros((2, len(of_part), segments), dtype=np.int64)
        alone[:, :, 0] = shards.start[of_part, segment], shards.count[of_part, segment]
        start, count = (
            np.concatenate((shards.start[ranks[whole]], alone[0])),
            np.concatenate((shards.count[ranks[whole]], alone[1])),
        )
        return Shards(start[order], count[order], shards.step)

    offsets = np.zeros((len(pair), 2), dtype=np.int64)
    offsets[len(whole) :] = np.stack((shards.offset[q, first], shards.offset[k, second]), axis=-1)
    limits = np.concatenate((np.full(len(whole), 0 if causal else NO_LIMIT), hi))
    return Parts(pair[order], side(q_ranks, q, first), side(k_ranks, k, second), limits[order], offsets[order])


def under_diagonal(cells: Cells, queries: BlockRuns, keys: BlockRuns, hi: Integers) -> Cells:
    """Cells [parts, query runs, key runs] without those that the diagonal hides; a run of cells that it cuts goes on to
    the end, where the diagonal hides it anyway."""
    limited = np.flatnonzero(hi < NO_LIMIT)
    if not len(limited):
        return cells
    future = queries.cuts[limited, 1:] + hi[limited, None]  # first key that no query of this row sees
    columns = np.arange(cells.shape[2])
    seen = keys.cuts[limited, None, :-1] < future[..., None]
    last = np.maximum(seen.sum(axis=2) - 1, 0)[..., None]
    cut = np.take_along_axis(cells[limited], last, axis=2) & seen[..., :1]
    cut &= np.take_along_axis(keys.cuts[limited, 1:], last[..., 0], axis=1)[..., None] >= future[..., None]
    under = np.where(seen, cells[limited], cut & (columns < keys.count[limited, None, None]))
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
    kind_of: dict[bytes, int] = {}
    kinds = np.array([kind_of.setdefault(grid.tobytes(), len(kind_of)) for grid in packed])
    first = np.zeros(len(kind_of), dtype=np.int64)
    first[kinds[::-1]] = np.arange(len(cells))[::-1]
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
    return found.chosen(np.lexsort((found.right, found.left, found.bottom, found.top, found.of)))
