"""The tiles between many shards at once, in integer arrays.

A mask is a list of disjoint regions in global positions (`Region`). `tile_table` cuts all regions by all shards, trims
the rectangles (`engine.attention.geometry.rectangles`) to what their bands show, and joins what one kernel call can
compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.attention.geometry.rectangles import (
    Booleans,
    Rectangles,
    groups,
    merged,
    rectangles_between,
    trimmed,
)
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

# Kernel calls between two shards, beyond which launching them would take longer than a dense sequence.
MAX_TILES = 4096


class TooManyTiles(ValueError):
    """The mask needs too many kernel calls between two shards to be run under this layout."""


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
    found = rectangles_between(regions, queries, keys)
    if merges and len(found.pair):
        found = merged(found)
    shown = trimmed(found)
    table = _tiles(shown, len(queries) * len(keys))
    if len(table.pair) > MAX_TILES and int(table.counts.max()) > MAX_TILES:
        most = table.call_count(int(table.counts.argmax()))
        if most > MAX_TILES:
            raise TooManyTiles(
                f"the mask leaves {most} rectangles between two shards and {MAX_TILES} is the limit; take larger "
                "blocks, or layout contiguous"
            )
    return table


def _tiles(shown: Rectangles, pairs: int) -> TileTable:
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
            firsts, lasts = groups(same, full.shape[1])
            stops = full[along + 1, lasts]
            full = full[:, firsts]
            full[along + 1] = stops
    return full


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
            found = trimmed(rectangles_between(ordered[at : at + size], shards, shards))
            at, size = at + size, 2 * size
            seen += np.bincount(found.pair, minlength=pairs)
            outer = np.full((2, pairs), -1)
            sides = (found.bottom, found.right) if end else (found.top, found.left)
            outer[:, found.pair[::-1]] = np.stack(sides)[:, ::-1]  # of several, the first one is kept
            new = ~known & (outer[0] >= 0)
            spans[:, end, new] = outer[:, new]
            known |= new
    return spans[0], spans[1]
