"""A band of keys around each query, and a few tokens at the start of the sequence that every query sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from engine.attention.geometry.layout import Segment, rows_before, split_at
from engine.attention.geometry.shard_table import Integers, ShardTable, by_pair
from engine.attention.geometry.tiles import Tile, join
from engine.attention.masks.bands import band_row_area, band_tiles


class _Part(NamedTuple):
    """Queries at positions [start, stop) see keys i - left ... i + right that lie before `keys`; None: no limit."""

    start: int
    stop: int | None
    left: int | None
    right: int | None
    keys: int | None = None


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A query sees itself, `left` tokens before it and `right` after it.

    The sequence's first `global_tokens` tokens are global: every query sees them, and they see every key, but where
    `right` is 0 no query sees a later one. Sources: Longformer (arXiv:2004.05150); as attention sinks
    StreamingLLM (arXiv:2309.17453).
    """

    left: int
    right: int = 0
    global_tokens: int = 0

    def __post_init__(self) -> None:
        if self.left < 0 or self.right < 0:
            raise ValueError(f"sliding window ({self.left}, {self.right}) has a negative side; give token counts >= 0")
        if self.global_tokens < 0:
            raise ValueError(f"sliding window has {self.global_tokens} global tokens; give a token count >= 0")

    def unsupported_reason(self, seq_len: int) -> str | None:
        return None

    @property
    def band_kinds(self) -> None:
        return None

    def pair_keys(self, shards: ShardTable) -> Sequence[Integers]:
        # Where the parts of the mask cut the segments.
        cuts = (self.global_tokens, self.global_tokens + self.left + 1) if self.global_tokens else ()
        ranks = np.concatenate((shards.count, *(shards.count_before(cut) for cut in cuts)), axis=1)
        return by_pair(ranks, ranks, shards.limits(self.left, self.right))

    def pair_spans(self, shards: ShardTable) -> None:
        return None

    def tile_table(self, shards: ShardTable, q_ranks: Integers, k_ranks: Integers) -> None:
        return None

    def tiles(self, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> tuple[Tile, ...]:
        return _window_tiles(self, q, k)

    def row_area(self, queries: Segment, seq_len: int) -> int:
        area = 0
        for part in self._parts():
            for segment in _between((queries,), part.start, part.stop):
                keys = seq_len if part.keys is None else min(part.keys, seq_len)
                area += band_row_area(segment, keys, part.left, part.right)
        return area

    def area(self, seq_len: int) -> int:
        return self.row_area(Segment(0, seq_len), seq_len)

    def __str__(self) -> str:
        sides = f"sliding_window:{self.left}"
        if self.global_tokens:
            return f"{sides}:{self.right}:{self.global_tokens}"
        return f"{sides}:{self.right}" if self.right else sides

    def _parts(self) -> Iterator[_Part]:
        """Disjoint bands that together are the mask."""
        if not self.global_tokens:
            yield _Part(0, None, self.left, self.right)
            return
        apart = self.global_tokens + self.left + 1  # from here on a key lies between the window and the global tokens
        if self.right == 0:
            yield _Part(0, apart, None, 0)
        else:
            yield _Part(0, self.global_tokens, None, None)
            yield _Part(self.global_tokens, apart, None, self.right)
        yield _Part(apart, None, self.left, self.right)
        yield _Part(apart, None, None, None, keys=self.global_tokens)


@lru_cache(maxsize=4096)
def _window_tiles(mask: SlidingWindow, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> tuple[Tile, ...]:
    tiles: list[Tile] = []
    for part in mask._parts():
        rows = _between(q, part.start, part.stop)
        # Keys after the last query of a causal part are cut off with the queries: a shard against itself stays square.
        limit = part.stop if part.right == 0 else part.keys
        keys = _between(k, 0, limit)
        if rows and keys:
            offset = rows_before(q, part.start)
            tiles += [tile.shifted(offset, 0) for tile in band_tiles(rows, keys, part.left, part.right)]
    return tuple(join(tiles))


def _between(segments: tuple[Segment, ...], start: int, stop: int | None) -> tuple[Segment, ...]:
    """The positions of `segments` in [start, stop)."""
    later = split_at(segments, start)[1] if start else segments
    return later if stop is None else split_at(later, stop)[0]
