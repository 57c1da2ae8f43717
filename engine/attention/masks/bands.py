"""Masks that show each query one band of keys: full and causal. `engine.attention.masks.window` has bounded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from engine.attention.geometry.layout import Segment
from engine.attention.geometry.shard_table import Integers, ShardTable, by_pair
from engine.attention.geometry.tiles import CAUSAL, Tile, band_area, join, segment_tile, square_causal


class _BandMask:
    """Query i sees every key up to i + right; None means no limit."""

    right: int | None
    band_kinds = None

    def pair_keys(self, shards: ShardTable) -> Sequence[Integers]:
        return by_pair(shards.count, shards.count, shards.limits(None, self.right))

    def pair_spans(self, shards: ShardTable) -> None:
        return None

    def tile_table(self, shards: ShardTable, q_ranks: Integers, k_ranks: Integers) -> None:
        return None

    def unsupported_reason(self, seq_len: int) -> str | None:
        return None

    def tiles(self, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> tuple[Tile, ...]:
        return band_tiles(q, k, None, self.right)

    def row_area(self, queries: Segment, seq_len: int) -> int:
        return band_row_area(queries, seq_len, None, self.right)

    def area(self, seq_len: int) -> int:
        return self.row_area(Segment(0, seq_len), seq_len)


def band_row_area(queries: Segment, keys: int, left: int | None, right: int | None) -> int:
    """Keys i - left ... i + right of the sequence's first `keys` that these queries see, summed over the queries."""
    lo = None if left is None else queries.start - left
    hi = None if right is None else queries.start + right
    return band_area(queries.count, keys, lo, hi, queries.step)


@lru_cache(maxsize=4096)
def band_tiles(q: tuple[Segment, ...], k: tuple[Segment, ...], left: int | None, right: int | None) -> tuple[Tile, ...]:
    """Query i sees keys i - left ... i + right; None means no limit on that side."""
    count = sum(segment.count for segment in q)
    if q == k and left is None and right == 0:
        # A shard against itself: local order is position order, so one causal call serves all its segments.
        return (Tile(0, count, 0, count, CAUSAL),)
    tiles: list[Tile] = []
    q_offset = 0
    for q_segment in q:
        k_offset = 0
        for k_segment in k:
            tile = segment_tile(q_segment, k_segment, left, right)
            if tile is not None:
                tiles.extend(square_causal(tile.shifted(q_offset, k_offset)))
            k_offset += k_segment.count
        q_offset += q_segment.count
    return tuple(join(tiles))


@dataclass(frozen=True, slots=True)
class Full(_BandMask):
    """Every query sees every key."""

    right: None = None

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True, slots=True)
class Causal(_BandMask):
    """A query sees itself and all earlier keys."""

    right: int = 0

    def __str__(self) -> str:
        return "causal"
