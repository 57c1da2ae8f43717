"""Which key blocks a query block sees: an explicit grid, or a rule that fits sequences of any length."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.shard_table import Integers


class Pattern(Protocol):
    """A rule over block numbers."""

    def blocks(self) -> int | None:
        """Blocks per side of the pattern; None when it fits any number."""
        ...

    def visible(self, block: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Runs [start, stop) of key blocks within [first, last) that a query block sees, ascending."""
        ...

    def shown(self, blocks: Integers, keys: Integers) -> NDArray[np.bool_]:
        """Whether query block `blocks[i]` sees key block `keys[i]`; the arrays are broadcast."""
        ...

    def visible_before(self, blocks: Integers, limits: Integers) -> Integers:
        """How many key blocks in front of block `limits[i]` the query block `blocks[i]` sees."""
        ...

    def __hash__(self) -> int: ...

    def __str__(self) -> str:
        """How experiment files write it; `parse_pattern` reads it back."""
        ...


@dataclass(frozen=True, slots=True)
class Grid:
    """An explicit square grid, one string of 0 and 1 per query block: compact, hashed once, read as it looks."""

    rows: tuple[str, ...]

    def __post_init__(self) -> None:
        size = len(self.rows)
        if not size or any(len(row) != size or set(row) - {"0", "1"} for row in self.rows):
            sizes = sorted({len(row) for row in self.rows})
            raise ValueError(
                f"block grid has {size} rows of {sizes} blocks; give as many key blocks as query blocks, each 0 or 1"
            )

    @classmethod
    def of(cls, blocks: Any) -> Grid:
        """From nested sequences or a boolean tensor or array, query blocks x key blocks.

        Raises ValueError when it is not a square grid of booleans.
        """
        values = blocks.tolist() if hasattr(blocks, "tolist") else blocks
        try:
            rows = tuple(tuple(row) for row in values)
        except TypeError:
            raise ValueError(
                f"block grid {blocks!r} has no rows; give a boolean for every query block and key block"
            ) from None
        if any(value not in (0, 1) for row in rows for value in row):
            raise ValueError("block grid holds values other than true and false; give booleans")
        return cls(tuple("".join("1" if value else "0" for value in row) for row in rows))

    def blocks(self) -> int | None:
        return len(self.rows)

    def visible(self, block: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        for run in re.finditer("1+", self.rows[block][first:last]):
            yield first + run.start(), first + run.end()

    def cells(self) -> NDArray[np.bool_]:
        """The grid as an array, [query blocks, key blocks]."""
        return np.frombuffer("".join(self.rows).encode(), dtype=np.uint8).reshape(len(self.rows), -1) == ord("1")

    def shown(self, blocks: Integers, keys: Integers) -> NDArray[np.bool_]:
        cells: NDArray[np.bool_] = self.cells().reshape(-1).take(blocks * len(self.rows) + keys)  # faster than two axes
        return cells

    def visible_before(self, blocks: Integers, limits: Integers) -> Integers:
        counted = np.arange(len(self.rows)) < limits[..., None]
        return np.count_nonzero(self.cells()[blocks] & counted, axis=-1)

    def __str__(self) -> str:
        return "/".join(self.rows)


@dataclass(frozen=True, slots=True)
class LocalGlobal:
    """Blocks see those up to `reach` away; the first `global_blocks` blocks see all and are seen by all.

    Source: Longformer (arXiv:2004.05150) and BigBird (arXiv:2007.14062), without the random blocks.
    """

    reach: int
    global_blocks: int = 0

    def __post_init__(self) -> None:
        if self.reach < 0 or self.global_blocks < 0:
            raise ValueError(
                f"local_global pattern has reach {self.reach} and {self.global_blocks} global blocks; give counts >= 0"
            )

    def blocks(self) -> int | None:
        return None

    def visible(self, block: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        if block < self.global_blocks:
            yield first, last
            return
        yield from _within([(0, self.global_blocks), (block - self.reach, block + self.reach + 1)], first, last)

    def shown(self, blocks: Integers, keys: Integers) -> NDArray[np.bool_]:
        return (abs(blocks - keys) <= self.reach) | (blocks < self.global_blocks) | (keys < self.global_blocks)

    def visible_before(self, blocks: Integers, limits: Integers) -> Integers:
        everywhere = np.minimum(self.global_blocks, limits)
        start, stop = np.maximum(blocks - self.reach, everywhere), np.minimum(blocks + self.reach + 1, limits)
        return np.where(blocks < self.global_blocks, limits, everywhere + np.maximum(0, stop - start))

    def __str__(self) -> str:
        return f"local_global-{self.reach}-{self.global_blocks}"


@dataclass(frozen=True, slots=True)
class Strided:
    """Blocks see those less than `stride` away, and every stride-th block of the sequence.

    Source: the strided pattern of Sparse Transformers (arXiv:1904.10509), in blocks.
    """

    stride: int

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"strided pattern has stride {self.stride}; give a number of blocks of at least 1")

    def blocks(self) -> int | None:
        return None

    def visible(self, block: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        stride = self.stride
        start, stop = block - stride + 1, block + stride
        if stride == 1:
            if first < last:
                yield first, last
            return
        column = first - (first + 1) % -stride  # the first of every stride-th block
        while column < min(start - 1, last):
            yield column, column + 1
            column += stride
        # A column beside the window is part of its run; one of any stride consecutive blocks lies inside.
        run = max(start - (start % stride == 0), first), min(stop + ((stop + 1) % stride == 0), last)
        if run[0] < run[1]:
            yield run
        column = max(stop + 1, first)
        for after in range(column - (column + 1) % -stride, last, stride):
            yield after, after + 1

    def shown(self, blocks: Integers, keys: Integers) -> NDArray[np.bool_]:
        return (abs(blocks - keys) < self.stride) | ((keys + 1) % self.stride == 0)

    def visible_before(self, blocks: Integers, limits: Integers) -> Integers:
        stop = np.minimum(blocks + self.stride, limits)
        start = np.minimum(np.maximum(blocks - self.stride + 1, 0), stop)
        return limits // self.stride + (stop - start) - (stop // self.stride - start // self.stride)

    def __str__(self) -> str:
        return f"strided-{self.stride}"


def _within(runs: list[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Ascending runs cut to [first, last), those that overlap or touch as one."""
    cut = [(max(start, first), min(stop, last)) for start, stop in runs]
    merged: list[tuple[int, int]] = []
    for start, stop in cut:
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    yield from merged


def parse_pattern(text: str) -> Pattern:
    """Read `strided-STRIDE`, `local_global-REACH-GLOBAL`, or a grid as rows of 0 and 1 joined by `/`.

    Raises ValueError for anything else.
    """
    if match := re.fullmatch(r"strided-(\d+)", text):
        return Strided(int(match[1]))
    if match := re.fullmatch(r"local_global-(\d+)-(\d+)", text):
        return LocalGlobal(int(match[1]), int(match[2]))
    if re.fullmatch(r"[01]+(/[01]+)*", text):
        return Grid(tuple(text.split("/")))
    raise ValueError(
        f"block pattern {text!r} is unknown; write strided-STRIDE, local_global-REACH-GLOBAL (in blocks) or rows "
        "of 0 and 1 joined by /"
    )
