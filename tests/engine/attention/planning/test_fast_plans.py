"""Plans from tables of all pairs of ranks equal those formed pair by pair, for every mask, layout and ring."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from engine.attention.comm_plan import comm_plan, reach
from engine.attention.geometry.layout import LAYOUTS, Gathered, Layout, Ring, SplitZigzag
from engine.attention.geometry.tiles import Call, Tile, trim
from engine.attention.masks import (
    BlockSparse,
    Causal,
    Documents,
    Full,
    LocalGlobal,
    Mask,
    SlidingWindow,
    Strided,
)
from engine.attention.masks.mask import FirstRows
from engine.attention.masks.pairs import pair_table
from tests.engine.attention.planning.slow_plans import slow_plan
from tests.positions import rank_pair_tiles
from tests.slow import slow

SIZES = (1, 2, 3, 4, 6, 8, 12)


def cut(generator: random.Random, total: int, parts: int) -> tuple[int, ...]:
    """Lengths of `parts` documents, or as many as fit."""
    cuts = sorted(generator.sample(range(1, total), min(parts, total) - 1)) if total > 1 else []
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True))


def random_mask(generator: random.Random, seq_len: int) -> Mask:
    kind = generator.choice(
        ["full", "causal", "window", "window", "documents", "documents", "documents", "blocks", "grid"]
    )
    causal = generator.random() < 0.6
    size = generator.choice([1, 2, 3, 4, 5, 8, 16])
    if kind == "full":
        return Full()
    if kind == "window":
        right = generator.choice([0, 0, 1, 3, seq_len // 3])
        left = generator.choice([0, 1, 5, seq_len // 7, seq_len])
        return SlidingWindow(left, right, generator.choice([0, 0, 1, 4, seq_len // 3]))
    if kind == "documents":
        if generator.random() < 0.25:
            return Documents([generator.randint(1, 9) for _ in range(generator.randint(1, 4))], causal, repeat=True)
        lengths = cut(generator, seq_len, generator.choice([1, 2, 3, 5, 9, 20, 60]))
        left, spans = generator.choice([None, None, 0, 2, seq_len // 5]), []
        if causal and generator.random() < 0.3:
            starts = itertools.accumulate((0, *lengths[:-1]))
            some = [(start, length) for start, length in zip(starts, lengths, strict=True) if generator.random() < 0.5]
            spans = [(start + length // 3, start + length) for start, length in some]
        return Documents(lengths, causal, left=left, spans=spans)
    if kind == "blocks":
        pattern = generator.choice(
            [Strided(generator.randint(1, 5)), LocalGlobal(generator.randint(0, 3), generator.randint(0, 2))]
        )
        return BlockSparse(pattern, size, causal)
    if kind == "grid":
        blocks = -(-seq_len // max(size, 3))
        grid = [[generator.random() < 0.4 for _ in range(blocks)] for _ in range(blocks)]
        return BlockSparse(grid, max(size, 3), causal)
    return Causal()


def random_layout(generator: random.Random, cp_size: int) -> Layout:
    kind = generator.choice(["contiguous", "zigzag", "striped", "split", "gathered"])
    if kind == "split":
        return SplitZigzag(generator.choice([0.25, 0.5, 0.7]))
    if kind == "gathered":
        size = generator.choice([1, 2, 3])
        members = [tuple(range(first * size, (first + 1) * size)) for first in range(cp_size)]
        if generator.random() < 0.5:
            members = [tuple(range(first, cp_size * size, cp_size)) for first in range(cp_size)]
        return Gathered(LAYOUTS[generator.choice(["contiguous", "zigzag"])], tuple(members))
    return LAYOUTS[kind]


def tiles_of(calls: tuple[Call, ...]) -> list[Tile]:
    """The tiles that some calls compute, each with the band that its own size leaves."""
    found = []
    for tile in (tile for call in calls for tile in call.tiles):
        trimmed = trim(tile.rows, tile.columns, tile.band.lo, tile.band.hi)
        assert trimmed is not None
        assert (trimmed.rows, trimmed.columns) == (tile.rows, tile.columns)
        found.append(tile._replace(band=trimmed.band))
    return sorted(found, key=str)


def compare(mask: Mask, layout: Layout, ring: Ring, seq_len: int, cp_rank: int, sends_queries: bool) -> None:
    expected = slow_plan(mask, layout, ring, seq_len, cp_rank, sends_queries)
    found = comm_plan(mask, layout, ring, seq_len, cp_rank, sends_queries)
    for name in ("leaving", "given", "given_unreduced", "returned", "returned_unreduced"):
        assert list(getattr(found, name)) == expected[name], name
    steps = [(s.owner, s.outer_step, s.inner_step, tiles_of(s.calls)) for s in found.steps]
    assert steps == [(*step, sorted(tiles, key=str)) for *step, tiles in expected["steps"]]
    for ranges, truth in zip(found.inner_rings, expected["inner_rings"], strict=True):
        own = [pair for pair in truth.used if cp_rank % ring.node_size in pair]
        assert ranges.used == {pair: truth.used[pair] for pair in own}
        assert ranges.unreduced == {pair: truth.unreduced[pair] for pair in own}
        assert (ranges.longest, ranges.all_unreduced, ranges.held) == (truth.longest, truth.all_unreduced, truth.held)


def random_case(generator: random.Random) -> tuple[Any, ...]:
    cp_size = generator.choice(SIZES)
    layout = random_layout(generator, cp_size)
    seq_len = layout.chunks(cp_size) * generator.choice([1, 2, 3, 4, 7, 12, 40])
    mask = random_mask(generator, seq_len)
    if generator.random() < 0.2:
        mask = FirstRows(mask, generator.randint(0, seq_len))
    node_size = generator.choice([size for size in range(1, cp_size + 1) if cp_size % size == 0])
    return mask, layout, Ring(cp_size=cp_size, node_size=node_size), seq_len


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 60))])
def test_plans_from_tables_equal_plans_formed_pair_by_pair(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(90):
        mask, layout, ring, seq_len = random_case(generator)
        case = f"{mask} {layout} {ring} {seq_len}"
        size = ring.cp_size
        for sends_queries in (False, True):
            try:
                compare(mask, layout, ring, seq_len, generator.randrange(size), sends_queries)
            except AssertionError as error:
                raise AssertionError(case) from error
        pairs = [(q, k) for q in range(size) for k in range(size)]
        tiles = [rank_pair_tiles(mask, layout, seq_len, size, *pair) for pair in pairs]
        assert reach(mask, layout, size, seq_len) == max((t.k.stop for each in tiles for t in each), default=0), case
        table = pair_table(mask, layout, seq_len, size)
        exact = {tile.band.kind for each in tiles for tile in each}
        assert exact <= table.kinds, case
        assert ("band" in table.kinds) == ("band" in exact), case
        assert [table.area(*pair) for pair in pairs] == [sum(tile.area() for tile in each) for each in tiles], case


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [6, 40, *slow(400)])
def test_long_documents_are_planned_as_pair_by_pair(layout: str, causal: bool, documents: int) -> None:
    generator = random.Random(documents)
    mask = Documents(cut(generator, 1 << 14, documents), causal)
    for node_size in (1, 4, 16):
        ring = Ring(cp_size=16, node_size=node_size)
        for rank, sends_queries in ((0, True), (7, False), (15, True)):
            compare(mask, LAYOUTS[layout], ring, 1 << 14, rank, sends_queries)


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@pytest.mark.parametrize("causal", [True, False])
def test_nine_thousand_short_documents_are_a_few_calls(layout: str, causal: bool) -> None:
    mask = Documents([1] * 9000, causal)
    if layout == "striped":
        mask = Documents([6] * 9000, causal)
    ring, seq_len = Ring(cp_size=2, node_size=2), sum(mask.lengths)
    compare(mask, LAYOUTS[layout], ring, seq_len, 0, False)
    steps = comm_plan(mask, LAYOUTS[layout], ring, seq_len, 0, False).steps
    assert max(len(step.calls) for step in steps) <= 2


def test_equal_documents_are_equal_masks_with_one_hash() -> None:
    first, second = Documents([3, 4, 5]), Documents((3, 4, 5))
    assert first == second
    assert hash(first) == hash(second)
    assert first != Documents([3, 4, 5], causal=False)
    assert repr(first) == "Documents(lengths=(3, 4, 5), causal=True, repeat=False, left=None, spans=())"


@pytest.mark.parametrize("causal", [True, False])
def test_the_area_of_documents_is_the_sum_over_its_queries(causal: bool) -> None:
    generator = random.Random(1)
    for _ in range(50):
        mask = Documents(cut(generator, 60, generator.randint(1, 12)), causal, repeat=generator.random() < 0.5)
        seq_len = generator.randint(1, 150) if mask.repeat else 60
        lengths = itertools.cycle(mask.lengths)
        documents = [number for number in range(seq_len) for _ in range(next(lengths))][:seq_len]
        seen = sum(
            documents[query] == documents[key] and (key <= query or not causal)
            for query, key in itertools.product(range(seq_len), repeat=2)
        )
        assert mask.area(seq_len) == seen
