"""A mask under a layout: the tiles of a pair of ranks, and how evenly the work is divided among ranks."""

from __future__ import annotations

from functools import lru_cache

from engine.attention.geometry.layout import Layout, rows_before
from engine.attention.geometry.tiles import Tile
from engine.attention.masks.mask import FirstRows, Mask


@lru_cache(maxsize=1024)
def rank_pair_tiles(
    mask: Mask, layout: Layout, seq_len: int, cp_size: int, q_rank: int, k_rank: int
) -> tuple[Tile, ...]:
    """Tiles of the queries of `q_rank` against the keys of `k_rank`. Raises ValueError for a length the mask
    does not fit."""
    unsupported_reason = mask.unsupported_reason(seq_len)
    if unsupported_reason:
        raise ValueError(unsupported_reason)
    return mask.tiles(layout.segments(seq_len, cp_size, q_rank), layout.segments(seq_len, cp_size, k_rank))


@lru_cache(maxsize=256)
def band_kinds(mask: Mask, layout: Layout, seq_len: int, cp_size: int) -> frozenset[str]:
    """Kinds of band in the tiles of all ranks: every rank must choose the same kernel."""
    return frozenset(
        tile.band.kind
        for q_rank in range(cp_size)
        for k_rank in range(cp_size)
        for tile in rank_pair_tiles(mask, layout, seq_len, cp_size, q_rank, k_rank)
    )


def rank_areas(mask: Mask, layout: Layout, seq_len: int, cp_size: int) -> list[int]:
    """Visible pairs each rank computes over a whole forward: its queries against all keys.

    Raises ValueError with the mask's `unsupported_reason`.
    """
    unsupported_reason = mask.unsupported_reason(seq_len)
    if unsupported_reason:
        raise ValueError(unsupported_reason)
    return [
        sum(mask.row_area(segment, seq_len) for segment in layout.segments(seq_len, cp_size, rank))
        for rank in range(cp_size)
    ]


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
