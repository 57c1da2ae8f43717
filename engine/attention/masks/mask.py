"""The interface of every mask, and a mask restricted to the queries before a position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.layout import Segment, split_at
from engine.attention.geometry.shard_table import Integers, ShardTable, by_pair
from engine.attention.geometry.tile_table import TileTable
from engine.attention.geometry.tiles import Tile, join


class PairSpans(NamedTuple):
    """What a mask knows of all pairs of ranks without their tiles; arrays are [query ranks, key ranks]."""

    queries: tuple[Integers, Integers]  # [start, stop) of the local queries in tiles; (0, 0) where there are none
    keys: tuple[Integers, Integers]
    apart: NDArray[np.bool_]  # the tiles are few (`WAITING_PARTS`), and no token is in two of them
    unknown: NDArray[np.bool_]  # all this is to be read off the pair's tiles


class Mask(Protocol):
    """A rule over global positions. Frozen and hashable, so the tiles of two shards are computed once."""

    @property
    def band_kinds(self) -> frozenset[str] | None:
        """The kinds of band that its tiles may have under any layout, where that is known: it decides which kernels can
        run. None: they are read off the tiles."""
        ...

    def pair_keys(self, shards: ShardTable) -> Sequence[Integers] | None:
        """Numbers of every pair of ranks, [query ranks, key ranks] each: pairs with equal numbers have equal tiles.

        None when the mask has no such numbers for these shards.
        """
        ...

    def pair_spans(self, shards: ShardTable) -> PairSpans | None:
        """What is known of all pairs of ranks without their tiles, or None."""
        ...

    def unsupported_reason(self, seq_len: int) -> str | None:
        """One sentence why the mask does not describe a sequence of this length, or None."""
        ...

    def tiles(self, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> tuple[Tile, ...]:
        """Work of the shard `q` against the shard `k`, in local indices; empty when no query sees any key."""
        ...

    def tile_table(self, shards: ShardTable, q_ranks: Integers, k_ranks: Integers) -> TileTable | None:
        """`tiles` of the shards of each query rank and key rank, as arrays; None where they are to be formed pair by
        pair."""
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

    @property
    def band_kinds(self) -> frozenset[str] | None:
        return self.mask.band_kinds

    def pair_keys(self, shards: ShardTable) -> Sequence[Integers] | None:
        keys = self.mask.pair_keys(shards)
        before = shards.count_before(self.cut)
        return None if keys is None else by_pair(before, before, keys)

    def pair_spans(self, shards: ShardTable) -> PairSpans | None:
        whole = self.mask.pair_spans(shards)
        if whole is None:
            return None
        rows = shards.count_before(self.cut).sum(axis=1)
        # What no query sees, no query before the cut sees; all other pairs are asked.
        seen = ((whole.queries[1] > whole.queries[0]) | whole.unknown) & (rows > 0)[:, None]
        nothing = np.zeros_like(whole.queries[0])
        return PairSpans((nothing, nothing), (nothing, nothing), ~seen, seen)

    def tile_table(self, shards: ShardTable, q_ranks: Integers, k_ranks: Integers) -> None:
        return None

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
