"""Tiles of many pairs of shards as integer arrays: formed, joined and counted at once, and made objects when a kernel
needs them. Their bands are full or causal; pure integer code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.shard_table import Integers
from engine.attention.geometry.tiles import CAUSAL, FULL, Band, Tile

NO_LIMIT = 1 << 40  # a diagonal that hides no key


@dataclass(frozen=True, eq=False)
class TileTable:
    """Tiles of pairs 0 to `pairs` - 1, those of a pair side by side in the order of `Mask.tiles`."""

    pairs: int
    pair: Integers  # of each tile, ascending
    corners: Integers  # [tiles, q_start, q_stop, k_start, k_stop], local tokens
    causal: NDArray[np.bool_]  # the band is causal; else full

    @cached_property
    def bounds(self) -> Integers:
        """The tiles of pair i are bounds[i] to bounds[i + 1] - 1."""
        return np.searchsorted(self.pair, np.arange(self.pairs + 1))

    @property
    def counts(self) -> Integers:
        """How many tiles each pair has."""
        return np.diff(self.bounds)

    def tiles(self, pair: int) -> tuple[Tile, ...]:
        """Those of one pair."""
        own = slice(*self.bounds[pair : pair + 2].tolist())
        return tuple(map(Tile, *self.corners[own].T.tolist(), self._bands(own)))

    def calls(self, pair: int) -> tuple[tuple[slice, slice, Band], ...]:
        """Those of one pair as kernel calls: queries, keys, band."""
        own = slice(*self.bounds[pair : pair + 2].tolist())
        q_start, q_stop, k_start, k_stop = self.corners[own].T.tolist()
        queries, keys = map(slice, q_start, q_stop), map(slice, k_start, k_stop)
        return tuple(zip(queries, keys, self._bands(own), strict=True))

    def _bands(self, own: slice) -> list[Band]:
        return [CAUSAL if causal else FULL for causal in self.causal[own].tolist()]

    def spans(self, queries: bool) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """(start, stop) of the local tokens of one side in the tiles of each pair, (0, 0) without tiles; and whether no
        token is in two of them."""
        start, stop = self.corners[:, :2].T if queries else self.corners[:, 2:].T
        first, last = (np.zeros(self.pairs, dtype=np.int64) for _ in range(2))
        apart = np.ones(self.pairs, dtype=bool)
        some = np.flatnonzero(self.counts)
        if len(some):
            first[some] = np.minimum.reduceat(start, self.bounds[some])
            last[some] = np.maximum.reduceat(stop, self.bounds[some])
            order = np.lexsort((start, self.pair))
            pair, start, stop = self.pair[order], start[order], stop[order]
            apart[pair[1:][(pair[1:] == pair[:-1]) & (stop[:-1] > start[1:])]] = False
        return first, last, apart


def tile_table(pairs: int, pair: Integers, corners: Integers, hi: Integers, offsets: Integers) -> TileTable:
    """The tiles of rectangles under diagonals, joined: `trim`, `without_upper_bands` and `join` of `geometry.tiles`.

    Args:
        pairs: number of pairs of shards.
        pair: of each rectangle, in the order of the pair's tiles; ascending.
        corners: [rectangles, top, bottom, left, right].
        hi: of each rectangle: key j is visible to query i when j - i <= hi, counted as `corners` is.
        offsets: [rectangles, 2], local tokens in front of query 0 and key 0.
    """
    top, bottom, left, right = corners.T
    hi = hi + top - left  # counted from the corner
    bottom, right = bottom - top, np.minimum(right - left, bottom - top + hi)
    top = np.maximum(0, -hi)  # the first row that sees a key
    some = (top < bottom) & (right > 0)
    q_offset, k_offset = (offsets + corners[:, ::2])[some].T
    top, bottom, right, hi, pair = top[some], bottom[some], right[some], (hi + top)[some], pair[some]
    whole, past, square = hi >= right - 1, np.maximum(hi, 0), right - hi
    # All rows see the keys before the diagonal's column, and rows below its end see all keys.
    middle = top + square
    rest, below = ~whole, ~whole & (middle < bottom)
    nothing, sides = np.zeros_like(top), []
    for chosen, sizes in (
        (whole, (top, bottom, nothing, right)),
        (rest & (past > 0), (top, bottom, nothing, past)),
        (below, (middle, bottom, past, right)),
        (rest, (top, middle, past, right)),
    ):
        q_start, q_stop, k_start, k_stop = (each[chosen] for each in sizes)
        by_q, by_k = q_offset[chosen], k_offset[chosen]
        sides.append(np.stack((pair[chosen], q_start + by_q, q_stop + by_q, k_start + by_k, k_stop + by_k)))
    full, causal = _joined(np.concatenate(sides[:3], axis=1)), sides[3]
    both = np.concatenate((full, causal), axis=1)
    order = np.argsort(both[0], kind="stable")
    return TileTable(pairs, both[0, order], both[1:, order].T, order >= full.shape[1])


def _joined(full: Integers) -> Integers:
    """Full tiles [pair and corners, tiles] of which those that share a whole edge are one: along the keys, then along
    the queries."""
    for first, along in ((1, 3), (3, 1)):
        full = full[:, np.lexsort((full[along], full[first + 1], full[first], full[0]))]
        fixed = full[[0, first, first + 1]]
        new = np.ones(full.shape[1], dtype=bool)
        new[1:] = (fixed[:, 1:] != fixed[:, :-1]).any(axis=0) | (full[along, 1:] != full[along + 1, :-1])
        firsts = np.flatnonzero(new)
        stops = full[along + 1, np.append(firsts[1:], full.shape[1])[: len(firsts)] - 1]
        full = full[:, firsts]
        full[along + 1] = stops
    return full
