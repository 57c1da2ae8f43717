"""What is formed for many blocks at once equals what is formed block by block."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from engine.attention.geometry.layout import LAYOUTS, Gathered, Segment, SplitZigzag
from engine.attention.geometry.shard_table import shard_table
from engine.attention.masks import BlockSparse, Documents, LocalGlobal, Strided
from engine.attention.masks import blocks as block_masks
from engine.attention.masks.block_cells import cover
from engine.attention.masks.block_rows import tiles_by_rows
from engine.attention.masks.blocks import BlockMask
from engine.attention.planning.pair_table import hull


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
            tiles = tiles_by_rows(mask, shards.segments[q_rank], shards.segments[k_rank])
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


def keys_seen(mask: BlockMask, seq_len: int) -> list[tuple[int, int]]:
    """For each query block, the keys that all its queries see and those of its own that they see in part."""
    blocks = mask.block_at(seq_len - 1) + 1
    starts = [*(mask.first_position(block) for block in range(blocks)), seq_len]
    seen = []
    for block in range(blocks):
        limit = block if mask.causal else blocks
        whole = sum(starts[last] - starts[first] for first, last in mask.visible(block, 0, limit))
        own = mask.causal and any(mask.visible(block, block, block + 1))
        seen.append((whole, starts[block + 1] - starts[block] if own else 0))
    return seen


def test_the_keys_that_blocks_see_are_counted_as_block_by_block() -> None:
    generator = random.Random(0)
    for _ in range(300):
        blocks, size = generator.randint(1, 12), generator.randint(1, 5)
        mask = random_mask(generator, blocks, size)
        seq_len = blocks * size - generator.randrange(size)
        found = mask.keys_seen(seq_len)
        assert list(zip(*(each.tolist() for each in found), strict=True)) == keys_seen(mask, seq_len), (mask, seq_len)


def test_the_keys_that_some_queries_see_are_those_of_each_query() -> None:
    generator = random.Random(1)
    for _ in range(200):
        blocks, size = generator.randint(1, 8), generator.randint(1, 5)
        mask, seq_len = random_mask(generator, blocks, size), blocks * size
        step, start = generator.choice([1, 1, 2, 3, 7]), generator.randrange(seq_len)
        queries = Segment(start, generator.randint(1, (seq_len - 1 - start) // step + 1), step)
        shown = [[False] * seq_len for _ in range(seq_len)]
        for query in queries.positions():
            for first, last in mask.visible(mask.block_at(query), 0, mask.block_at(seq_len - 1) + 1):
                for key in range(mask.first_position(first), min(mask.first_position(last), seq_len)):
                    shown[query][key] = not mask.causal or key <= query
        assert mask.row_area(queries, seq_len) == sum(map(sum, shown)), (mask, queries)
