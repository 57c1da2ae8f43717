"""Tiles of masks that are decided block by block: few, large, disjoint rectangles between any two shards.

Local tokens are in the order of their positions under every layout, so a block of positions is one run of local indices
whatever the layout, and a run of visible key blocks is one run of local keys. The visible pairs of two shards are then
rectangles with at most one diagonal through them: a sweep over the rows extends a rectangle while the same run of keys
stays visible. Keys above a causal diagonal are hidden by the diagonal, so a rectangle may include them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.layout import Segment
from engine.attention.geometry.shard_table import Integers, ShardTable
from engine.attention.geometry.tiles import Tile, band_area, join, trim, without_upper_bands
from engine.attention.masks.mask import PairSpans

# A kernel call per tile: beyond this many between two shards, launching them would take longer than a dense sequence.
MAX_TILES = 4096
_FEW_RECTANGLES = 256  # up to so many are also formed column by column
_FEW_CELLS = 256  # up to so many pairs of blocks are looked at one by one

Run = tuple[int, int]  # [start, stop)


class TooManyTiles(ValueError):
    """The mask has too many rectangles between two shards to be run under this layout."""


class BlockRun(NamedTuple):
    """Local tokens [start, stop) of one shard are in `block`."""

    block: int
    start: int
    stop: int


class Rectangle(NamedTuple):
    """Rows [top, bottom) x columns [left, right)."""

    top: int
    bottom: int
    left: int
    right: int


class BlockMask:
    """A mask that shows whole blocks of keys to whole blocks of queries, with `causal` only those not in the future.

    Blocks are consecutive runs of positions, numbered from 0, of any lengths.
    """

    causal: bool
    band_kinds = frozenset({"full", "causal"})

    def pair_keys(self, shards: ShardTable) -> Integers | None:
        """Under striped shards, whose ranks mostly have runs of equal lengths: those lengths, and which rank is
        first."""
        if shards.step == 1:
            return None
        blocks = self.block_at(int((shards.start + (shards.count - 1) * shards.step).max())) + 1
        if blocks > MAX_TILES:
            return None
        firsts = np.array([self.first_position(block) for block in range(blocks + 1)])
        ranks, cuts = np.broadcast_arrays(np.arange(len(shards.segments))[:, None], firsts)
        runs = shards.rows_before(ranks, cuts)
        kind_of: dict[bytes, int] = {}
        kinds = np.array([kind_of.setdefault(of_rank.tobytes(), len(kind_of)) for of_rank in runs])
        queries, keys = np.broadcast_arrays(kinds.reshape(-1, 1), kinds.reshape(1, -1))
        # The diagonal of a rank with itself is that with the ranks before it.
        later = self.causal & (shards.start[:, None, 0] < shards.start[None, :, 0])
        return np.stack((queries, keys, later), axis=-1)

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
        """Whether each of these query blocks sees each of these key blocks, but for `causal`: [queries, keys]."""
        raise NotImplementedError

    def keys_seen(self, seq_len: int) -> tuple[tuple[int, int], ...]:
        """For each query block: keys that all its queries see, and keys of its own that a causal mask shows in
        part."""
        blocks = self.block_at(seq_len - 1) + 1
        starts = [*(self.first_position(block) for block in range(blocks)), seq_len]
        seen = []
        for block in range(blocks):
            limit = block if self.causal else blocks
            whole = sum(starts[last] - starts[first] for first, last in self.visible(block, 0, limit))
            own = self.causal and any(self.visible(block, block, block + 1))
            seen.append((whole, starts[block + 1] - starts[block] if own else 0))
        return tuple(seen)

    def tiles(self, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> tuple[Tile, ...]:
        """Work of the shard `q` against the shard `k`. Raises TooManyTiles when there are too many of them."""
        tiles = join([tile for pair in _segment_pairs(q, k, self.causal) for tile in _pair_tiles(self, pair)])
        if len(tiles) > MAX_TILES:
            raise TooManyTiles(
                f"the mask leaves {len(tiles)} rectangles between two shards and {MAX_TILES} is the "
                "limit; take larger blocks, or layout contiguous"
            )
        return tuple(tiles)

    def row_area(self, queries: Segment, seq_len: int) -> int:
        """Keys of the whole sequence that these queries see, summed over the queries."""
        keys = _keys_seen(self, seq_len)
        area = 0
        for block, start, stop in self.local_blocks((queries,)):
            whole, own = keys[block]
            area += (stop - start) * whole
            if own:  # the keys of the queries' own block, under the diagonal
                position = queries.start + start * queries.step - self.first_position(block)
                area += band_area(stop - start, own, None, position, queries.step)
        return area

    def area(self, seq_len: int) -> int:
        """Visible (query, key) pairs of a whole sequence, exactly. Raises ValueError with `unsupported_reason`."""
        unsupported_reason = self.unsupported_reason(seq_len)
        if unsupported_reason:
            raise ValueError(unsupported_reason)
        return self.row_area(Segment(0, seq_len), seq_len)

    def local_blocks(self, segments: tuple[Segment, ...]) -> list[BlockRun]:
        """The local tokens of some segments, by block."""
        runs: list[BlockRun] = []
        offset = 0
        for segment in segments:
            index = 0
            while index < segment.count:
                block = self.block_at(segment.start + index * segment.step)
                end = self.first_position(block + 1)
                stop = min(segment.count, -((segment.start - end) // segment.step))  # tokens before the block's end
                if runs and runs[-1].block == block:
                    runs[-1] = runs[-1]._replace(stop=offset + stop)
                else:
                    runs.append(BlockRun(block, offset + index, offset + stop))
                index = stop
            offset += segment.count
        return runs


@lru_cache(maxsize=64)
def _keys_seen(mask: BlockMask, seq_len: int) -> tuple[tuple[int, int], ...]:
    return mask.keys_seen(seq_len)


@lru_cache(maxsize=1024)
def _local_blocks(mask: BlockMask, segments: tuple[Segment, ...]) -> list[BlockRun]:
    return mask.local_blocks(segments)


@dataclass(frozen=True, slots=True)
class _SegmentPair:
    """Segments of a query shard and segments of a key shard with one causal limit for all of them."""

    q: tuple[Segment, ...]
    k: tuple[Segment, ...]
    q_offset: int  # of the segments in their shards, local tokens
    k_offset: int
    hi: int | None  # key j is no later than query i when j - i <= hi, both counted in the segments; None: always


def _segment_pairs(q: tuple[Segment, ...], k: tuple[Segment, ...], causal: bool) -> Iterator[_SegmentPair]:
    if not causal:
        yield _SegmentPair(q, k, 0, 0, None)
        return
    if q == k:  # local order is position order
        yield _SegmentPair(q, k, 0, 0, 0)
        return
    q_offsets = itertools.accumulate((segment.count for segment in q), initial=0)
    for q_segment, q_offset in zip(q, q_offsets, strict=False):
        k_offsets = itertools.accumulate((segment.count for segment in k), initial=0)
        for k_segment, k_offset in zip(k, k_offsets, strict=False):
            assert q_segment.step == k_segment.step, "layouts have segments of one step"
            hi: int | None = (q_segment.start - k_segment.start) // q_segment.step
            assert hi is not None
            if hi + q_segment.count <= 0:
                continue  # every key is in the future
            if hi >= k_segment.count - 1:
                hi = None  # every key is in the past
            yield _SegmentPair((q_segment,), (k_segment,), q_offset, k_offset, hi)


def _pair_tiles(mask: BlockMask, pair: _SegmentPair) -> Iterator[Tile]:
    hi = pair.hi
    queries, keys = _local_blocks(mask, pair.q), _local_blocks(mask, pair.k)
    many = len(queries) * len(keys) > _FEW_CELLS
    found = _rectangles_in_arrays(mask, pair) if many else rectangles(_visible_rows(mask, pair))
    for top, bottom, left, right in found:
        tile = trim(bottom - top, right - left, None, None if hi is None else hi + top - left)
        if tile is not None:
            yield from without_upper_bands(tile.shifted(pair.q_offset + top, pair.k_offset + left))


def _visible_rows(mask: BlockMask, pair: _SegmentPair) -> list[tuple[int, int, list[Run]]]:
    """(first query, last query, runs of visible keys), in the pair's own indices."""
    keys = _local_blocks(mask, pair.k)
    if not keys:
        return []
    blocks, columns = [run.block for run in keys], keys[-1].stop
    stretches = list(_stretches(blocks))  # no block between them is asked for
    rows = []
    for queries in _local_blocks(mask, pair.q):
        runs: list[Run] = []
        for first, last in itertools.chain.from_iterable(mask.visible(queries.block, *each) for each in stretches):
            start, stop = bisect_left(blocks, first), bisect_left(blocks, last)
            if start == stop:
                continue  # none of these blocks has a token in this shard
            run = keys[start].start, keys[stop - 1].stop
            if pair.hi is not None:
                future = queries.stop + pair.hi  # first key that no query of this row sees
                if run[0] >= future:
                    break
                run = (run[0], columns) if run[1] >= future else run
            if runs and runs[-1][1] == run[0]:
                run = (runs.pop()[0], run[1])
            runs.append(run)
        rows.append((queries.start, queries.stop, runs))
    return rows


def _stretches(blocks: list[int]) -> Iterator[Run]:
    """Runs of ascending blocks that follow one another."""
    start = before = blocks[0]
    for block in blocks[1:]:
        if block != before + 1:
            yield start, before + 1
            start = block
        before = block
    yield start, before + 1


def rectangles(rows: Sequence[tuple[int, int, list[Run]]]) -> list[Rectangle]:
    """Few disjoint rectangles that cover exactly the given runs of each row; rows are ascending and touch."""
    by_rows = _sweep(rows)
    if not 1 < len(by_rows) <= _FEW_RECTANGLES:
        return by_rows
    by_columns = [Rectangle(r.left, r.right, r.top, r.bottom) for r in _sweep(_transposed(by_rows))]
    return min(by_rows, by_columns, key=len)


def _sweep(rows: Sequence[tuple[int, int, list[Run]]]) -> list[Rectangle]:
    """Rectangles extended downwards while the same run stays visible."""
    done: list[Rectangle] = []
    growing: dict[Run, int] = {}  # run -> its top row
    for top, _, runs in rows:
        ended = growing.keys() - runs
        done.extend(Rectangle(growing.pop(run), top, *run) for run in sorted(ended))
        for run in runs:
            growing.setdefault(run, top)
    done.extend(Rectangle(top, rows[-1][1], *run) for run, top in growing.items())
    return sorted(done)


def _transposed(found: list[Rectangle]) -> list[tuple[int, int, list[Run]]]:
    """The same area, column by column."""
    cuts = sorted({cut for r in found for cut in (r.left, r.right)})
    place = {cut: index for index, cut in enumerate(cuts)}
    columns: list[tuple[int, int, list[Run]]] = [(left, right, []) for left, right in itertools.pairwise(cuts)]
    for r in found:  # ascending in `top`
        for _, _, runs in columns[place[r.left] : place[r.right]]:
            runs.append((runs.pop()[0], r.bottom) if runs and runs[-1][1] == r.top else (r.top, r.bottom))
    return columns


def _rectangles_in_arrays(mask: BlockMask, pair: _SegmentPair) -> list[Rectangle]:
    """`rectangles(_visible_rows(mask, pair))` where there are many blocks."""
    queries, keys = (np.array(_local_blocks(mask, segments)) for segments in (pair.q, pair.k))
    shown = mask.shown(queries[:, 0], keys[:, 0])
    if pair.hi is not None:
        rows, first, last = _runs_of_rows(shown)
        future = queries[rows, 2] + pair.hi  # first key that no query of this row sees
        seen, to_the_end = keys[first, 1] < future, keys[last, 2] >= future
        rows, first, last = rows[seen], first[seen], np.where(to_the_end, len(keys) - 1, last)[seen]
        steps = np.zeros((len(queries), len(keys) + 1), dtype=np.int8)
        steps[rows, first] += 1
        steps[rows, last + 1] -= 1
        shown = steps[:, :-1].cumsum(axis=1) > 0
    cuts = [np.append(blocks[:, 1], blocks[-1, 2]) for blocks in (queries, keys)]
    return list(_fewest(shown.tobytes(), *(each.tobytes() for each in cuts)))


@lru_cache(maxsize=16)
def _fewest(cells: bytes, *cuts_of_sides: bytes) -> list[Rectangle]:
    """Few rectangles that cover the visible cells between the cuts of rows and columns: pairs of ranks whose diagonals
    differ have them in common."""
    cuts = [np.frombuffer(each, dtype=np.int64) for each in cuts_of_sides]
    shown = np.frombuffer(cells, dtype=bool).reshape(len(cuts[0]) - 1, -1)
    by_rows = _sweep_arrays(shown, *cuts)
    if len(by_rows) > _FEW_RECTANGLES:
        return by_rows
    by_columns = [Rectangle(r.left, r.right, r.top, r.bottom) for r in _sweep_arrays(shown.T, *reversed(cuts))]
    return min(by_rows, by_columns, key=len)


def _runs_of_rows(shown: NDArray[np.bool_]) -> tuple[Integers, Integers, Integers]:
    """(row, first column, last column) of each run of visible cells."""
    rows, columns = shown.shape
    framed = np.zeros((rows, columns + 2), dtype=bool)
    framed[:, 1:-1] = shown
    edges = np.flatnonzero(framed[:, 1:] != framed[:, :-1])  # where a run starts, and behind its end, in turn
    row, first = np.divmod(edges[::2], columns + 1)
    return row, first, edges[1::2] - row * (columns + 1) - 1


def _sweep_arrays(shown: NDArray[np.bool_], row_cuts: Integers, column_cuts: Integers) -> list[Rectangle]:
    """`_sweep` of a grid of cells between these cuts."""
    (rows, columns), (row, first, last) = shown.shape, _runs_of_rows(shown)
    ends = np.full((columns, rows + 2), -1, dtype=np.int32)  # by first column and row: where a run ends that starts
    ends[first, row + 1] = last  # there, between rows without any
    changes = np.flatnonzero(ends[:, 1:] != ends[:, :-1])
    column, top = np.divmod(changes, rows + 1)  # the run in row `top` starts there, or is another than the one before
    end = ends[column, top + 1]
    bottom = np.append(changes[1:] - column[:-1] * (rows + 1), 0)  # the next change is the end of each
    run = end >= 0
    found = zip(
        row_cuts[top[run]].tolist(),
        row_cuts[bottom[run]].tolist(),
        column_cuts[column[run]].tolist(),
        column_cuts[end[run] + 1].tolist(),
        strict=True,
    )
    return sorted(map(Rectangle._make, found))
