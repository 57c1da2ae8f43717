"""What the queries of each rank touch in the shard of each other rank, for all pairs at once. Integer code.

A plan needs the tiles of its own rank alone, but of all pairs which tokens they span and whether they share tokens.
Pairs whose segments lie alike under the mask have equal tiles: a mask gives numbers that decide a pair's tiles
(`pair_keys`), and the tiles are formed once per kind of pair. Packed documents make most pairs unlike each other, and
answer from their boundaries (`pair_spans`). A mask with neither is evaluated pair by pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
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
    spans = mask.pair_spans(shards)
    if spans is None:
        return _from_keys(problem, shards, np.ones((cp_size, cp_size), dtype=bool), None)
    return _from_keys(problem, shards, spans.unknown, spans)


def _from_keys(
    problem: tuple[Mask, Layout, int, int], shards: ShardTable, wanted: NDArray[np.bool_], spans: PairSpans | None
) -> PairTable:
    """The table, with tiles formed for the `wanted` pairs, once per kind; the others are as `spans` says."""
    mask, cp_size = problem[0], problem[3]
    q_ranks, k_ranks = np.nonzero(wanted)
    keys = mask.pair_keys(shards) if len(q_ranks) else None
    if keys is None:
        kinds, first = np.arange(len(q_ranks)), np.arange(len(q_ranks))
    else:
        kinds, first = _alike(keys[q_ranks, k_ranks] if spans else keys.reshape(cp_size * cp_size, -1))
    tiles = mask.tile_table(shards, q_ranks[first], k_ranks[first]) if len(first) else None
    bands = mask.band_kinds or frozenset()
    formed: TileTable | list[tuple[Tile, ...]]
    if tiles is None:
        formed = [mask.tiles(shards.segments[q_ranks[pair]], shards.segments[k_ranks[pair]]) for pair in first]
        queries = np.array([(*hull((t.q_start, t.q_stop) for t in each), _unreduced(each, True)) for each in formed])
        stretches = np.array([(*hull((t.k_start, t.k_stop) for t in each), _unreduced(each, False)) for each in formed])
        bands = bands or frozenset(tile.band.kind for each in formed for tile in each)
    else:
        formed, few = tiles, tiles.counts <= WAITING_PARTS
        (q_start, q_stop, q_apart), (k_start, k_stop, k_apart) = tiles.spans(True), tiles.spans(False)
        queries = np.stack((q_start, q_stop, q_apart & few), axis=-1)
        stretches = np.stack((k_start, k_stop, k_apart & few), axis=-1)
    kind_of = np.full((cp_size, cp_size), -1)
    kind_of[q_ranks, k_ranks] = kinds
    sides = []
    for known, found in ((spans and spans.queries, queries), (spans and spans.keys, stretches)):
        table = np.zeros((cp_size, cp_size, 3), dtype=np.int64)
        if known is not None:
            table[..., 0], table[..., 1] = known
        if spans is not None:
            table[..., 2] = spans.apart
        if len(q_ranks):
            table[q_ranks, k_ranks] = found[kinds]
        sides.append(Side(table[..., 0], table[..., 1], table[..., 2].astype(bool)))
    return PairTable(sides[0], sides[1], bands, problem, kind_of, formed)


def _alike(keys: Integers) -> tuple[Integers, Integers]:
    """(kind of each row, a row of each kind) where rows of one kind are equal."""
    mixed = keys @ _MIXING[: keys.shape[1]] if keys.shape[1] <= len(_MIXING) else np.zeros(len(keys), dtype=np.int64)
    _, first, kinds = np.unique(mixed, return_index=True, return_inverse=True)
    if not np.array_equal(keys[first][kinds], keys):  # two unlike rows have one sum
        _, first, kinds = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return kinds.reshape(-1), first


def _unreduced(tiles: tuple[Tile, ...], queries: bool) -> bool:
    """No token of this side is in two tiles, and all their gradients can be held until they are sent."""
    if not 1 < len(tiles) <= WAITING_PARTS:
        return len(tiles) < 2
    ordered = sorted((tile.q_start, tile.q_stop) if queries else (tile.k_start, tile.k_stop) for tile in tiles)
    return all(before[1] <= after[0] for before, after in itertools.pairwise(ordered))


def hull(ranges: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The shortest range that holds all of them."""
    filled = [(start, stop) for start, stop in ranges if stop > start]
    return (min(start for start, _ in filled), max(stop for _, stop in filled)) if filled else (0, 0)
