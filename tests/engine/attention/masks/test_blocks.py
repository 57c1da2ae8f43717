"""Block-sparse and document masks against their definitions: every pair of tokens, every layout, several CP sizes."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.attention.geometry.layout import LAYOUTS, Segment
from engine.attention.geometry.tile_table import MAX_TILES
from engine.attention.geometry.tiles import Tile, band_area
from engine.attention.masks import (
    BlockSparse,
    Causal,
    Documents,
    Full,
    LocalGlobal,
    SlidingWindow,
    Strided,
    parse_mask,
    rank_areas,
)
from engine.attention.masks.pairs import pair_table, tiles_of_all_keys
from tests.positions import rank_pair_tiles, shard_positions

SEQ_LEN = 24  # splits into 1, 2, 3 and 4 ranks under every layout
CP_SIZES = (1, 2, 3, 4)


def random_grid(size: int, seed: int) -> list[list[bool]]:
    chance = random.Random(seed)
    grid = [[chance.random() < 0.5 for _ in range(size)] for _ in range(size)]
    grid[chance.randrange(size)] = [False] * size  # a block of queries that sees no key at all
    return grid


BLOCK_MASKS = [
    Documents((24,)),
    Documents((5, 1, 9, 9)),
    Documents((5, 1, 9, 9), causal=False),
    Documents((1,) * 24),
    Documents((8, 8, 8)),
    Documents((7, 2), repeat=True),
    Documents((100,), repeat=True),
    *[
        BlockSparse(random_grid(-(-SEQ_LEN // size), seed), size, causal)
        for seed, (size, causal) in enumerate(product((1, 3, 5, 8), (False, True)))
    ],
    BlockSparse([[True]], 24),
    BlockSparse([[False]], 24),
    BlockSparse(Strided(2), 2, causal=True),
    BlockSparse(Strided(3), 3),
    BlockSparse(LocalGlobal(1, 1), 3, causal=True),
    BlockSparse(LocalGlobal(0), 5),
]


def sees(mask, query: int, key: int) -> bool:
    """The definition, token by token."""
    if mask.causal and key > query:
        return False
    if isinstance(mask, Documents):
        documents = [number for number, length in enumerate(list(mask.lengths) * SEQ_LEN) for _ in range(length)]
        return documents[query] == documents[key]
    a, b = query // mask.block_size, key // mask.block_size
    match mask.blocks:
        case Strided(stride):
            return abs(a - b) < stride or b % stride == stride - 1
        case LocalGlobal(reach, global_tokens):
            return abs(a - b) <= reach or a < global_tokens or b < global_tokens
        case grid:
            return grid.rows[a][b] == "1"


def painted(tiles: tuple[Tile, ...], rows: int, columns: int) -> list[list[int]]:
    """How often each local pair is computed; every row of every tile must see a key."""
    counts = [[0] * columns for _ in range(rows)]
    for tile in tiles:
        lo, hi = tile.band.lo, tile.band.hi
        for i in range(tile.rows):
            visible = [j for j in range(tile.columns) if (lo is None or j - i >= lo) and (hi is None or j - i <= hi)]
            assert visible, "a row of a tile sees no key"
            for j in visible:
                counts[tile.q.start + i][tile.k.start + j] += 1
        assert tile.band.kind != "causal" or tile.rows == tile.columns
    return counts


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
@pytest.mark.parametrize("mask", BLOCK_MASKS, ids=str)
def test_block_tiles_cover_exactly_the_visible_pairs_once(mask, layout) -> None:
    for cp_size in CP_SIZES:
        shards = [shard_positions(layout, SEQ_LEN, cp_size, rank) for rank in range(cp_size)]
        for q_rank, k_rank in product(range(cp_size), repeat=2):
            expected = [[int(sees(mask, q, k)) for k in shards[k_rank]] for q in shards[q_rank]]
            tiles = rank_pair_tiles(mask, layout, SEQ_LEN, cp_size, q_rank, k_rank)
            assert painted(tiles, len(shards[q_rank]), len(shards[k_rank])) == expected
            assert sum(tile.area() for tile in tiles) == sum(map(sum, expected))


@pytest.mark.parametrize("mask", [*BLOCK_MASKS, Full(), Causal(), SlidingWindow(5, 2)], ids=str)
def test_the_area_of_each_rank_is_that_of_its_tiles(mask) -> None:
    for layout, cp_size in product(LAYOUTS.values(), CP_SIZES):
        areas = [
            sum(
                t.area()
                for k_rank in range(cp_size)
                for t in rank_pair_tiles(mask, layout, SEQ_LEN, cp_size, q_rank, k_rank)
            )
            for q_rank in range(cp_size)
        ]
        assert rank_areas(mask, layout, SEQ_LEN, cp_size) == areas
        assert mask.area(SEQ_LEN) == sum(areas)


@pytest.mark.parametrize("mask", [*BLOCK_MASKS, Causal()], ids=str)
def test_block_masks_need_no_kernel_with_windows(mask) -> None:
    for layout, cp_size in product(LAYOUTS.values(), CP_SIZES):
        assert pair_table(mask, layout, SEQ_LEN, cp_size).kinds <= {"full", "causal"}
        if layout.name != "striped":  # whose shards are not gathered
            assert tiles_of_all_keys(mask, layout, SEQ_LEN, cp_size).kinds <= {"full", "causal"}


@pytest.mark.parametrize("mask", BLOCK_MASKS, ids=str)
def test_tiles_against_all_keys_cover_exactly_the_visible_pairs_once(mask) -> None:
    for layout, cp_size in product((LAYOUTS["contiguous"], LAYOUTS["zigzag"]), CP_SIZES):
        table = tiles_of_all_keys(mask, layout, SEQ_LEN, cp_size)
        for rank in range(cp_size):
            queries = shard_positions(layout, SEQ_LEN, cp_size, rank)
            expected = [[int(sees(mask, q, k)) for k in range(SEQ_LEN)] for q in queries]
            assert painted(table.tiles(rank), len(queries), SEQ_LEN) == expected


@given(st.integers(1, 12), st.integers(1, 12), st.integers(-30, 30), st.integers(-30, 30), st.integers(1, 5))
def test_the_area_of_a_band_over_strided_rows_is_its_number_of_pairs(rows, columns, lo, hi, step) -> None:
    pairs = sum(lo <= j - step * i <= hi for i in range(rows) for j in range(columns))
    assert band_area(rows, columns, lo, hi, step) == pairs


@settings(max_examples=30)
@example([[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]], True, (3, 2))  # striped: a full tile of one row
@given(
    st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=6, max_size=6),
    st.booleans(),
    st.sampled_from([(2, 3), (3, 3), (4, 3), (4, 2)]),  # tokens of a block that ranks divide, and that they do not
)
def test_any_grid_is_covered_exactly_under_any_layout(grid, causal, sizes) -> None:
    size, ranks = sizes
    mask, tokens = BlockSparse(grid, size, causal), len(grid) * size
    for layout in LAYOUTS.values():
        for q_rank, k_rank in product(range(ranks), repeat=2):
            queries, keys = (shard_positions(layout, tokens, ranks, rank) for rank in (q_rank, k_rank))
            counts = painted(rank_pair_tiles(mask, layout, tokens, ranks, q_rank, k_rank), len(queries), len(keys))
            sees = [[int(grid[q // size][k // size] and not (causal and k > q)) for k in keys] for q in queries]
            assert counts == sees


def whole(seq_len: int) -> tuple[Segment, ...]:
    return (Segment(0, seq_len),)


def test_runs_of_full_blocks_become_one_rectangle() -> None:
    full = BlockSparse([[True] * 8] * 8, 4)
    assert full.tiles(whole(32), whole(32)) == Full().tiles(whole(32), whole(32))
    quarter = [[row < 4 and column >= 4 for column in range(8)] for row in range(8)]
    assert BlockSparse(quarter, 4).tiles(whole(32), whole(32)) == (Tile(slice(0, 16), slice(16, 32)),)


def test_hidden_future_keys_do_not_break_rectangles() -> None:
    lower = [[column <= row for column in range(8)] for row in range(8)]
    square = [[True] * 8] * 8
    for layout, (q_rank, k_rank) in product(LAYOUTS.values(), product(range(4), repeat=2)):
        tiles = [rank_pair_tiles(m, layout, 32, 4, q_rank, k_rank) for m in (
            Causal(), BlockSparse(square, 4, True), BlockSparse(lower, 4, True), Documents((32,)))]  # fmt: skip
        assert all(len(found) <= len(tiles[0]) for found in tiles)


def test_each_document_that_one_rank_holds_whole_is_one_causal_tile() -> None:
    documents = Documents((64, 128, 64))
    assert [tile.rows for tile in documents.tiles(whole(256), whole(256))] == [64, 128, 64]
    for layout in LAYOUTS.values():
        own = rank_pair_tiles(documents, layout, 256, 2, 0, 0)
        assert {tile.band.kind for tile in own} == {"causal"}


def test_columns_are_swept_where_that_gives_fewer_rectangles() -> None:
    lying_t = [[True, False, False], [True, True, True], [True, False, False]]
    assert len(BlockSparse(lying_t, 1).tiles(whole(3), whole(3))) == 2


def test_steps_between_chunks_without_common_documents_have_no_tiles() -> None:
    documents = Documents((16, 16, 16, 16))
    for q_rank, k_rank in product(range(4), repeat=2):
        assert bool(rank_pair_tiles(documents, LAYOUTS["contiguous"], 64, 4, q_rank, k_rank)) == (q_rank == k_rank)


def test_grids_may_be_lists_tuples_or_tensors_and_are_then_one_mask() -> None:
    grid = [[True, False], [True, True]]
    masks = {BlockSparse(blocks, 4) for blocks in (grid, tuple(map(tuple, grid)), torch.tensor(grid))}
    assert len(masks) == 1
    assert str(masks.pop()) == "block_sparse:4:10/11"
    assert Documents([3, 5]) == Documents((3, 5))
    assert len({Documents([3, 5]), Documents((3, 5))}) == 1


@pytest.mark.parametrize("mask", BLOCK_MASKS, ids=str)
def test_block_masks_are_parsed_from_their_own_string(mask) -> None:
    assert parse_mask(str(mask)) == mask


def test_token_counts_may_be_written_in_k_and_M() -> None:
    assert parse_mask("sliding_window:4k:1k") == SlidingWindow(4096, 1024)
    assert parse_mask("documents:1M,4k,3") == Documents((1 << 20, 4096, 3))
    assert parse_mask("documents:4k,...:full") == Documents((4096,), causal=False, repeat=True)
    assert parse_mask("block_sparse:1k:strided-8:causal") == BlockSparse(Strided(8), 1024, causal=True)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("documents:", "is unknown"),
        ("documents:3,,4", "is unknown"),
        ("documents:...", "is unknown"),
        ("documents:3,4:causal", "is unknown"),
        ("documents:3;4", "is unknown"),
        ("documents:0,4", "not all positive"),
        ("sliding_window:4m", "is unknown"),
        ("block_sparse:64", "is unknown"),
        ("block_sparse:64:strided-8:full", "is unknown"),
        ("block_sparse:0:strided-8", "block_size is 0"),
        ("block_sparse:64:strided", "block pattern 'strided' is unknown"),
        ("block_sparse:64:strided-0", "stride 0"),
        ("block_sparse:64:local_global-1", "is unknown"),
        ("block_sparse:64:10/1", "as many key blocks as query blocks"),
        ("block_sparse:64:12/11", "is unknown"),
    ],
)
def test_a_mask_written_wrongly_is_refused_with_the_right_forms(setting, words) -> None:
    with pytest.raises(ValueError, match=words):
        parse_mask(setting)


@pytest.mark.parametrize("blocks", [[], [True, False], [[1, 2], [0, 1]], [[True, False]], 3])
def test_a_grid_that_is_not_a_square_of_booleans_is_refused(blocks) -> None:
    with pytest.raises(ValueError, match=r"^block grid"):
        BlockSparse(blocks, 4)


@pytest.mark.parametrize("counts", [(-1, 0), (2, -1)])
def test_a_local_pattern_of_negative_counts_is_refused(counts) -> None:
    with pytest.raises(ValueError, match="give a whole number from 0"):
        LocalGlobal(*counts)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (Documents((64, 128)), "2 documents hold 192 tokens and the sequence has 256"),
        (BlockSparse([[True] * 3] * 3, 64), "3 blocks of 64 tokens per side and 256 tokens are 4 of them"),
    ],
)
def test_a_mask_of_another_length_is_refused(mask, words) -> None:
    assert words in (mask.unsupported_reason(256) or "")
    for ask in (lambda: mask.area(256), lambda: rank_pair_tiles(mask, LAYOUTS["zigzag"], 256, 2, 0, 1)):
        with pytest.raises(ValueError, match=words):
            ask()


def test_more_tiles_than_can_be_launched_are_refused() -> None:
    chequered = [[(row + column) % 2 == 0 for column in range(96)] for row in range(96)]
    mask = BlockSparse(chequered, 4)
    assert len(rank_pair_tiles(mask, LAYOUTS["contiguous"], 384, 4, 0, 0)) == 24 * 24 // 2
    with pytest.raises(ValueError, match=f"{96 * 96 // 2} rectangles between two shards and {MAX_TILES}"):
        rank_pair_tiles(mask, LAYOUTS["striped"], 384, 4, 0, 0)
