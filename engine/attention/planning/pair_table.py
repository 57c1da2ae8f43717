"""What the queries of each rank touch in the shard of each other rank, for all pairs at once. Integer code.

A plan needs the tiles of its own rank alone, but of all pairs which tokens they span and whether they share tokens.
Pairs whose segments lie alike under the mask have equal tiles: a mask gives numbers that decide a pair's tiles
(`pair_keys`), and the tiles are formed once per kind of pair. Packed documents make most pairs unlike each other, and
answer from their boundaries (`pair_spans`). A mask with neither is evaluated pair by pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.attention.accumulate import WAITING_PARTS
from engine.attention.geometry.layout import Layout
from engine.attention.geometry.shard_table import Integers, ShardTable, shard_table
from engine.attention.geometry.tile_table import TileTable
from engine.attention.geometry.tiles import Band, Tile
from engine.attention.masks import Mask, rank_pair_tiles
from engine.attention.masks.mask import PairSpans

KernelCall: TypeAlias = tuple[slice, slice, Band]  # local query tokens, local key tokens, visible band
_MIXING = np.random.default_rng(20).integers(1 << 62, size=4096, dtype=np.int64) | 1


@dataclass(frozen=True, eq=False)
class Side:
    """One side of all pairs of ranks, queries or keys: [query ranks, key ranks]."""

    start: Integers  # local tokens [start, stop) that the tiles span; (0, 0) where there are no tiles
    stop: Integers
    unreduced: NDArray[np.bool_]  # no token is in two tiles, and their gradients can all be held until they are sent


@dataclass(frozen=True, eq=False)
class PairTable:
    """All pairs of ranks under a mask and a layout."""

    queries: Side
    keys: Side
    kinds: frozenset[str]  # of band in the tiles; for masks of whole blocks those that may be
    _problem: tuple[Mask, Layout, int, int]
    _kind_of: Integers  # [query ranks, key ranks], into `_tiles`; -1 where a pair's tiles are formed when asked for
    _tiles: TileTable | list[tuple[Tile, ...]]
    _calls: dict[int, tuple[KernelCall, ...]] = field(default_factory=dict)  # by kind

    def tiles(self, q_rank: int, k_rank: int) -> tuple[Tile, ...]:
        """Tiles of one pair."""
        return tuple(map(tile_of, self.calls(q_rank, k_rank)))

    def calls(self, q_rank: int, k_rank: int) -> tuple[KernelCall, ...]:
        """Tiles of one pair as kernel calls. Pairs of one kind share them."""
        if self.queries.stop[q_rank, k_rank] == 0:
            return ()
        kind = int(self._kind_of[q_rank, k_rank])
        if kind < 0:
            return self._formed(q_rank, k_rank)
        if kind not in self._calls:
            tiles = self._tiles
            self._calls[kind] = tiles.calls(kind) if isinstance(tiles, TileTable) else kernel_calls(tiles[kind])
        return self._calls[kind]

    def _formed(self, q_rank: int, k_rank: int) -> tuple[KernelCall, ...]:
        mask, layout, seq_len, cp_size = self._problem
        table = mask.tile_table(shard_table(layout, seq_len, cp_size), np.array([q_rank]), np.array([k_rank]))
        return kernel_calls(rank_pair_tiles(*self._problem, q_rank, k_rank)) if table is None else table.calls(0)


def tile_of(call: KernelCall) -> Tile:
    """The tile that a kernel call computes."""
    queries, keys, band = call
    return Tile(queries.start, queries.stop, keys.start, keys.stop, band)


def kernel_calls(tiles: Iterable[Tile]) -> tuple[KernelCall, ...]:
    """A kernel call for each tile."""
    return tuple((tile.q, tile.k, tile.band) for tile in tiles)


@lru_cache(maxsize=64)
def pair_table(mask: Mask, layout: Layout, seq_len: int, cp_size: int) -> PairTable:
    """Tiles of all pairs of ranks. Raises ValueError for a length the mask does not fit, or too many tiles."""
    unsupported_reason = mask.unsupported_reason(seq_len)
    if unsupported_reason:
        raise ValueError(unsupported_reason)
    shards = shard_table(layout, seq_len, cp_size)
    problem = (mask, layout, seq_len, cp_size)
    return _from_keys(problem, shards, mask.pair_spans(shards))


def _from_keys(problem: tuple[Mask, Layout, int, int], shards: ShardTable, spans: PairSpans | None) -> PairTable:
    """The table, with tiles formed once per kind of pair, for all pairs or for those that `spans` does not know."""
    mask, cp_size = problem[0], problem[3]
    asked = np.arange(cp_size * cp_size) if spans is None else np.flatnonzero(spans.unknown)  # query rank by query rank
    keys = mask.pair_keys(shards) if len(asked) else None
    if keys is None:
        kinds, first = np.arange(len(asked)), np.arange(len(asked))
    else:
        kinds, first = _alike([number.reshape(-1) if spans is None else number.take(asked) for number in keys])
    q_ranks, k_ranks = np.divmod(asked[first], cp_size)  # a pair of each kind
    tiles = mask.tile_table(shards, q_ranks, k_ranks) if len(first) else None
    bands = mask.band_kinds or frozenset()
    formed: TileTable | list[tuple[Tile, ...]]
    if tiles is None:
        pairs = zip(q_ranks.tolist(), k_ranks.tolist(), strict=True)
        formed = [mask.tiles(shards.segments[q_rank], shards.segments[k_rank]) for q_rank, k_rank in pairs]
        of_kinds = [
            np.array([_span(each, queries) for each in formed], dtype=np.int64).reshape(-1, 3).T
            for queries in (True, False)
        ]
        bands = bands or frozenset(tile.band.kind for each in formed for tile in each)
    else:
        formed, few = tiles, tiles.counts <= WAITING_PARTS
        of_kinds = [np.stack((start, stop, apart & few)) for start, stop, apart in map(tiles.spans, (True, False))]
    q_side, k_side = (found.take(kinds, axis=1) for found in of_kinds)  # [start, stop and unreduced, asked pairs]
    kind_of = kinds
    if spans is not None:
        kind_of = np.full(cp_size * cp_size, -1)
        kind_of[asked] = kinds
        q_side = _with_asked(np.stack((*spans.queries, spans.apart)), asked, q_side)
        k_side = _with_asked(np.stack((*spans.keys, spans.apart)), asked, k_side)
    queries, stretches = (_side(found.reshape(3, cp_size, cp_size)) for found in (q_side, k_side))
    return PairTable(queries, stretches, bands, problem, kind_of.reshape(cp_size, cp_size), formed)


def _with_asked(known: Integers, asked: Integers, found: Integers) -> Integers:
    """Numbers of all pairs [numbers, query ranks, key ranks], those of the asked pairs as they were found."""
    numbers = known.reshape(len(known), -1)
    numbers[:, asked] = found
    return numbers


def _side(numbers: Integers) -> Side:
    """From [start, stop and unreduced, query ranks, key ranks]."""
    return Side(numbers[0], numbers[1], numbers[2].astype(bool))


def _alike(keys: Sequence[Integers]) -> tuple[Integers, Integers]:
    """(kind of each pair, a pair of each kind) where pairs of one kind are equal in all numbers."""
    mixed = np.zeros_like(keys[0])
    for number, factor in zip(keys, _MIXING, strict=False):
        mixed += number * factor
    _, first, kinds = np.unique(mixed, return_index=True, return_inverse=True)
    if not all(np.array_equal(number.take(first).take(kinds), number) for number in keys):  # two unlike pairs, one sum
        _, first, kinds = np.unique(np.stack(keys), axis=1, return_index=True, return_inverse=True)
    return kinds.reshape(-1), first


def _span(tiles: tuple[Tile, ...], queries: bool) -> tuple[int, int, bool]:
    """(start, stop) of the tokens of one side in a pair's tiles; and whether none is in two of them and all their
    gradients can be held until they are sent."""
    ranges = [(tile.q_start, tile.q_stop) if queries else (tile.k_start, tile.k_stop) for tile in tiles]
    few = len(ranges) <= WAITING_PARTS
    apart = few and all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(ranges)))
    return *hull(ranges), apart


def hull(ranges: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The shortest range that holds all of them."""
    filled = [(start, stop) for start, stop in ranges if stop > start]
    return (min(start for start, _ in filled), max(stop for _, stop in filled)) if filled else (0, 0)
