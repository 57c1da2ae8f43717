"""What a mask is; masks that are one band of keys around each query; and a mask cut after its first rows.

A mask lists disjoint regions in global positions (`Mask.regions`). Tiles between shards, visible pairs and plans follow
from them under every layout: `engine.attention.geometry.tile_table`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from operator import index
from types import MemberDescriptorType
from typing import ClassVar

import numpy as np

from engine.attention.geometry.layout import Segment
from engine.attention.geometry.rectangles import Region, region_areas
from engine.attention.geometry.shards import ShardSegments
from engine.attention.geometry.tile_table import tile_table
from engine.attention.geometry.tiles import NO_LIMIT, Integers, Tile

_names: dict[Mask, str] = {}
_named: dict[str, Mask] = {}
_numbers = itertools.count()


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

    def name_in_programs(self) -> str:
        """What compiled programs have in place of the mask (`engine.attention.compiled`): the same for equal masks.
        Empty for one that a program makes: while torch traces, it has no fields."""
        if is_dataclass(self) and not all(self._is_set(each.name) for each in fields(self)):
            return ""
        if self not in _names:
            _names[self] = f"mask {next(_numbers)}"
            _named[_names[self]] = self
        return _names[self]

    def _is_set(self, name: str) -> bool:
        """Whether this object has a value of its own for a field, beside a default of its class."""
        slot = isinstance(getattr(type(self), name, None), MemberDescriptorType)
        return name in getattr(self, "__dict__", ()) or (slot and hasattr(self, name))

    def area(self, seq_len: int) -> int:
        """Visible (query, key) pairs of a whole sequence, exactly. Raises ValueError with `unsupported_reason`."""
        check_length(self, seq_len)
        return int(region_areas(regions_of(self, seq_len), ShardSegments.of((Segment(0, seq_len),)))[0])

    def shows_later_keys(self, seq_len: int) -> bool:
        """Whether some query sees a key that comes after it, so that a model can read the token it is to predict."""
        q_start, q_stop, k_start, k_stop, left, right = regions_of(self, seq_len).T
        # A region shows pairs whose key is `least` to `most` tokens later than the query.
        least = np.maximum(k_start - (q_stop - 1), -left)
        most = np.minimum(k_stop - 1 - q_start, right)
        return bool(((most >= 1) & (most >= least)).any())

    def tiles(self, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> tuple[Tile, ...]:
        """Work of the shard `q` against the shard `k`, in local indices; empty when no query sees any key.

        Raises TooManyTiles when there are too many of them.
        """
        ends = [segment.start + (segment.count - 1) * segment.step for segment in (*q, *k) if segment.count]
        regions = regions_of(self, max(ends, default=-1) + 1)
        return tile_table(regions, ShardSegments.of(q), ShardSegments.of(k), self.merges).tiles(0)


def mask_named(name: str) -> Mask:
    """The mask that has given this as its `name_in_programs`."""
    return _named[name]


def check_is_mask(mask: object) -> None:
    """Raises ValueError for what is no object of a mask: a name, a class, a tensor."""
    if isinstance(mask, type) or not hasattr(mask, "tiles"):
        found = repr(mask)
        found = f"a {type(mask).__name__}" if "\n" in found or len(found) > 60 else found
        raise ValueError(f"mask is {found}; pass an object such as burst.Causal(), or parse_mask of a setting")


def check_mask(mask: object) -> None:
    """Raises ValueError for what is no mask (`check_is_mask`), and for a mask that waits for its lengths."""
    check_is_mask(mask)
    if reason := getattr(mask, "without_lengths", None):
        raise ValueError(reason)


def check_length(mask: Mask, seq_len: int) -> None:
    """Raises ValueError with the mask's `unsupported_reason`."""
    unsupported_reason = mask.unsupported_reason(seq_len)
    if unsupported_reason:
        raise ValueError(unsupported_reason)


def whole_number(value: object, what: str, least: int = 0) -> int:
    """A count as a plain int. Raises ValueError for what is no whole number from `least` on, and for one beyond every
    sequence: `what` says what it counts."""
    if not hasattr(value, "__index__") or isinstance(value, bool) or not least <= (found := index(value)) < NO_LIMIT:
        raise ValueError(f"{what} {value!r}; give a whole number from {least} to 2^40 - 1")
    return found


@lru_cache(maxsize=64)
def regions_of(mask: Mask, tokens: int) -> Integers:
    """The mask's regions as an array, [regions, fields of `Region`]."""
    return np.asarray(mask.regions(tokens), dtype=np.int64).reshape(-1, len(Region._fields))


@dataclass(frozen=True, slots=True)
class Full(Mask):
    """Every query sees every key."""

    def regions(self, tokens: int) -> list[Region]:
        return [Region(0, tokens, 0, tokens)]

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """A query sees itself and all earlier keys."""

    def regions(self, tokens: int) -> list[Region]:
        return [Region(0, tokens, 0, tokens, right=0)]

    def __str__(self) -> str:
        return "causal"


@dataclass(frozen=True, slots=True)
class SlidingWindow(Mask):
    """A query sees itself, `left` tokens before it and `right` after it.

    The sequence's first `global_tokens` tokens are global: every query sees them, and they see every key, but where
    `right` is 0 no query sees a later one. Sources: Longformer (arXiv:2004.05150); as attention sinks
    StreamingLLM (arXiv:2309.17453).
    """

    left: int
    right: int = 0
    global_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("left", "right", "global_tokens"):
            object.__setattr__(self, name, whole_number(getattr(self, name), f"sliding window has {name}"))

    def regions(self, tokens: int) -> list[Region]:
        if not self.global_tokens:
            return [Region(0, tokens, 0, tokens, self.left, self.right)]
        known = min(self.global_tokens, tokens)
        apart = min(known + self.left + 1, tokens)  # from here on a key lies between the window and the global tokens
        if self.right == 0:
            first = [Region(0, apart, 0, apart, right=0)]
        else:
            first = [Region(0, known, 0, tokens), Region(known, apart, 0, tokens, right=self.right)]
        return [*first, Region(apart, tokens, 0, tokens, self.left, self.right), Region(apart, tokens, 0, known)]

    def __str__(self) -> str:
        sides = f"sliding_window:{self.left}"
        if self.global_tokens:
            return f"{sides}:{self.right}:{self.global_tokens}"
        return f"{sides}:{self.right}" if self.right else sides


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
