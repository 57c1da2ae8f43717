"""What a mask is, and masks made of other masks.

A mask lists disjoint regions in global positions (`Mask.regions`). Tiles between shards, visible pairs and plans follow
from them under every layout: `engine.attention.geometry.tile_table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from engine.attention.geometry.layout import Segment
from engine.attention.geometry.tile_table import Integers, Region, ShardSegments, region_areas, tile_table
from engine.attention.geometry.tiles import Tile


class Mask:
    """Which keys each query sees, in global positions. A subclass is a frozen dataclass: hashable, because plans are
    cached by mask.

    A new mask defines `regions` and `__str__`, and `unsupported_reason` where it does not fit every length.
    """

    __slots__ = ()

    merges: ClassVar[bool] = False
    """Regions may touch, as blocks of a grid do, and have one band: those that touch between two shards are merged."""

    def regions(self, tokens: int) -> Sequence[Region] | Integers:
        """What queries at the first `tokens` positions see of the keys there: disjoint regions that lie within them, as
        a list or as an array with the fields of `Region` along its last axis."""
        raise NotImplementedError

    def unsupported_reason(self, seq_len: int) -> str | None:
        """One sentence why the mask does not describe a sequence of this length, or None."""
        return None

    def area(self, seq_len: int) -> int:
        """Visible (query, key) pairs of a whole sequence, exactly. Raises ValueError with `unsupported_reason`."""
        check_length(self, seq_len)
        return int(region_areas(regions_of(self, seq_len), ShardSegments(((Segment(0, seq_len),),)))[0])

    def tiles(self, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> tuple[Tile, ...]:
        """Work of the shard `q` against the shard `k`, in local indices; empty when no query sees any key.

        Raises TooManyTiles when there are too many of them.
        """
        ends = [segment.start + (segment.count - 1) * segment.step for segment in (*q, *k) if segment.count]
        regions = regions_of(self, max(ends, default=-1) + 1)
        return tile_table(regions, ShardSegments((q,)), ShardSegments((k,)), self.merges).tiles(0)


def check_length(mask: Mask, seq_len: int) -> None:
    """Raises ValueError with the mask's `unsupported_reason`."""
    unsupported_reason = mask.unsupported_reason(seq_len)
    if unsupported_reason:
        raise ValueError(unsupported_reason)


@lru_cache(maxsize=64)
def regions_of(mask: Mask, tokens: int) -> Integers:
    """The mask's regions as an array, [regions, fields of `Region`]."""
    return np.asarray(mask.regions(tokens), dtype=np.int64).reshape(-1, len(Region._fields))


@dataclass(frozen=True, slots=True)
class FirstRows(Mask):
    """Another mask as the queries before position `cut` see it; later queries see nothing.

    Shards ascend in position, so the tiles' query rows are the first of the local tokens. Keys that no such query sees
    are in no tile, and so are not sent.
    """

    mask: Mask
    cut: int

    @property
    def merges(self) -> bool:  # type: ignore[override]
        return self.mask.merges

    def unsupported_reason(self, seq_len: int) -> str | None:
        return self.mask.unsupported_reason(seq_len)

    def regions(self, tokens: int) -> Integers:
        regions = regions_of(self.mask, tokens).copy()
        q_start, q_stop, k_start, k_stop, _, right = regions.T
        np.minimum(q_stop, self.cut, out=q_stop)
        # Keys are cut where queries are, so that a causal shard against itself stays one kernel call.
        np.minimum(k_stop, self.cut + right, out=k_stop)
        return regions[(q_start < q_stop) & (k_start < k_stop)]

    def __str__(self) -> str:
        """For messages; experiment files have no such mask."""
        return f"{self.mask} before {self.cut}"
