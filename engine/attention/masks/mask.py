"""The interface of every mask, and a mask restricted to the queries before a position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from engine.attention.geometry.layout import Segment, split_at
from engine.attention.geometry.tiles import Tile, join


class Mask(Protocol):
    """A rule over global positions. Frozen and hashable, so the tiles of two shards are computed once."""

    def unsupported_reason(self, seq_len: int) -> str | None:
        """One sentence why the mask does not describe a sequence of this length, or None."""
        ...

    def tiles(self, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> tuple[Tile, ...]:
        """Work of the shard `q` against the shard `k`, in local indices; empty when no query sees any key."""
        ...

    def row_area(self, queries: Segment, seq_len: int) -> int:
        """Keys of the whole sequence that these queries see, summed over the queries."""
        ...

    def area(self, seq_len: int) -> int:
        """Visible (query, key) pairs of a whole sequence, exactly. Raises ValueError with `unsupported_reason`."""
        ...

    def __hash__(self) -> int: ...

    def __str__(self) -> str:
        """The setting this mask is written as in experiment files; `parse_mask` reads it back."""
        ...


@dataclass(frozen=True, slots=True)
class FirstRows:
    """Another mask as the queries before position `cut` see it; later queries see nothing.

    Shards ascend in position, so the tiles' query rows are the first of the local tokens. Keys that no such query sees
    are in no tile, and so are not sent.
    """

    mask: Mask
    cut: int

    def unsupported_reason(self, seq_len: int) -> str | None:
        return self.mask.unsupported_reason(seq_len)

    def tiles(self, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> tuple[Tile, ...]:
        first, _ = split_at(q, self.cut)
        if not first:
            return ()
        # Keys are cut where queries are, so that a causal shard against itself stays one kernel call.
        near, far = split_at(k, self.cut)
        offset = sum(segment.count for segment in near)
        tiles = list(self.mask.tiles(first, near)) if near else []
        if far:
            tiles += [tile.shifted(0, offset) for tile in self.mask.tiles(first, far)]
        return tuple(join(tiles))

    def row_area(self, queries: Segment, seq_len: int) -> int:
        count = queries.count_before(self.cut)
        return self.mask.row_area(replace(queries, count=count), seq_len) if count else 0

    def area(self, seq_len: int) -> int:
        return self.row_area(Segment(0, seq_len), seq_len)

    def __str__(self) -> str:
        """For messages; experiment files have no such mask."""
        return f"{self.mask} before {self.cut}"
