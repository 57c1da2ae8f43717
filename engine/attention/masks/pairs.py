"""A mask under a layout: the tiles of every pair of ranks, what they touch, and how evenly ranks share the work."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from engine.attention.accumulate import WAITING_PARTS
from engine.attention.geometry.balanced import Balanced
from engine.attention.geometry.layout import Layout, Segment, rows_before
from engine.attention.geometry.rectangles import Booleans, region_areas
from engine.attention.geometry.shards import ShardSegments
from engine.attention.geometry.tile_table import TileTable, outermost_spans, tile_table
from engine.attention.geometry.tiles import Call, Integers
from engine.attention.masks.mask import FirstRows, Mask, check_length, regions_of

_ALL_AT_ONCE = 1 << 20  # regions of all pairs of striped ranks, up to which their tiles are formed in one table


@dataclass(frozen=True, eq=False)
class TokenSpans:
    """One side of all pairs of ranks, queries or keys: [query ranks, key ranks]."""

    start: Integers  # local tokens [start, stop) that the tiles span; (0, 0) where there are no tiles
    stop: Integers
    unreduced: Booleans  # no token is in two tiles, and their gradients can all be held until they are sent


@dataclass(frozen=True, eq=False)
class PairTable:
    """All pairs of ranks under a mask and a layout."""

    queries: TokenSpans
    keys: TokenSpans
    kinds: frozenset[str]  # of band in the tiles
    _problem: tuple[Mask, Layout, int, int]
    _kind_of: Integers  # [query ranks, key ranks]: the pair of `_tiles` that has equal tiles
    _tiles: TileTable | None  # None: a pair's tiles are formed when they are asked for
    _formed: dict[int, tuple[Call, ...]] = field(default_factory=dict)  # by kind
    _counted: dict[int, int] = field(default_factory=dict)  # calls of a kind whose tiles are not in `_tiles`

    def calls(self, q_rank: int, k_rank: int) -> tuple[Call, ...]:
        """Kernel calls of one pair."""
        kind = int(self._kind_of[q_rank, k_rank])
        if kind not in self._formed:
            table = pair_tiles(*self._problem, q_rank, k_rank) if self._tiles is None else self._tiles
            self._formed[kind] = table.calls(0 if self._tiles is None else kind)
        return self._formed[kind]

    def call_count(self, q_rank: int, k_rank: int) -> int:
        """How many calls one pair has; they are not formed."""
        kind = int(self._kind_of[q_rank, k_rank])
        if self._tiles is not None:
            return self._tiles.call_count(kind)
        if kind not in self._counted:
            self._counted[kind] = pair_tiles(*self._problem, q_rank, k_rank).call_count(0)
        return self._counted[kind]

    @property
    def one_by_one(self) -> bool:
        """Tiles of a pair are formed when they are asked for: of striped ranks, whose pairs are much alike."""
        return self._tiles is None

    @property
    def has_sequences(self) -> bool:
        """Some calls are of several sequences, judged by one pair."""
        return (pair_tiles(*self._problem, 0, 0) if self._tiles is None else self._tiles).has_sequences

    def area(self, q_rank: int, k_rank: int) -> int:
        """Visible (query, key) pairs of one pair of ranks."""
        if self._tiles is None:
            return int(pair_tiles(*self._problem, q_rank, k_rank).areas[0])
        return int(self._tiles.areas[self._kind_of[q_rank, k_rank]])


@lru_cache(maxsize=64)
def shards_of(layout: Layout, seq_len: int, cp_size: int) -> ShardSegments:
    """The shards of all ranks."""
    if isinstance(layout, Balanced):
        return layout.shards(seq_len, cp_size)
    return ShardSegments.of(*(layout.segments(seq_len, cp_size, rank) for rank in range(cp_size)))


@lru_cache(maxsize=64)
def pair_table(mask: Mask, layout: Layout, seq_len: int, cp_size: int) -> PairTable:
    """Tiles of all pairs of ranks. Raises ValueError for a length the mask does not fit, or too many tiles."""
    check_length(mask, seq_len)
    regions, shards = regions_of(mask, seq_len), shards_of(layout, seq_len, cp_size)
    problem, kind_of = (mask, layout, seq_len, cp_size), np.arange(cp_size * cp_size)
    shape = (cp_size, cp_size)
    if shards.step > 1 and (spans := outermost_spans(regions, shards, WAITING_PARTS)):
        kinds = frozenset({"full", "causal"} if (regions[:, 4] > seq_len).all() else {"full", "causal", "band"})
        queries, keys = (
            TokenSpans(start.reshape(shape), stop.reshape(shape), np.zeros(shape, dtype=bool)) for start, stop in spans
        )
        return PairTable(queries, keys, kinds, problem, kind_of.reshape(shape), None)
    kinds_of_pairs, first = _kinds(regions, shards) if shards.step > 1 else (kind_of, kind_of)
    alone = shards.step == 1 or (len(first) > cp_size and cp_size * cp_size * len(regions) <= _ALL_AT_ONCE)
    if alone:  # every pair is a kind of its own
        tiles = tile_table(regions, shards, shards, mask.merges)
    else:
        kind_of = kinds_of_pairs
        tiles = TileTable.joined([pair_tiles(*problem, *divmod(pair, cp_size)) for pair in first.tolist()])
    kind_of = kind_of.reshape(shape)
    queries, keys = (_token_spans(tiles, side, kind_of, alone) for side in (True, False))
    return PairTable(queries, keys, tiles.kinds, problem, kind_of, tiles)


def _token_spans(tiles: TileTable, queries: bool, kind_of: Integers, alone: bool) -> TokenSpans:
    start, stop, apart = tiles.spans(queries)
    unreduced = apart & (tiles.counts <= WAITING_PARTS)
    if alone:
        shape = kind_of.shape
        return TokenSpans(start.reshape(shape), stop.reshape(shape), unreduced.reshape(shape))
    return TokenSpans(start[kind_of], stop[kind_of], unreduced[kind_of])


def _kinds(regions: Integers, shards: ShardSegments) -> tuple[Integers, Integers]:
    """(kind of each pair of ranks, a pair of each kind) of shards of one segment: pairs of one kind have equal tiles,
    because their ranks have equally many tokens before each edge of a region, and lie alike to each other."""
    ranks, distance = len(shards), shards.start - shards.start[:, None]
    rows = shards.rows_before(np.unique(regions[:, :4]))
    alike = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    kinds = alike[:, None] * ranks + alike
    for limit, sign in {
        (limit, sign) for row in regions[:, 4:].tolist() for limit, sign in zip(row, (1, -1), strict=True)
    }:
        crossed = (limit + sign * distance) // shards.step  # one of three neighbouring numbers
        kinds = 3 * kinds + crossed - crossed.min()
    _, first, kinds = np.unique(kinds, return_index=True, return_inverse=True)
    return kinds.reshape(-1), first


def pair_tiles(mask: Mask, layout: Layout, seq_len: int, cp_size: int, q_rank: int, k_rank: int) -> TileTable:
    """The tiles of one pair of ranks."""
    queries, keys = (ShardSegments.of(layout.segments(seq_len, cp_size, rank)) for rank in (q_rank, k_rank))
    return tile_table(regions_of(mask, seq_len), queries, keys, mask.merges)


@lru_cache(maxsize=64)
def tiles_of_all_keys(mask: Mask, layout: Layout, seq_len: int, cp_size: int) -> TileTable:
    """Pair r of the table: the queries of rank r against all keys in order of position. Shards are runs of consecutive
    tokens. Raises ValueError for a length the mask does not fit."""
    check_length(mask, seq_len)
    whole = ShardSegments.of((Segment(0, seq_len),))
    return tile_table(regions_of(mask, seq_len), shards_of(layout, seq_len, cp_size), whole, mask.merges)


def rank_areas(mask: Mask, layout: Layout, seq_len: int, cp_size: int) -> list[int]:
    """Visible pairs each rank computes over a whole forward: its queries against all keys.

    Raises ValueError with the mask's `unsupported_reason`.
    """
    check_length(mask, seq_len)
    return region_areas(regions_of(mask, seq_len), shards_of(layout, seq_len, cp_size)).tolist()


@lru_cache(maxsize=256)
def imbalance(mask: Mask, layout: Layout, seq_len: int, cp_size: int) -> float:
    """Most work of a rank over the mean: 1.0 is perfect balance. Raises ValueError for a length the mask
    does not fit."""
    areas = rank_areas(mask, layout, seq_len, cp_size)
    return max(areas) * cp_size / sum(areas) if sum(areas) else 1.0


def kept_share(layout: Layout, seq_len: int, cp_size: int, cut: int) -> float:
    """Largest fraction of a rank's tokens at or after position `cut`: the largest share any rank saves."""
    heads = [rows_before(layout.segments(seq_len, cp_size, rank), cut) for rank in range(cp_size)]
    return 1 - min(heads) * cp_size / seq_len


@lru_cache(maxsize=256)
def recompute_share(mask: Mask, layout: Layout, seq_len: int, cp_size: int, cut: int) -> float:
    """Work of the busiest rank for all queries before `cut`, over a rank's mean work in a whole forward.

    Raises ValueError with the mask's `unsupported_reason`.
    """
    areas = rank_areas(FirstRows(mask, cut), layout, seq_len, cp_size)
    whole = mask.area(seq_len)
    return max(areas) * cp_size / whole if whole else 0.0
