"""Rectangles between the blocks of one pair of shards, row by row: for few blocks, where arrays take longer.

A row is a block of queries that has local tokens. Everything is in the order of `engine.attention.masks.block_cells`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from engine.attention.geometry.layout import Segment
from engine.attention.geometry.tiles import Tile, join, trim, without_upper_bands
from engine.attention.masks.block_cells import FEW_RECTANGLES

if TYPE_CHECKING:
    from engine.attention.masks.blocks import BlockMask

Run = tuple[int, int]  # [start, stop)


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


def tiles_by_rows(mask: BlockMask, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> tuple[Tile, ...]:
    """Work of the shard `q` against the shard `k`."""
    return tuple(join([tile for pair in _segment_pairs(q, k, mask.causal) for tile in _pair_tiles(mask, pair)]))


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
    for top, bottom, left, right in rectangles(_visible_rows(mask, pair)):
        tile = trim(bottom - top, right - left, None, None if hi is None else hi + top - left)
        if tile is not None:
            yield from without_upper_bands(tile.shifted(pair.q_offset + top, pair.k_offset + left))


def _visible_rows(mask: BlockMask, pair: _SegmentPair) -> list[tuple[int, int, list[Run]]]:
    """(first query, last query, runs of visible keys), in the pair's own indices."""
    keys = _local_blocks(mask, pair.k)
    if not keys:
        return []
    blocks, columns = [run.block for run in keys], keys[-1].stop
    held = list(_consecutive(blocks))  # the pattern is not asked about blocks without a local key
    rows = []
    for queries in _local_blocks(mask, pair.q):
        runs: list[Run] = []
        for first, last in itertools.chain.from_iterable(mask.visible(queries.block, *each) for each in held):
            start = bisect_left(blocks, first)  # the blocks up to `last` follow it: only held ones are asked for
            run = keys[start].start, keys[start + last - first - 1].stop
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


@lru_cache(maxsize=1024)
def _local_blocks(mask: BlockMask, segments: tuple[Segment, ...]) -> list[BlockRun]:
    """The local tokens of some segments, by block."""
    runs: list[BlockRun] = []
    offset = 0
    for segment in segments:
        index = 0
        while index < segment.count:
            block = mask.block_at(segment.start + index * segment.step)
            end = mask.first_position(block + 1)
            stop = min(segment.count, -((segment.start - end) // segment.step))  # tokens before the block's end
            if runs and runs[-1].block == block:
                runs[-1] = runs[-1]._replace(stop=offset + stop)
            else:
                runs.append(BlockRun(block, offset + index, offset + stop))
            index = stop
        offset += segment.count
    return runs


def _consecutive(blocks: list[int]) -> Iterator[Run]:
    """The runs of consecutive numbers among ascending ones."""
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
    if not 1 < len(by_rows) <= FEW_RECTANGLES:
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
