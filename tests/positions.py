"""Global positions of a shard's tokens, in local order, and the tiles between two shards formed by themselves."""

from __future__ import annotations

from functools import lru_cache

from engine.attention.geometry.layout import Layout
from engine.attention.geometry.tiles import Tile
from engine.attention.masks import Mask
from engine.attention.masks.mask import check_length
from engine.attention.masks.pairs import pair_tiles


def shard_positions(layout: Layout, seq_len: int, cp_size: int, cp_rank: int) -> list[int]:
    """Position of each local token of `cp_rank`."""
    segments = layout.segments(seq_len, cp_size, cp_rank)
    return [position for segment in segments for position in segment.positions()]


@lru_cache(maxsize=1024)
def rank_pair_tiles(
    mask: Mask, layout: Layout, seq_len: int, cp_size: int, q_rank: int, k_rank: int
) -> tuple[Tile, ...]:
    """Tiles of the queries of `q_rank` against the keys of `k_rank`, without the table of all ranks."""
    check_length(mask, seq_len)
    return pair_tiles(mask, layout, seq_len, cp_size, q_rank, k_rank).tiles(0)
