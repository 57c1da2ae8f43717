"""Block-sparse attention: an explicit grid, or a pattern that fits any length, says which blocks of keys each block of
queries sees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.tiles import NO_LIMIT, Integers
from engine.attention.masks.mask import Mask, whole_number

if TYPE_CHECKING:
    from torch import Tensor


class BlockPattern(Protocol):
    """A rule over block numbers."""

    def blocks(self) -> int | None:
        """Blocks per side of the pattern; None when it fits any number."""
        ...

    def rectangles(self, blocks: int) -> Integers:
        """Disjoint rectangles of what the first `blocks` blocks see of each other: [rectangles; first query block,
        behind the last one, first key block, behind the last one]. Query blocks that see different key blocks are in
        different rectangles, or under one rectangle each."""
        ...

    def __hash__(self) -> int: ...

    def __str__(self) -> str:
        """How experiment files write it; `parse_pattern` reads it back."""
        ...


@dataclass(frozen=True, slots=True)
class BlockGrid:
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
    def of(cls, blocks: Tensor | NDArray[np.bool_] | Sequence[Sequence[bool]]) -> BlockGrid:
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

    def rectangles(self, blocks: int) -> Integers:
        size = len(self.rows)
        cells = np.frombuffer("".join(self.rows).encode(), dtype=np.uint8).reshape(size, size) == ord("1")
        framed = np.zeros((blocks, blocks + 2), dtype=bool)
        framed[:, 1:-1] = cells[:blocks, :blocks]
        row, edge = np.nonzero(framed[:, 1:] != framed[:, :-1])  # where a run starts, and behind its end, in turn
        return np.stack((row[::2], row[::2] + 1, edge[::2], edge[1::2]), axis=-1)

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
        for name in ("reach", "global_blocks"):
            object.__setattr__(self, name, whole_number(getattr(self, name), f"local_global pattern has {name}"))

    def blocks(self) -> int | None:
        return None

    def rectangles(self, blocks: int) -> Integers:
        known = min(self.global_blocks, blocks)
        rows = np.arange(known, blocks)
        near = np.stack((rows, rows + 1, np.maximum(known, rows - self.reach), rows + self.reach + 1), axis=-1)
        return np.concatenate(([(0, known, 0, blocks), (known, blocks, 0, known)], near))

    def __str__(self) -> str:
        return f"local_global-{self.reach}-{self.global_blocks}"


@dataclass(frozen=True, slots=True)
class Strided:
    """Blocks see those less than `stride` away, and every stride-th block of the sequence.

    Source: the strided pattern of Sparse Transformers (arXiv:1904.10509), in blocks.
    """

    stride: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", whole_number(self.stride, "strided pattern has stride", least=1))

    def blocks(self) -> int | None:
        return None

    def rectangles(self, blocks: int) -> Integers:
        rows, columns = np.arange(blocks), np.arange(self.stride - 1, blocks, self.stride)
        near = np.stack((rows, rows + 1, np.maximum(0, rows - self.stride + 1), rows + self.stride), axis=-1)
        before = np.stack((0 * columns, columns - self.stride + 1, columns, columns + 1), axis=-1)
        after = np.stack((columns + self.stride, np.full_like(columns, blocks), columns, columns + 1), axis=-1)
        return np.concatenate((near, before, after))

    def __str__(self) -> str:
        return f"strided-{self.stride}"


@dataclass(frozen=True, slots=True)
class BlockSparse(Mask):
    """Queries of block a see keys of block b where `blocks[a][b]` is true, with `causal` none that comes later.

    Args:
        blocks: square boolean grid, query blocks x key blocks (nested sequences or a tensor), or a pattern, which fits
            sequences of any length. Kept as a pattern.
        block_size: tokens per block. The last block of a sequence may be shorter.
        causal: hide keys that come after the query, inside blocks too.
    """

    blocks: BlockPattern | Tensor | Sequence[Sequence[bool]]
    block_size: int
    causal: bool = False

    merges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", whole_number(self.block_size, "block_size is", least=1))
        if self.causal not in (True, False):
            raise ValueError(f"a block-sparse mask has causal {self.causal!r}; give True or False")
        if not isinstance(self.blocks, BlockGrid | LocalGlobal | Strided):
            object.__setattr__(self, "blocks", BlockGrid.of(cast("Sequence[Sequence[bool]]", self.blocks)))

    @property
    def pattern(self) -> BlockPattern:
        """`blocks`, in the one form it is kept in."""
        return cast(BlockPattern, self.blocks)

    def unsupported_reason(self, seq_len: int) -> str | None:
        blocks, needed = self.pattern.blocks(), -(-seq_len // self.block_size)
        if blocks is None or blocks == needed:
            return None
        return (
            f"the block grid has {blocks} blocks of {self.block_size} tokens per side and {seq_len} tokens are "
            f"{needed} of them; give a grid of that size or another block_size"
        )

    def regions(self, tokens: int) -> Integers:
        blocks = self.pattern.rectangles(-(-tokens // self.block_size))
        corners = np.clip(blocks * self.block_size, 0, tokens)
        limits = np.empty((len(corners), 2), dtype=np.int64)
        limits[:] = NO_LIMIT, 0 if self.causal else NO_LIMIT
        some = (corners[:, 0] < corners[:, 1]) & (corners[:, 2] < corners[:, 3])
        return np.concatenate((corners, limits), axis=1)[some]

    def __str__(self) -> str:
        return f"block_sparse:{self.block_size}:{self.pattern}" + (":causal" if self.causal else "")


def parse_pattern(text: str) -> BlockPattern:
    """Read `strided-STRIDE`, `local_global-REACH-GLOBAL`, or a grid as rows of 0 and 1 joined by `/`.

    Raises ValueError for anything else.
    """
    if match := re.fullmatch(r"strided-(\d+)", text):
        return Strided(int(match[1]))
    if match := re.fullmatch(r"local_global-(\d+)-(\d+)", text):
        return LocalGlobal(int(match[1]), int(match[2]))
    if re.fullmatch(r"[01]+(/[01]+)*", text):
        return BlockGrid(tuple(text.split("/")))
    raise ValueError(
        f"block pattern {text!r} is unknown; write strided-STRIDE, local_global-REACH-GLOBAL (in blocks) or rows "
        "of 0 and 1 joined by /"
    )
