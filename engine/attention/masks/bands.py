"""Masks that show each query one band of keys around it: full, causal, sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from engine.attention.layout import Segment
from engine.attention.tiles import CAUSAL, Tile, band_area, join, segment_tile, square_causal


class _BandMask:
    """Query i sees keys i - left ... i + right; None means no limit on that side."""

    left: int | None
    right: int | None

    def refusal(self, seq_len: int) -> str | None:
        return None

    def tiles(self, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> tuple[Tile, ...]:
        return _band_tiles(q, k, self.left, self.right)

    def row_area(self, queries: Segment, seq_len: int) -> int:
        lo = None if self.left is None else queries.start - self.left
        hi = None if self.right is None else queries.start + self.right
        return band_area(queries.count, seq_len, lo, hi, queries.step)

    def area(self, seq_len: int) -> int:
        return self.row_area(Segment(0, seq_len), seq_len)


@lru_cache(maxsize=4096)
def _band_tiles(
    q: tuple[Segment, ...], k: tuple[Segment, ...], left: int | None, right: int | None
) -> tuple[Tile, ...]:
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

    left: None = None
    right: None = None

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True, slots=True)
class Causal(_BandMask):
    """A query sees itself and what came before."""

    left: None = None
    right: int = 0

    def __str__(self) -> str:
        return "causal"


@dataclass(frozen=True, slots=True)
class SlidingWindow(_BandMask):
    """A query sees itself, `left` tokens before it and `right` after it."""

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        if self.left < 0 or self.right < 0:
            raise ValueError(f"sliding window ({self.left}, {self.right}) has a negative side; give token counts >= 0")

    def __str__(self) -> str:
        return f"sliding_window:{self.left}" + (f":{self.right}" if self.right else "")
