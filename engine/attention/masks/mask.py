"""What every mask answers."""

from __future__ import annotations

from typing import Protocol

from engine.attention.geometry.layout import Segment
from engine.attention.geometry.tiles import Tile


class Mask(Protocol):
    """A rule over global positions. Frozen and hashable, so the tiles of a meeting are computed once."""

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
        """Visible (query, key) pairs of a whole sequence, exactly. Raises ValueError with the mask's refusal."""
        ...

    def __hash__(self) -> int: ...

    def __str__(self) -> str:
        """The setting this mask is written as in experiment files; `parse_mask` reads it back."""
        ...
