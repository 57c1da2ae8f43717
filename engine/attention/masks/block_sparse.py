"""Block-sparse attention: a grid says which blocks of keys each block of queries sees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.shard_table import Integers, ShardTable, by_pair
from engine.attention.masks.block_cells import BlockRuns
from engine.attention.masks.block_rows import Run
from engine.attention.masks.blocks import BlockMask
from engine.attention.masks.patterns import Grid, LocalGlobal, Pattern, Strided

if TYPE_CHECKING:
    from torch import Tensor


_MOST_BLOCKS = 16  # of a rank, up to which pairs of ranks are compared by the cells between their blocks


@dataclass(frozen=True, slots=True)
class BlockSparse(BlockMask):
    """Queries of block a see keys of block b where `blocks[a][b]` is true, with `causal` none that comes later.

    Args:
        blocks: square boolean grid, query blocks x key blocks (nested sequences or a tensor), or a pattern of
            `engine.attention.masks.patterns`, which fits sequences of any length. Kept as a pattern.
        block_size: tokens per block. The last block of a sequence may be shorter.
        causal: hide keys that come after the query, inside blocks too.
    """

    blocks: Pattern | Tensor | tuple[tuple[bool, ...], ...] | list[list[bool]]
    block_size: int
    causal: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; give a number of tokens of at least 1")
        if not isinstance(self.blocks, Grid | LocalGlobal | Strided):
            object.__setattr__(self, "blocks", Grid.of(self.blocks))

    @property
    def pattern(self) -> Pattern:
        """`blocks`, in the one form it is kept in."""
        pattern: Any = self.blocks
        return pattern

    def unsupported_reason(self, seq_len: int) -> str | None:
        blocks, needed = self.pattern.blocks(), -(-seq_len // self.block_size)
        if blocks is None or blocks == needed:
            return None
        return (
            f"the block grid has {blocks} blocks of {self.block_size} tokens per side and {seq_len} tokens are "
            f"{needed} of them; give a grid of that size or another block_size"
        )

    def pair_keys(self, shards: ShardTable) -> Sequence[Integers] | None:
        pattern = self.pattern
        if shards.step > 1:
            return super(BlockSparse, self).pair_keys(shards)
        first, last = shards.start // self.block_size, (shards.start + shards.count - 1) // self.block_size
        most = int((last - first).max()) + 1
        joined = first[:, 1:] == last[:, :-1]  # one block at the end of a segment and at the start of the next
        ranks = np.concatenate((shards.count, shards.start % self.block_size, joined), axis=1)
        hi = shards.limits(None, 0 if self.causal else None)
        if isinstance(pattern, LocalGlobal):
            ranks = np.concatenate((ranks, np.clip(pattern.global_blocks - first, 0, most)), axis=1)
            return by_pair(ranks, ranks, _apart(first, pattern.reach + most) + hi)
        if most * first.shape[1] <= 2 * _MOST_BLOCKS:
            runs = self.block_runs(shards)
            if runs.blocks.shape[1] <= _MOST_BLOCKS:
                return by_pair(ranks, ranks, self._cells_between(runs) + hi)
        if not isinstance(pattern, Strided):
            return None
        columns = np.concatenate((ranks, first % pattern.stride), axis=1)
        return by_pair(ranks, columns, _apart(first, pattern.stride + most) + hi)

    def _cells_between(self, runs: BlockRuns) -> list[Integers]:
        """What the blocks of every two ranks see of each other, [query ranks, key ranks] each: sixteen cells a
        number."""
        ranks, most = runs.blocks.shape
        wide = -(-most // 4) * 4
        blocks, held = np.zeros((ranks, wide), dtype=np.int32), np.zeros((ranks, wide), dtype=bool)
        blocks[:, :most], held[:, :most] = runs.blocks, runs.held
        blocks, held = blocks.reshape(-1), held.reshape(-1)  # two long axes are faster than four
        seen = self.pattern.shown(blocks[:, None], blocks) & held[:, None] & held
        cells = np.packbits(seen.reshape(ranks, wide, ranks, wide).swapaxes(1, 2)).view(np.uint16)
        return list(cells.reshape(ranks * ranks, -1).T.astype(np.int64).reshape(-1, ranks, ranks))

    def shown(self, queries: Integers, keys: Integers) -> NDArray[np.bool_]:
        return self.pattern.shown(queries, keys)

    def keys_seen(self, seq_len: int) -> tuple[Integers, Integers]:
        size, blocks = self.block_size, -(-seq_len // self.block_size)
        each = np.arange(blocks)
        whole = size * self.pattern.visible_before(each, each if self.causal else np.full_like(each, blocks))
        own = size * self.pattern.shown(each, each) if self.causal else np.zeros_like(each)
        missing = blocks * size - seq_len  # the last block is shorter
        if self.causal:
            own[-1] -= missing if own[-1] else 0
        else:
            whole -= missing * self.pattern.shown(each, np.full_like(each, blocks - 1))
        return whole, own

    def block_at(self, position: int) -> int:
        return position // self.block_size

    def first_position(self, block: int) -> int:
        return block * self.block_size

    def blocks_at(self, positions: Integers) -> Integers:
        return positions // self.block_size

    def first_positions(self, blocks: Integers) -> Integers:
        return blocks * self.block_size

    def visible(self, block: int, first: int, last: int) -> Iterator[Run]:
        return self.pattern.visible(block, first, last)

    def __str__(self) -> str:
        return f"block_sparse:{self.block_size}:{self.pattern}" + (":causal" if self.causal else "")


def _apart(first: Integers, near: int) -> list[Integers]:
    """How many blocks lie between the first blocks of every two segments, [query ranks, key ranks] each; those further
    apart than `near` are alike."""
    return [np.clip(q[:, None] - k, -near, near) for q, k in itertools.product(first.T, repeat=2)]
