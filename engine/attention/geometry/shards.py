"""The shards of several ranks as integer arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.attention.geometry.layout import Segment
from engine.attention.geometry.tiles import Integers


@dataclass(frozen=True, eq=False)
class ShardSegments:
    """The segments of some shards as arrays, in order. All have one distance of neighbouring positions."""

    bounds: Integers  # [shards + 1]: shard i has segments bounds[i] to bounds[i + 1] - 1
    start: Integers  # first position of each segment
    count: Integers  # tokens of each segment
    step: int = 1

    @classmethod
    def of(cls, *shards: tuple[Segment, ...]) -> ShardSegments:
        """From the segments of each shard."""
        found = [segment for shard in shards for segment in shard]
        (step,) = {segment.step for segment in found} or {1}
        bounds = np.cumsum([0, *map(len, shards)])
        start, count = (np.array([getattr(each, name) for each in found], np.int64) for name in ("start", "count"))
        return cls(bounds, start, count, step)

    @classmethod
    def of_runs(cls, shards: int, shard: Integers, start: Integers, count: Integers) -> ShardSegments:
        """From runs of consecutive positions in any order. Those of a shard that touch become one."""
        order = np.argsort(shard * (int(start.max(initial=0)) + 1) + start)
        shard, start, count = shard[order], start[order], count[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (shard[1:] != shard[:-1]) | (start[1:] != start[:-1] + count[:-1])
        firsts = np.flatnonzero(new)
        count = np.add.reduceat(count, firsts) if len(firsts) else count
        return cls(np.searchsorted(shard[firsts], np.arange(shards + 1)), start[firsts], count)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def segments(self, shard: int) -> tuple[Segment, ...]:
        """Those of one shard."""
        own = self._own(shard)
        runs = zip(self.start[own].tolist(), self.count[own].tolist(), strict=True)
        return tuple(Segment(start, count, self.step) for start, count in runs)

    def bytes_of(self, shard: int) -> bytes:
        """The segments of a shard: equal bytes are equal positions, where the step is the same."""
        own = self._own(shard)
        return self.start[own].tobytes() + self.count[own].tobytes()

    def _own(self, shard: int) -> slice:
        return slice(*self.bounds[shard : shard + 2].tolist())

    @cached_property
    def shard(self) -> Integers:
        """Of each segment."""
        return np.repeat(np.arange(len(self)), np.diff(self.bounds))

    @cached_property
    def tokens(self) -> Integers:
        """Of each shard."""
        passed = np.concatenate(([0], np.cumsum(self.count)))
        return np.diff(passed[self.bounds])

    @cached_property
    def offset(self) -> Integers:
        """Local tokens in front of each segment."""
        before = np.cumsum(self.count) - self.count
        return before - (np.cumsum(self.tokens) - self.tokens)[self.shard]

    def rows_before(self, cuts: Integers) -> Integers:
        """Local tokens of each shard before global positions, [shards, cuts]."""
        rows = np.zeros((len(self), len(cuts)), dtype=np.int64)
        of_segments = np.clip(-((self.start[:, None] - cuts) // self.step), 0, self.count[:, None])
        np.add.at(rows, self.shard, of_segments)
        return rows
