"""What is formed for many blocks at once equals what is formed block by block."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.attention.geometry.layout import LAYOUTS
from engine.attention.masks import BlockSparse, Documents, LocalGlobal, Strided
from engine.attention.masks import blocks as block_masks


@pytest.mark.parametrize("seed", range(3))
def test_rectangles_of_many_blocks_are_those_found_block_by_block(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(60):
        blocks, size = generator.randint(1, 24), generator.randint(1, 6)
        grid = [[generator.random() < generator.choice([0.1, 0.5, 0.9]) for _ in range(blocks)] for _ in range(blocks)]
        pattern = generator.choice([LocalGlobal(generator.randint(0, 3), 1), Strided(generator.randint(1, 5)), grid])
        causal, seq_len = generator.random() < 0.6, blocks * size
        masks = [BlockSparse(pattern, size, causal), Documents([size] * blocks, causal)]
        layout, ranks = LAYOUTS[generator.choice(sorted(LAYOUTS))], generator.choice([1, 2, 3])
        if seq_len % layout.chunks(ranks):
            continue
        shards = [layout.segments(seq_len, ranks, rank) for rank in range(ranks)]
        for mask, q, k in itertools.product(masks, shards, shards):
            for pair in block_masks._segment_pairs(q, k, causal):
                one_by_one = block_masks.rectangles(block_masks._visible_rows(mask, pair))
                assert block_masks._rectangles_in_arrays(mask, pair) == one_by_one, (mask, q, k)


@pytest.mark.parametrize("causal", [True, False])
def test_the_keys_that_blocks_see_are_counted_as_block_by_block(causal: bool) -> None:
    generator = random.Random(0)
    for _ in range(100):
        blocks, size = generator.randint(1, 12), generator.randint(1, 5)
        grid = [[generator.random() < 0.5 for _ in range(blocks)] for _ in range(blocks)]
        for pattern in (LocalGlobal(generator.randint(0, 3), generator.randint(0, 3)), Strided(blocks // 2 + 1), grid):
            mask, seq_len = BlockSparse(pattern, size, causal), blocks * size - generator.randrange(size)
            assert mask.keys_seen(seq_len) == block_masks.BlockMask.keys_seen(mask, seq_len), (mask, seq_len)
