"""Areas, spans and restricted masks, from the tables of all ranks, against every pair of tokens."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from engine.attention.geometry.layout import LAYOUTS
from engine.attention.geometry.rectangles import Region
from engine.attention.geometry.tile_table import outermost_spans, tile_table
from engine.attention.masks import (
    BlockSparse,
    Causal,
    Documents,
    LocalGlobal,
    Mask,
    rank_areas,
)
from engine.attention.masks.mask import FirstRows, regions_of
from engine.attention.masks.pairs import pair_table, shards_of
from engine.attention.reference import visibility
from tests.engine.attention.planning.test_fast_plans import cut, random_layout, random_mask
from tests.positions import shard_positions


@pytest.mark.parametrize("seed", range(8))
def test_every_pair_has_the_area_that_the_mask_shows_to_its_tokens(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(25):
        ranks = generator.choice([1, 2, 3, 5])
        layout = random_layout(generator, ranks)
        seq_len = layout.chunks(ranks) * generator.choice([1, 2, 5, 12])
        mask = random_mask(generator, seq_len)
        if generator.random() < 0.5:
            mask = FirstRows(mask, generator.randint(0, seq_len))
        seen = visibility(mask, seq_len)
        shards = [torch.tensor(shard_positions(layout, seq_len, ranks, rank)) for rank in range(ranks)]
        table = pair_table(mask, layout, seq_len, ranks)
        for q_rank, k_rank in itertools.product(range(ranks), repeat=2):
            expected = int(seen[shards[q_rank]][:, shards[k_rank]].sum())
            assert table.area(q_rank, k_rank) == expected, (mask, layout, seq_len)
        assert rank_areas(mask, layout, seq_len, ranks) == [int(seen[shard].sum()) for shard in shards]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("first_rows", [None, 3000])
def test_spans_of_many_documents_are_those_of_their_tiles(causal: bool, first_rows: int | None) -> None:
    generator = random.Random(2)
    mask: Mask = Documents(cut(generator, 1 << 13, 200), causal)
    if first_rows is not None:
        mask = FirstRows(mask, first_rows)
    regions, shards = regions_of(mask, 1 << 13), shards_of(LAYOUTS["striped"], 1 << 13, 4)
    tiles, found = tile_table(regions, shards, shards), outermost_spans(regions, shards, 4)
    assert found is not None
    for span, queries in zip(found, (True, False), strict=True):
        assert np.array_equal(span, np.stack(tiles.spans(queries)[:2]))
    assert tiles.counts.min() > 4


def test_spans_are_left_to_tiles_where_regions_do_not_ascend_or_are_few() -> None:
    shards = shards_of(LAYOUTS["striped"], 64, 4)
    for mask in (BlockSparse(LocalGlobal(1, 1), 4), Causal(), Documents([1] * 64)):
        assert outermost_spans(regions_of(mask, 64), shards, 4) is None


class Prefix(Mask):
    """What a newcomer writes: the first ten tokens see each other, later ones are causal."""

    def regions(self, tokens: int) -> list[Region]:
        known = min(10, tokens)
        return [Region(0, known, 0, known), Region(known, tokens, 0, tokens, right=0)]

    def __str__(self) -> str:
        return "prefix"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_new_mask_needs_its_regions_alone(layout: str) -> None:
    mask = Prefix()
    rows, keys = torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij")
    expected = (keys <= rows) | ((rows < 10) & (keys < 10))
    assert torch.equal(visibility(mask, 24), expected)
    assert sum(rank_areas(mask, LAYOUTS[layout], 24, 4)) == mask.area(24) == int(expected.sum())
