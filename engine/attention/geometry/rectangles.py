"""The regions of a mask cut by shards: rectangles of local tokens, many at once in integer arrays.

A region and two shards have in common a rectangle of local queries and local keys, because shards ascend in position,
with a band through it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.shards import ShardSegments
from engine.attention.geometry.tiles import NO_LIMIT, Integers, band_area

Booleans: TypeAlias = NDArray[np.bool_]


class Region(NamedTuple):
    """Queries at positions [q_start, q_stop) see keys [k_start, k_stop) with -left <= key - query <= right."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    left: int = NO_LIMIT
    right: int = NO_LIMIT


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


class Rectangles(NamedTuple):
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

    def chosen(self, which: Booleans | Integers) -> Rectangles:
        return Rectangles(*(each[which] for each in self))


def rectangles_between(regions: Integers, queries: ShardSegments, keys: ShardSegments) -> Rectangles:
    """The rectangle of each region between each two segments; or between two shards, where no band cuts it or one
    diagonal serves all segments of a shard against itself."""
    left, right = regions[:, 4], regions[:, 5]
    causal = (left >= NO_LIMIT) & (right == 0)
    of_queries, of_keys, q, k, divided = _run_pairs(regions, causal, queries, keys)
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
    units = max(len(queries) + len(queries.start), len(keys) + len(keys.start))
    return Rectangles(
        pair=of_queries.shard[q] * len(keys) + of_keys.shard[k],
        top=top,
        bottom=of_queries.stop[q],
        left=first,
        right=of_keys.stop[k],
        lo=lo,
        hi=hi,
        causal=causal.astype(np.int64)[region],
        part=of_queries.unit[q] * units + of_keys.unit[k],
        end=of_keys.end[k],
    )


def _run_pairs(
    regions: Integers, causal: Booleans, queries: ShardSegments, keys: ShardSegments
) -> tuple[_Runs, _Runs, Integers, Integers, int]:
    """Runs of queries, runs of keys, and the pairs of them that form rectangles, as indices of both: first `divided`
    pairs of segments, then pairs of whole shards."""
    of_queries = _runs(regions[:, 0], regions[:, 1], queries)
    alike = queries is keys and all((regions[:, side] == regions[:, side + 2]).all() for side in (0, 1))
    of_keys = of_queries if alike else _runs(regions[:, 2], regions[:, 3], keys)
    q, k = _crossed(of_queries, of_keys, len(regions))
    if len(queries.start) <= len(queries) and len(keys.start) <= len(keys):  # a segment is a whole shard
        return of_queries, of_keys, q, k, len(q)
    left, right = regions[:, 4], regions[:, 5]
    unlimited = (left >= NO_LIMIT) & (right >= NO_LIMIT)
    q_number, k_number = _numbered(queries, keys)

    def undivided(q_runs: _Runs, k_runs: _Runs, q: Integers, k: Integers) -> Booleans:
        region, same = q_runs.region[q], q_number[q_runs.shard[q]] == k_number[k_runs.shard[k]]
        return unlimited[region] | (causal[region] & same)

    last = of_queries.position + (of_queries.stop - of_queries.start - 1) * queries.step
    seen = of_keys.position[k] <= (last + right[of_queries.region])[q]  # the others are cut off in any case
    between_segments = seen & ~undivided(of_queries, of_keys, q, k)
    q, k = q[between_segments], k[between_segments]
    q_shards = _of_whole_shards(of_queries, queries)
    k_shards = q_shards if alike else _of_whole_shards(of_keys, keys)
    if alike and not unlimited.any():  # each shard with itself
        more_q = more_k = np.flatnonzero(causal[q_shards.region])
    else:
        more_q, more_k = _crossed(q_shards, k_shards, len(regions))
        between_shards = undivided(q_shards, k_shards, more_q, more_k)
        more_q, more_k = more_q[between_shards], more_k[between_shards]
    divided = len(q)
    q = np.concatenate((q, more_q + len(of_queries.region)))
    k = np.concatenate((k, more_k + len(of_keys.region)))
    of_queries = of_queries.followed_by(q_shards)
    of_keys = of_queries if alike else of_keys.followed_by(k_shards)
    return of_queries, of_keys, q, k, divided


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
    firsts, lasts = groups(
        (runs.region[1:] == runs.region[:-1]) & (runs.shard[1:] == runs.shard[:-1]), len(runs.region)
    )
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


def merged(found: Rectangles) -> Rectangles:
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
    under: Rectangles | None = None,
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
    firsts, lasts = groups((strip[1:] == strip[:-1]) & (left[1:] == right[:-1]), len(strip))
    part, strip, left, right = part[firsts], strip[firsts], left[firsts], right[lasts]
    order = np.lexsort((strip, right, left, part))
    part, strip, left, right = part[order], strip[order], left[order], right[order]
    same = (part[1:] == part[:-1]) & (left[1:] == left[:-1]) & (right[1:] == right[:-1])
    firsts, lasts = groups(same & (strip[1:] == strip[:-1] + 1), len(strip))
    part = part[firsts]
    found = np.stack(
        (part, cuts[strip[firsts]] - part * width, cuts[strip[lasts] + 1] - part * width, left[firsts], right[firsts])
    )
    return found[:, np.lexsort((found[3], found[1], found[0]))]


def trimmed(found: Rectangles) -> Rectangles:
    """Rectangles of which every row and every column sees something; limits that hide nothing are `NO_LIMIT`."""
    top = np.maximum(found.top, found.left - found.hi)
    bottom = np.minimum(found.bottom, found.right - found.lo)
    left, right = np.maximum(found.left, top + found.lo), np.minimum(found.right, bottom + found.hi)
    some = (top < bottom) & (left < right) & (found.lo <= found.hi)
    lo = np.where(found.lo <= left - bottom + 1, -NO_LIMIT, found.lo)
    hi = np.where(found.hi >= right - top - 1, NO_LIMIT, found.hi)
    found = found._replace(top=top, bottom=bottom, left=left, right=right, lo=lo, hi=hi)
    return found if some.all() else found.chosen(some)


def groups(with_previous: Booleans, count: int) -> tuple[Integers, Integers]:
    """The first and the last element of each group, where each but the first of them belongs with the one before."""
    new = np.ones(count, dtype=bool)
    new[1:] = ~with_previous
    firsts = np.flatnonzero(new)
    return firsts, np.append(firsts[1:], count)[: len(firsts)] - 1
