"""Plans of masks with many blocks between two ranks equal those formed pair by pair."""

from __future__ import annotations

import random

import pytest

from engine.attention.geometry.layout import LAYOUTS, Ring
from engine.attention.masks import BlockSparse, LocalGlobal, Strided
from tests.engine.attention.planning.test_fast_plans import compare


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("causal", [True, False])
def test_patterns_and_grids_of_many_blocks_are_planned_as_pair_by_pair(layout: str, causal: bool) -> None:
    generator = random.Random(layout)
    for blocks, size, ranks in ((40, 2, 2), (64, 3, 4), (64, 4, 8)):
        grid = [[abs(row - key) < 4 or key % 9 == 0 for key in range(blocks)] for row in range(blocks)]
        for pattern in (Strided(generator.randint(2, 9)), LocalGlobal(generator.randint(0, 3), 1), grid):
            mask = BlockSparse(pattern, size, causal)
            for sends_queries, node_size in ((True, ranks), (False, 2)):
                ring = Ring(cp_size=ranks, node_size=node_size)
                compare(mask, LAYOUTS[layout], ring, blocks * size, generator.randrange(ranks), sends_queries)
