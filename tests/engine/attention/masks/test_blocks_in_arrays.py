"""What is formed for many blocks at once equals what is formed block by block."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from engine.attention.geometry.layout import LAYOUTS, Gathered, Segment, SplitZigzag
from engine.attention.geometry.shard_table import shard_table
from engine.attention.geometry.tiles import Tile, join
from engine.attention.masks import BlockSparse, Documents, LocalGlobal, Strided
from engine.attention.masks import blocks as block_masks
from engine.attention.masks.block_cells import cover
from engine.attention.masks.blocks import BlockMask
from engine.attention.planning.pair_table import hull


def one_by_one(mask: BlockMask, q: tuple[Segment, ...], k: tuple[Segment, ...]) -> tuple[Tile, ...]:
    """The tiles of two shards, rectangle by rectangle."""
    pairs = block_masks._segment_pairs(q, k, mask.causal)
    return tuple(join([tile for pair in pairs for tile in block_masks._pair_tiles(mask, pair)]))


def random_mask(generator: random.Random, blocks: int, size: int) -> BlockMask:
    causal, share = generator.random() < 0.6, generator.choice([0.1, 0.5, 0.9])
    grid = [[generator.random() < share for _ in range(blocks)] for _ in range(blocks)]
    local = LocalGlobal(generator.randint(0, 3), generator.randint(0, 2))
    pattern = generator.choice([local, Strided(generator.randint(1, 5)), grid])
    lengths = [generator.randint(1, 2 * size) for _ in range(blocks)]
    documents = Documents([*lengths, blocks * size], causal, repeat=True)
    return generator.choice([BlockSparse(pattern, size, causal), documents])


@pytest.mark.parametrize("seed", range(6))
def test_tiles_of_all_pairs_at_once_are_those_found_block_by_block(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_masks, "_CELLS_AT_ONCE", 2000)  # several batches
    generator = random.Random(seed)
    for _ in range(60):
        ranks, blocks, size = generator.randint(1, 6), generator.randint(1, 24), generator.randint(1, 9)
        layout = generator.choice([*LAYOUTS.values(), SplitZigzag(generator.choice([0.25, 0.5]))])
        if generator.random() < 0.2:
            members = tuple(tuple(range(first, 2 * ranks, ranks)) for first in range(ranks))
            layout = Gathered(LAYOUTS[generator.choice(["contiguous", "zigzag"])], members)
        unit = layout.chunks(ranks)
        seq_len = blocks * size // unit * unit
        if not seq_len:
            continue
        mask, shards = random_mask(generator, blocks, size), shard_table(layout, seq_len, ranks)
        pairs = list(itertools.product(range(ranks), repeat=2))
        q_ranks, k_ranks = np.array(pairs).T
        table = mask._tile_table(shards, q_ranks, k_ranks)
        spans = [table.spans(queries) for queries in (True, False)]
        for index, (q_rank, k_rank) in enumerate(pairs):
            tiles = one_by_one(mask, shards.segments[q_rank], shards.segments[k_rank])
            assert table.tiles(index) == tiles, (mask, layout, seq_len, q_rank, k_rank)
            assert table.calls(index) == tuple((tile.q, tile.k, tile.band) for tile in tiles)
            for (start, stop, apart), sides in zip(
                spans,
                ([(t.q_start, t.q_stop) for t in tiles], [(t.k_start, t.k_stop) for t in tiles]),
                strict=True,
            ):
                assert (start[index], stop[index]) == hull(sides)
                ordered = sorted(sides)
                assert apart[index] == all(a[1] <= b[0] for a, b in itertools.pairwise(ordered))


def test_equal_grids_and_grids_covered_by_columns_are_covered_as_alone() -> None:
    generator = np.random.default_rng(0)
    grids = generator.random((40, 7, 5)) < generator.choice([0.2, 0.5, 0.9], size=(40, 1, 1))
    grids[20:30] = grids[:10]
    together = cover(grids)
    for index, grid in enumerate(grids):
        alone = cover(grid[None])
        own = together.chosen(together.of == index)
        assert all(np.array_equal(a, b) for a, b in zip(own[1:], alone[1:], strict=True))
        painted = np.zeros(grid.shape, dtype=int)
        for top, bottom, left, right in zip(*own[1:], strict=True):
            painted[top:bottom, left:right] += 1
        assert np.array_equal(painted, grid)


@pytest.mark.parametrize("causal", [True, False])
def test_the_keys_that_blocks_see_are_counted_as_block_by_block(causal: bool) -> None:
    generator = random.Random(0)
    for _ in range(100):
        blocks, size = generator.randint(1, 12), generator.randint(1, 5)
        grid = [[generator.random() < 0.5 for _ in range(blocks)] for _ in range(blocks)]
        for pattern in (LocalGlobal(generator.randint(0, 3), generator.randint(0, 3)), Strided(blocks // 2 + 1), grid):
            mask, seq_len = BlockSparse(pattern, size, causal), blocks * size - generator.randrange(size)
            assert mask.keys_seen(seq_len) == block_masks.BlockMask.keys_seen(mask, seq_len), (mask, seq_len)
