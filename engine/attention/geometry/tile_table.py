"""The tiles between many shards at once, in integer arrays.

A mask is a list of disjoint regions in global positions (`Region`). A region and two shards have in common a rectangle
of local queries and local keys, because shards ascend in position, with a band through it. `tile_table` cuts all
regions by all shards, trims the rectangles to what their bands show, and joins what one kernel call can compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.balanced import Balanced
from engine.attention.geometry.layout import Layout
from engine.attention.geometry.shards import ShardSegments
from engine.attention.geometry.tiles import (
    NO_LIMIT,
    Call,
    Integers,
    Tile,
    band_area,
    band_between,
    call_count,
    calls_of,
)

Booleans: TypeAlias = NDArray[np.bool_]

# Kernel calls between two shards, beyond which launching them would take longer than a dense sequence.
MAX_TILES = 4096


class TooManyTiles(ValueError):
    """The mask needs too many kernel calls between two shards to be run under this layout."""


class Region(NamedTuple):
    """Queries at positions [q_start, q_stop) see keys [k_start, k_stop) with -left <= key - query <= right."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    left: int = NO_LIMIT
    right: int = NO_LIMIT


@lru_cache(maxsize=64)
def shards_of(layout: Layout, seq_len: int, cp_size: int) -> ShardSegments:
    """The shards of all ranks."""
    if isinstance(layout, Balanced):
        return layout.shards(seq_len, cp_size)
    return ShardSegments.of(*(layout.segments(seq_len, cp_size, rank) for rank in range(cp_size)))


@dataclass(frozen=True, eq=False)
class TileTable:
    """Tiles of pairs 0 to `pairs` - 1, those of a pair side by side. A limit of `NO_LIMIT` hides nothing."""

    pairs: int
    pair: Integers  # of each tile, ascending
    corners: Integers  # [q_start, q_stop, k_start, k_stop; tiles], local tokens
    lo: Integers  # of the tile's band
    hi: Integers

    @cached_property
    def bounds(self) -> Integers:
        """The tiles of pair i are bounds[i] to bounds[i + 1] - 1."""
        return np.concatenate(([0], np.cumsum(self.counts)))

    @cached_property
    def counts(self) -> Integers:
        """How many tiles each pair has."""
        return np.bincount(self.pair, minlength=self.pairs)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Kinds of band in all tiles."""
        limited = self.lo > -NO_LIMIT
        full, causal = ~limited & (self.hi == NO_LIMIT), ~limited & (self.hi == 0)
        kinds = {"full": full, "causal": causal, "band": ~(full | causal)}
        return frozenset(kind for kind, tiles in kinds.items() if tiles.any())

    def tiles(self, pair: int) -> tuple[Tile, ...]:
        """Those of one pair."""
        own = slice(*self.bounds[pair : pair + 2].tolist())
        q_start, q_stop, k_start, k_stop = self.corners[:, own].tolist()
        queries, keys = map(slice, q_start, q_stop), map(slice, k_start, k_stop)
        bands = map(band_between, self.lo[own].tolist(), self.hi[own].tolist())
        return tuple(map(Tile, queries, keys, bands))

    def calls(self, pair: int) -> tuple[Call, ...]:
        """The kernel calls that compute the tiles of one pair."""
        own = slice(*self.bounds[pair : pair + 2].tolist())
        return calls_of(self.corners[:, own], self.lo[own], self.hi[own]) if own.start < own.stop else ()

    def call_count(self, pair: int) -> int:
        """How many calls those are."""
        own = slice(*self.bounds[pair : pair + 2].tolist())
        return call_count(self.corners[:, own], self.lo[own], self.hi[own])

    @cached_property
    def has_sequences(self) -> bool:
        """The pair with most tiles has fewer calls than tiles."""
        if not len(self.pair):
            return False
        most = int(self.counts.argmax())
        return self.call_count(most) < int(self.counts[most])

    @cached_property
    def areas(self) -> Integers:
        """Visible (query, key) pairs of each pair of shards."""
        top, bottom, left, right = self.corners
        areas = np.zeros(self.pairs, dtype=np.int64)
        np.add.at(areas, self.pair, band_area(bottom - top, right - left, self.lo, self.hi))
        return areas

    def spans(self, queries: bool) -> tuple[Integers, Integers, Booleans]:
        """(start, stop) of the local tokens of one side in the tiles of each pair, (0, 0) without tiles; and whether no
        token is in two of them."""
        start, stop = self.corners[:2] if queries else self.corners[2:]
        first, last = (np.zeros(self.pairs, dtype=np.int64) for _ in range(2))
        apart = np.ones(self.pairs, dtype=bool)
        some = np.flatnonzero(self.counts)
        if len(some):
            first[some] = np.minimum.reduceat(start, self.bounds[some])
            last[some] = np.maximum.reduceat(stop, self.bounds[some])
            pair, same = self.pair, self.pair[1:] == self.pair[:-1]
            if (same & (start[1:] < start[:-1])).any():
                order = np.argsort(pair * (int(start.max()) + 1) + start)
                start, stop = start[order], stop[order]
            apart[pair[1:][same & (stop[:-1] > start[1:])]] = False
        return first, last, apart

    @classmethod
    def joined(cls, tables: list[TileTable]) -> TileTable:
        """The pairs of several tables, one after another."""
        if len(tables) == 1:
            return tables[0]
        firsts = np.cumsum([0] + [table.pairs for table in tables])
        pair = np.concatenate([table.pair + first for table, first in zip(tables, firsts, strict=False)])
        corners = np.concatenate([table.corners for table in tables], axis=1)
        lo, hi = (np.concatenate([getattr(table, name) for table in tables]) for name in ("lo", "hi"))
        return cls(int(firsts[-1]), pair, corners, lo, hi)


def tile_table(regions: Integers, queries: ShardSegments, keys: ShardSegments, merges: bool = False) -> TileTable:
    """The tiles between each of some shards of queries and each of some shards of keys.

    Args:
        regions: [regions, fields of `Region`].
        queries, keys: pair i is query shard i // len(keys) and key shard i % len(keys).
        merges: regions may touch, and all have one band: those that touch between two shards are merged before the
            band cuts them, so that a kernel call computes as much as it can.

    Raises TooManyTiles when the tiles of a pair are more than `MAX_TILES` calls.
    """
    assert queries.step == keys.step, "layouts have segments of one step"
    found = _local(regions, queries, keys)
    if merges and len(found.pair):
        found = _merged(found)
    shown = _trimmed(found)
    table = _tiles(shown, len(queries) * len(keys))
    if len(table.pair) > MAX_TILES and int(table.counts.max()) > MAX_TILES:
        most = table.call_count(int(table.counts.argmax()))
        if most > MAX_TILES:
            raise TooManyTiles(
                f"the mask leaves {most} rectangles between two shards and {MAX_TILES} is the limit; take larger "
                "blocks, or layout contiguous"
            )
    return table


class _Rectangles(NamedTuple):
    """Rectangles between shards, in local tokens: row i sees key j where lo <= j - i <= hi."""

    pair: Integers
    top: Integers  # rows [top, bottom) are queries
    bottom: Integers
    left: Integers  # columns [left, right) are keys
    right: Integers
    lo: Integers
    hi: Integers
    causal: Integers  # 1 where kernels take what the band shows as full and square causal tiles
    part: Integers  # rectangles of one part have one diagonal, counted in local tokens
    end: Integers  # where the keys of the part end

    def chosen(self, which: Booleans | Integers) -> _Rectangles:
        return _Rectangles(*(each[which] for each in self))


class _Runs(NamedTuple):
    """Local tokens [start, stop) of shards that are in a region, ordered by region, shard and token."""

    region: Integers
    shard: Integers
    start: Integers
    stop: Integers
    position: Integers  # of the first of them
    unit: Integers  # the segment, or the whole shard, that they are a part of
    end: Integers  # local tokens before the end of it

    def followed_by(self, others: _Runs) -> _Runs:
        return _Runs(*map(np.concatenate, zip(self, others, strict=True)))


def _runs(low: Integers, high: Integers, shards: ShardSegments) -> _Runs:
    """The tokens of each segment at positions low[i] <= position < high[i] of region i."""
    step = shards.step
    region, segment = _met(low, high, shards)
    start, count, offset = shards.start[segment], shards.count[segment], shards.offset[segment]
    first = np.maximum(0, -((start - low[region]) // step))
    last = np.minimum(count, -((start - high[region]) // step))
    runs = _Runs(
        region,
        shards.shard[segment],
        offset + first,
        offset + last,
        start + first * step,
        segment + len(shards),
        offset + count,
    )
    some = first < last
    return runs if some.all() else _Runs(*(each[some] for each in runs))


def _met(low: Integers, high: Integers, shards: ShardSegments) -> tuple[Integers, Integers]:
    """Regions, and segments that may have tokens at positions low[i] <= position < high[i] of region i: ordered by
    region and segment."""
    stop = shards.start + (shards.count - 1) * shards.step
    if shards.step > 1:  # segments lie between each other
        region, segment = np.nonzero((low[:, None] <= stop) & (high[:, None] > shards.start))
        return region, segment
    ascending = np.argsort(shards.start, kind="stable")
    first, last = np.searchsorted(stop[ascending], low), np.searchsorted(shards.start[ascending], high)
    counts = np.maximum(0, last - first)
    region = np.repeat(np.arange(len(low)), counts)
    segment = ascending[np.arange(len(region)) + np.repeat(first - (np.cumsum(counts) - counts), counts)]
    order = np.argsort(region * len(stop) + segment, kind="stable")  # nearly in order
    return region, segment[order]


def _of_whole_shards(runs: _Runs, shards: ShardSegments) -> _Runs:
    """The same tokens, those of one shard in a region as one run: local tokens ascend in position."""
    new = np.ones(len(runs.region), dtype=bool)
    new[1:] = (runs.region[1:] != runs.region[:-1]) | (runs.shard[1:] != runs.shard[:-1])
    firsts = np.flatnonzero(new)
    lasts = np.append(firsts[1:], len(new))[: len(firsts)] - 1
    shard = runs.shard[firsts]
    stop, position = runs.stop[lasts], runs.position[firsts]
    return _Runs(runs.region[firsts], shard, runs.start[firsts], stop, position, shard, shards.tokens[shard])


def _crossed(queries: _Runs, keys: _Runs, regions: int) -> tuple[Integers, Integers]:
    """Each run of queries with each run of keys of the same region, as indices of both."""
    counts = np.bincount(keys.region, minlength=regions)
    each = counts[queries.region]
    firsts = (np.cumsum(counts) - counts)[queries.region]
    q = np.repeat(np.arange(len(each)), each)
    return q, np.arange(len(q)) + np.repeat(firsts - (np.cumsum(each) - each), each)


def _numbered(queries: ShardSegments, keys: ShardSegments) -> tuple[Integers, Integers]:
    """A number of each shard of queries and of keys, the same of shards with the same positions."""
    if queries is keys:  # shards share no token
        return (numbers := np.arange(len(queries))), numbers
    known: dict[bytes, int] = {}
    of_queries, of_keys = (
        np.array([known.setdefault(side.bytes_of(shard), len(known)) for shard in range(len(side))])
        for side in (queries, keys)
    )
    return of_queries, of_keys


def _local(regions: Integers, queries: ShardSegments, keys: ShardSegments) -> _Rectangles:
    """The rectangle of each region between each two segments; or between two shards, where no band cuts it or one
    diagonal serves all segments of a shard against itself."""
    left, right = regions[:, 4], regions[:, 5]
    of_queries = _runs(regions[:, 0], regions[:, 1], queries)
    alike = queries is keys and all((regions[:, side] == regions[:, side + 2]).all() for side in (0, 1))
    of_keys = of_queries if alike else _runs(regions[:, 2], regions[:, 3], keys)
    causal, whole = (left >= NO_LIMIT) & (right == 0), (left >= NO_LIMIT) & (right >= NO_LIMIT)
    q, k = _crossed(of_queries, of_keys, len(regions))
    divided = len(q)  # the first ones are between two segments
    if max(len(queries.start) - len(queries), len(keys.start) - len(keys)) > 0:
        q_number, k_number = _numbered(queries, keys)

        def undivided(q: Integers, k: Integers) -> Booleans:
            region, same = of_queries.region[q], q_number[of_queries.shard[q]] == k_number[of_keys.shard[k]]
            return whole[region] | (causal[region] & same)

        last = of_queries.position + (of_queries.stop - of_queries.start - 1) * queries.step
        seen = of_keys.position[k] <= (last + right[of_queries.region])[q]  # the others are cut off in any case
        between_segments = seen & ~undivided(q, k)
        q, k = q[between_segments], k[between_segments]
        divided = len(q)
        q_base, k_base = len(of_queries.region), len(of_keys.region)
        shards_of_queries = _of_whole_shards(of_queries, queries)
        shards_of_keys = shards_of_queries if alike else _of_whole_shards(of_keys, keys)
        of_queries = of_queries.followed_by(shards_of_queries)
        of_keys = of_queries if alike else of_keys.followed_by(shards_of_keys)
        if alike and not whole.any():  # each shard with itself
            more_q = more_k = q_base + np.flatnonzero(causal[shards_of_queries.region])
        else:
            more_q, more_k = _crossed(shards_of_queries, shards_of_keys, len(regions))
            more_q, more_k = more_q + q_base, more_k + k_base
            between_shards = undivided(more_q, more_k)
            more_q, more_k = more_q[between_shards], more_k[between_shards]
        q, k = np.concatenate((q, more_q)), np.concatenate((k, more_k))
    region, top, first = of_queries.region[q], of_queries.start[q], of_keys.start[k]
    distance = of_keys.position[k] - of_queries.position[q]
    lo, hi = np.full(len(q), -NO_LIMIT), np.full(len(q), NO_LIMIT)
    if (left < NO_LIMIT).any():
        limits = first - top - (left[region] + distance) // queries.step
        lo = np.where(left[region] < NO_LIMIT, limits, lo)
    if (right < NO_LIMIT).any():
        limits = first - top + (right[region] - distance) // queries.step
        hi = np.where(right[region] < NO_LIMIT, limits, hi)
        hi[divided:] = np.where(causal[region[divided:]], 0, NO_LIMIT)
    pair = of_queries.shard[q] * len(keys) + of_keys.shard[k]
    units = max(len(queries) + len(queries.start), len(keys) + len(keys.start))
    part = of_queries.unit[q] * units + of_keys.unit[k]
    return _Rectangles(
        pair,
        top,
        of_queries.stop[q],
        first,
        of_keys.stop[k],
        lo,
        hi,
        causal.astype(np.int64)[region],
        part,
        of_keys.end[k],
    )


def _merged(found: _Rectangles) -> _Rectangles:
    """Few rectangles with the same visible pairs: swept along the queries, or along the keys where that gives fewer.

    Keys that the diagonal hides may be in a rectangle: a run of keys that the diagonal ends goes on to the end.
    """
    parts, first, part = np.unique(found.part, return_index=True, return_inverse=True)
    of_part = found.chosen(first)
    by_rows = _swept(part, found.top, found.bottom, found.left, found.right, of_part)
    sideways = _swept(by_rows[0], *by_rows[3:], *by_rows[1:3])
    by_columns = np.stack((sideways[0], *sideways[3:], *sideways[1:3]))
    counts = [np.bincount(each[0], minlength=len(parts)) for each in (by_rows, by_columns)]
    fewer = counts[1] < counts[0]
    part, top, bottom, left, right = np.concatenate(
        (by_rows[:, ~fewer[by_rows[0]]], by_columns[:, fewer[by_columns[0]]]), axis=1
    )
    return of_part.chosen(part)._replace(top=top, bottom=bottom, left=left, right=right)


def _swept(
    part: Integers,
    top: Integers,
    bottom: Integers,
    left: Integers,
    right: Integers,
    under: _Rectangles | None = None,
) -> Integers:
    """Disjoint rectangles of each part, cut into strips at each other's edges, joined along a strip, and extended
    downwards while the same run stays: [part, top, bottom, left, right; rectangles].

    `under` has the diagonal of each part, and the end of its keys.
    """
    width = int(bottom.max(initial=0)) + 1
    low, high = part * width + top, part * width + bottom
    cuts = np.unique(np.concatenate((low, high)))
    first, last = np.searchsorted(cuts, low), np.searchsorted(cuts, high)
    count = last - first
    source = np.repeat(np.arange(len(part)), count)
    strip = np.arange(len(source)) + np.repeat(first - (np.cumsum(count) - count), count)
    part, left, right = part[source], left[source], right[source]
    if under is not None:
        future = cuts[strip + 1] - part * width + under.hi[part]  # first key that no query of the strip sees
        right = np.where(right >= np.minimum(future, under.end[part]), under.end[part], right)
        seen = left < future
        part, strip, left, right = part[seen], strip[seen], left[seen], right[seen]
    order = np.lexsort((left, strip))
    part, strip, left, right = part[order], strip[order], left[order], right[order]
    firsts, lasts = _groups((strip[1:] == strip[:-1]) & (left[1:] == right[:-1]), len(strip))
    part, strip, left, right = part[firsts], strip[firsts], left[firsts], right[lasts]
    order = np.lexsort((strip, right, left, part))
    part, strip, left, right = part[order], strip[order], left[order], right[order]
    same = (part[1:] == part[:-1]) & (left[1:] == left[:-1]) & (right[1:] == right[:-1])
    firsts, lasts = _groups(same & (strip[1:] == strip[:-1] + 1), len(strip))
    part = part[firsts]
    found = np.stack(
        (part, cuts[strip[firsts]] - part * width, cuts[strip[lasts] + 1] - part * width, left[firsts], right[firsts])
    )
    return found[:, np.lexsort((found[3], found[1], found[0]))]


def _groups(with_previous: Booleans, count: int) -> tuple[Integers, Integers]:
    """The first and the last element of each group, where each but the first of them belongs with the one before."""
    new = np.ones(count, dtype=bool)
    new[1:] = ~with_previous
    firsts = np.flatnonzero(new)
    return firsts, np.append(firsts[1:], count)[: len(firsts)] - 1


def _trimmed(found: _Rectangles) -> _Rectangles:
    """Rectangles of which every row and every column sees something; limits that hide nothing are `NO_LIMIT`."""
    top = np.maximum(found.top, found.left - found.hi)
    bottom = np.minimum(found.bottom, found.right - found.lo)
    left, right = np.maximum(found.left, top + found.lo), np.minimum(found.right, bottom + found.hi)
    some = (top < bottom) & (left < right) & (found.lo <= found.hi)
    lo = np.where(found.lo <= left - bottom + 1, -NO_LIMIT, found.lo)
    hi = np.where(found.hi >= right - top - 1, NO_LIMIT, found.hi)
    found = found._replace(top=top, bottom=bottom, left=left, right=right, lo=lo, hi=hi)
    return found if some.all() else found.chosen(some)


def _tiles(shown: _Rectangles, pairs: int) -> TileTable:
    """Trimmed rectangles as tiles: those under a causal diagonal become full and square causal ones, and full ones that
    share a whole edge become one. Every kernel knows a square causal tile; they place the diagonal of an oblong one
    differently."""
    pair, top, bottom, left, right, lo, hi = shown[:7]
    past = np.clip(hi + top - left, 0, right - left)  # columns that the diagonal shows to every row
    no_lo, no_hi = lo == -NO_LIMIT, hi == NO_LIMIT
    cut = no_lo & ~no_hi & ((shown.causal > 0) | (past == 0))
    middle, corner = top + (right - left - past), left + past  # the end of the square's rows, its first column
    whole, over, below = no_lo & no_hi, cut & (past > 0), cut & (middle < bottom)
    full = _columns((pair, top, bottom, left, right), whole)
    if over.any() or below.any():
        over_and_below = (
            _columns((pair, top, bottom, left, corner), over),
            _columns((pair, middle, bottom, corner, right), below),
        )
        full = np.concatenate((full, *over_and_below), axis=1)
    full = _joined(full)
    squares = _columns((pair, top, middle, corner, right), cut)
    rest = ~cut & ~whole
    bands = _columns((pair, top, bottom, left, right), rest)
    tiles = np.concatenate((full, squares, bands), axis=1)
    shift = (top - left)[rest]  # limits are counted from the tile's corner
    unlimited, zero = np.full(full.shape[1], NO_LIMIT), np.zeros(squares.shape[1], dtype=np.int64)
    lo = np.concatenate((-unlimited, zero - NO_LIMIT, np.where(no_lo[rest], -NO_LIMIT, lo[rest] + shift)))
    hi = np.concatenate((unlimited, zero, np.where(no_hi[rest], NO_LIMIT, hi[rest] + shift)))
    order = np.argsort(tiles[0], kind="stable")
    tiles = tiles[:, order]
    return TileTable(pairs, tiles[0], tiles[1:], lo[order], hi[order])


def _columns(rows: Sequence[Integers], which: Booleans) -> Integers:
    """Those elements of each row, [rows, elements]."""
    at = np.flatnonzero(which)
    return np.stack([row[at] for row in rows])


def _joined(full: Integers) -> Integers:
    """Full tiles [pair and corners; tiles] of which those that share a whole edge are one: along the keys, then along
    the queries. One large kernel call is faster than two small ones."""
    width = int(full[1:].max(initial=0)) + 1
    for first, along in ((1, 3), (3, 1)):
        # Tiles share no pair of tokens, so those that begin at one edge are in order without their other ends.
        full = full[:, np.argsort((full[0] * width + full[first]) * width + full[along])]
        same = (full[along, 1:] == full[along + 1, :-1]) & (full[0, 1:] == full[0, :-1])
        same &= (full[first, 1:] == full[first, :-1]) & (full[first + 1, 1:] == full[first + 1, :-1])
        if same.any():
            firsts, lasts = _groups(same, full.shape[1])
            stops = full[along + 1, lasts]
            full = full[:, firsts]
            full[along + 1] = stops
    return full


def region_areas(regions: Integers, shards: ShardSegments) -> Integers:
    """Keys of the whole sequence that the queries of each shard see, summed over the queries."""
    k_start, k_stop, left, right = regions[:, 2:].T
    runs = _runs(regions[:, 0], regions[:, 1], shards)
    region = runs.region
    before = runs.position - k_start[region]  # keys of the region in front of the first query
    areas = np.zeros(len(shards), dtype=np.int64)
    columns = (k_stop - k_start)[region]
    seen = band_area(runs.stop - runs.start, columns, before - left[region], before + right[region], shards.step)
    np.add.at(areas, runs.shard, seen)
    return areas


def outermost_spans(regions: Integers, shards: ShardSegments, enough: int) -> tuple[Integers, Integers] | None:
    """The spans of all pairs of shards, without their tiles: [start and stop; pairs] of queries, and of keys.

    Where regions ascend, the first and the last of those that a pair sees decide. None where regions do not, where some
    pair might see no more than `enough` of them or have more than `MAX_TILES` tiles, and where a shard has several
    segments.
    """
    ascend = bool((regions[1:, [0, 2]] >= regions[:-1, [1, 3]]).all())
    if not ascend or 3 * len(regions) > MAX_TILES or len(shards.start) > len(shards):
        return None
    pairs = len(shards) ** 2
    spans, seen = np.zeros((2, 2, pairs), dtype=np.int64), np.zeros(pairs, dtype=np.int64)
    for end, ordered in enumerate((regions, regions[::-1])):
        known, at, size = np.zeros(pairs, dtype=bool), 0, 1 if end else enough + 2
        while not (known.all() and (seen > enough).all()):
            if at >= len(ordered):
                return None
            found = _trimmed(_local(ordered[at : at + size], shards, shards))
            at, size = at + size, 2 * size
            seen += np.bincount(found.pair, minlength=pairs)
            outer = np.full((2, pairs), -1)
            sides = (found.bottom, found.right) if end else (found.top, found.left)
            outer[:, found.pair[::-1]] = np.stack(sides)[:, ::-1]  # of several, the first one is kept
            new = ~known & (outer[0] >= 0)
            spans[:, end, new] = outer[:, new]
            known |= new
    return spans[0], spans[1]
