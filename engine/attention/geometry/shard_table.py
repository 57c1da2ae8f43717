"""The segments of all ranks as integer arrays: what a plan asks of every pair of ranks is then a few array
operations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.layout import Layout, Segment

Integers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """Segments of some shards, [shards, segments]; a shard with fewer than others has empty ones behind its own."""

    start: Integers  # global position
    count: Integers
    step: int  # of all segments

    def rows_before(self, cuts: Integers) -> Integers:
        """Local tokens of each shard before global positions, [shards, cuts]; `cuts` are of each shard, or one row."""
        rows = np.zeros((len(self.start), cuts.shape[1]), dtype=np.int64)
        for start, count in zip(self.start.T[..., None], self.count.T[..., None], strict=True):
            rows += np.clip(-((start - cuts) // self.step), 0, count)
        return rows


@dataclass(frozen=True, eq=False)
class ShardTable(SegmentTable):
    """The shards of all ranks, in order."""

    segments: tuple[tuple[Segment, ...], ...]

    @property
    def offset(self) -> Integers:
        """Local tokens in front of each segment."""
        return np.cumsum(self.count, axis=1) - self.count

    def count_before(self, cut: int) -> Integers:
        """Positions of each segment before `cut`."""
        return np.clip(-((self.start - cut) // self.step), 0, self.count)

    def limits(self, left: int | None, right: int | None) -> list[Integers]:
        """lo and hi of `geometry.tiles.segment_tile` where `left` and `right` are given, by query segment and key
        segment: [query ranks, key ranks] each.

        Limits that hide nothing of a pair of segments, or all of it, are one number each: pairs with equal numbers have
        equal tiles.
        """
        found = []
        segments = list(zip(self.start.T, self.count.T, strict=True))
        for (q_start, rows), (start, columns) in itertools.product(segments, repeat=2):
            distance, rows = start - q_start[:, None], rows[:, None]
            if left is not None:
                found.append(np.clip(-((left + distance) // self.step), 1 - rows, columns))
            if right is not None:
                found.append(np.clip((right - distance) // self.step, -rows, columns - 1))
        return found

    def by_segments(self, table: NDArray[Any]) -> NDArray[Any]:
        """A table of all segments against all, in the order of `start.T`, as [query and key segments, query ranks, key
        ranks]. Two long axes, and then ranks in the last ones, are faster than short ones."""
        ranks, segments = self.start.shape
        return table.reshape(segments, ranks, segments, ranks).swapaxes(1, 2)


@lru_cache(maxsize=64)
def shard_table(layout: Layout, seq_len: int, cp_size: int) -> ShardTable:
    """The shards of a sequence."""
    return table_of(tuple(layout.segments(seq_len, cp_size, rank) for rank in range(cp_size)))


def table_of(segments: tuple[tuple[Segment, ...], ...]) -> ShardTable:
    """Some shards, by their segments."""
    most = max(map(len, segments))
    padded = [[(s.start, s.count) for s in shard] + [(0, 0)] * (most - len(shard)) for shard in segments]
    table = np.array(padded, dtype=np.int64).reshape(len(segments), most, 2)
    (step,) = {segment.step for shard in segments for segment in shard}
    return ShardTable(table[..., 0], table[..., 1], step, segments)


def by_pair(of_query_rank: Integers, of_key_rank: Integers, of_pairs: Iterable[Integers]) -> list[Integers]:
    """Numbers of query ranks, of key ranks [ranks, ...] and of pairs, [query ranks, key ranks] each, as those of pairs.

    The first stands for all those of the two ranks, and says whether the pair is a rank with itself.
    """
    ranks = len(of_query_rank)
    of_two = numbered(of_query_rank)[:, None] * ranks + numbered(of_key_rank)
    return [2 * of_two + np.eye(ranks, dtype=np.int64), *of_pairs]


def numbered(arrays: NDArray[Any]) -> Integers:
    """A number for each array along the first axis, from 0 in the order in which they appear; equal ones have one."""
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(each.tobytes(), len(numbers)) for each in arrays])
