"""Tiles of masks that are decided block by block: few, large, disjoint rectangles between any two shards.

Local tokens are in the order of their positions under every layout, so a block of positions is one run of local indices
whatever the layout, and a run of visible key blocks is one run of local keys. The visible pairs of two shards are then
rectangles with at most one diagonal through them: a sweep over the rows extends a rectangle while the same run of keys
stays visible. Keys above a causal diagonal are hidden by the diagonal, so a rectangle may include them.

The tiles are formed in arrays, of many pairs of shards at once (`engine.attention.masks.block_cells`); or row by row
(`engine.attention.masks.block_rows`) for few pairs with few blocks, as ranks with a few documents have: a pair with
4 x 4 blocks takes 30 us, one with 32 x 32 takes 700; in arrays 500 and 800.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.layout import Segment
from engine.attention.geometry.shard_table import Integers, SegmentTable, ShardTable, numbered, table_of
from engine.attention.geometry.tile_table import TileTable, tile_table
from engine.attention.geometry.tiles import Tile
from engine.attention.masks.block_cells import (
    BlockRuns,
    Rectangles,
    cover,
    pairs_below,
    parts_of_pairs,
    under_diagonal,
)
from engine.attention.masks.block_rows import Run, tiles_by_rows
from engine.attention.masks.mask import PairSpans

# A kernel call per tile: beyond this many between two shards, launching them would take longer than a dense sequence.
MAX_TILES = 4096
_FEW_CELLS = 1000  # up to so many pairs of blocks are looked at row by row,
_CELLS_OF_A_PAIR = 40  # where a pair of shards takes as long as so many of them
_CELLS_AT_ONCE = 1 << 22


class TooManyTiles(ValueError):
    """The mask has too many rectangles between two shards to be run under this layout."""


class BlockMask:
    """A mask that shows whole blocks of keys to whole blocks of queries, with `causal` only those not in the future.

    Blocks are consecutive runs of positions, numbered from 0, of any lengths.
    """

    causal: bool
    band_kinds = frozenset({"full", "causal"})

    def pair_keys(self, shards: ShardTable) -> Sequence[Integers] | None:
        """Under striped shards, whose ranks mostly have runs of equal lengths: those lengths, and which rank is
        first."""
        if shards.step == 1:
            return None
        blocks = self.block_at(int((shards.start + (shards.count - 1) * shards.step).max())) + 1
        if blocks > MAX_TILES:
            return None
        kinds = numbered(shards.rows_before(self.first_positions(np.arange(blocks + 1))[None]))
        queries, keys = np.broadcast_arrays(kinds.reshape(-1, 1), kinds.reshape(1, -1))
        # The diagonal of a rank with itself is that with the ranks before it.
        later = self.causal & (shards.start[:, None, 0] < shards.start[None, :, 0])
        return queries, keys, later.astype(np.int64)

    def pair_spans(self, shards: ShardTable) -> PairSpans | None:
        return None

    def unsupported_reason(self, seq_len: int) -> str | None:
        raise NotImplementedError

    def block_at(self, position: int) -> int:
        """Block that holds this position."""
        raise NotImplementedError

    def first_position(self, block: int) -> int:
        """Position at which a block starts."""
        raise NotImplementedError

    def visible(self, block: int, first: int, last: int) -> Iterator[Run]:
        """Runs of key blocks, ascending and within [first, last), that the queries of `block` see."""
        raise NotImplementedError

    def shown(self, queries: Integers, keys: Integers) -> NDArray[np.bool_]:
        """Whether these query blocks see these key blocks, but for `causal`; the arrays are broadcast."""
        raise NotImplementedError

    def blocks_at(self, positions: Integers) -> Integers:
        """`block_at` of each position."""
        raise NotImplementedError

    def first_positions(self, blocks: Integers) -> Integers:
        """`first_position` of each block."""
        raise NotImplementedError

    def keys_seen(self, seq_len: int) -> tuple[Integers, Integers]:
        """For each query block: keys that all its queries see, and keys of its own that a causal mask shows in
        part."""
        raise NotImplementedError

    def tiles(self, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> tuple[Tile, ...]:
        """Work of the shard `q` against the shard `k`. Raises TooManyTiles when there are too many of them."""
        if q and k and self._many_cells(q, k):
            return self._tile_table(table_of((q, k)), np.array([0]), np.array([1])).tiles(0)
        return tiles_by_rows(self, q, k)

    def _many_cells(self, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> bool:
        """Whether there are so many blocks in two shards that arrays are faster."""
        queries, keys = (
            sum(
                self.block_at(part.start + (part.count - 1) * part.step) - self.block_at(part.start) + 1
                for part in parts
                if part.count
            )
            for parts in (q, k)
        )
        return _CELLS_OF_A_PAIR + queries * keys > _FEW_CELLS

    def tile_table(self, shards: ShardTable, q_ranks: Integers, k_ranks: Integers) -> TileTable | None:
        if len(q_ranks) == 1:
            many = self._many_cells(shards.segments[q_ranks[0]], shards.segments[k_ranks[0]])
        else:
            first, last = (self.blocks_at(at) for at in (shards.start, shards.start + (shards.count - 1) * shards.step))
            blocks = np.where(shards.count > 0, last - first + 1, 0).sum(axis=1)
            many = _CELLS_OF_A_PAIR * len(q_ranks) + (blocks[q_ranks] * blocks[k_ranks]).sum() > _FEW_CELLS
        return self._tile_table(shards, q_ranks, k_ranks) if many else None

    def _tile_table(self, shards: ShardTable, q_ranks: Integers, k_ranks: Integers) -> TileTable:
        parts = parts_of_pairs(shards, q_ranks, k_ranks, self.causal)
        runs, count = self.block_runs(parts.sides), len(parts.pair)
        queries, keys = runs.chosen(slice(count)), runs.chosen(slice(count, None))
        of, top, bottom, left, right = self.rectangles(queries, keys, parts.hi)
        corners = (queries.cuts[of, top], queries.cuts[of, bottom], keys.cuts[of, left], keys.cuts[of, right])
        found = tile_table(len(q_ranks), parts.pair[of], np.stack(corners, axis=-1), parts.hi[of], parts.offsets[of])
        many = found.counts[found.counts > MAX_TILES].tolist()
        if many:
            raise TooManyTiles(
                f"the mask leaves {many[0]} rectangles between two shards and {MAX_TILES} is the "
                "limit; take larger blocks, or layout contiguous"
            )
        return found

    def block_runs(self, shards: SegmentTable) -> BlockRuns:
        """The local tokens of some shards, by block."""
        first = self.blocks_at(shards.start)
        last = self.blocks_at(shards.start + (shards.count - 1) * shards.step)
        last = np.where(shards.count > 0, last, first - 1)
        blocks = first[..., None] + np.arange(int((last - first).max(initial=0)) + 1)
        held = blocks <= last[..., None]
        # One block at the end of a segment and at the start of the next is one run.
        held[:, 1:] &= blocks[:, 1:] > last[:, :-1, None]
        runs = blocks.shape[1] * blocks.shape[2]
        blocks, held = blocks.reshape(len(blocks), runs), held.reshape(len(blocks), runs)
        starts, stops = np.hsplit(shards.rows_before(self.first_positions(np.hstack((blocks, blocks + 1)))), 2)
        held &= stops > starts
        if not held.all():
            order = np.argsort(~held, axis=1, kind="stable")[:, : int(held.sum(axis=1).max(initial=0))]
            blocks, starts = np.take_along_axis(blocks, order, axis=1), np.take_along_axis(starts, order, axis=1)
            held = np.take_along_axis(held, order, axis=1)
        tokens = shards.count.sum(axis=1)[:, None]
        cuts = np.concatenate((np.where(held, starts, tokens), tokens), axis=1)
        return BlockRuns(np.where(held, blocks, 0), cuts, held.sum(axis=1))

    def rectangles(self, queries: BlockRuns, keys: BlockRuns, hi: Integers) -> Rectangles:
        """Few rectangles that cover the visible cells of each part, counted in its runs."""
        rows, columns = queries.blocks.shape[1], keys.blocks.shape[1]
        at_once = max(1, _CELLS_AT_ONCE // max(1, rows * columns))
        found = []
        for start in range(0, len(hi), at_once):
            own = slice(start, start + at_once)
            q, k = queries.chosen(own), keys.chosen(own)
            cells = self.shown(q.blocks[:, :, None], k.blocks[:, None, :]) & q.held[:, :, None] & k.held[:, None, :]
            each = cover(under_diagonal(cells, q, k, hi[own]))
            found.append(each._replace(of=each.of + start))
        return Rectangles.joined(found)

    def row_area(self, queries: Segment, seq_len: int) -> int:
        """Keys of the whole sequence that these queries see, summed over the queries."""
        whole, own = _keys_seen(self, seq_len)
        runs = self.block_runs(SegmentTable(np.array([[queries.start]]), np.array([[queries.count]]), queries.step))
        blocks, first, rows = runs.blocks[0], runs.cuts[0, :-1], np.diff(runs.cuts[0])
        # The keys of the queries' own block, under the diagonal.
        position = queries.start + first * queries.step - self.first_positions(blocks)
        return int((rows * whole[blocks] + pairs_below(rows, own[blocks], position, queries.step)).sum())

    def area(self, seq_len: int) -> int:
        """Visible (query, key) pairs of a whole sequence, exactly. Raises ValueError with `unsupported_reason`."""
        unsupported_reason = self.unsupported_reason(seq_len)
        if unsupported_reason:
            raise ValueError(unsupported_reason)
        return self.row_area(Segment(0, seq_len), seq_len)


@lru_cache(maxsize=64)
def _keys_seen(mask: BlockMask, seq_len: int) -> tuple[Integers, Integers]:
    return mask.keys_seen(seq_len)
