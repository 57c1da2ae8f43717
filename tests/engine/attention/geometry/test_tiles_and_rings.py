"""Layouts, masks and rings are integers: checked exhaustively at small sizes against their definitions."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.comm.exchange import P2PRing
from engine.attention.comm.p2p import Transport
from engine.attention.geometry.layout import (
    LAYOUTS,
    Gathered,
    Ring,
    ZigzagOfDocuments,
    layout_named,
    split_unsupported_reason,
)
from engine.attention.geometry.tiles import Tile, band_area, row_blocks, trim
from engine.attention.masks import (
    BlockSparse,
    Causal,
    Full,
    LocalGlobal,
    SlidingWindow,
    Strided,
    imbalance,
    parse_mask,
    rank_areas,
)
from tests.positions import rank_pair_tiles, shard_positions

WINDOWS = [
    SlidingWindow(0), SlidingWindow(3), SlidingWindow(5, 2), SlidingWindow(40, 40),
    SlidingWindow(0, global_tokens=1), SlidingWindow(3, global_tokens=2), SlidingWindow(2, global_tokens=40),
    SlidingWindow(0, 1, global_tokens=3), SlidingWindow(4, 2, global_tokens=5),
]  # fmt: skip
MASKS = [Full(), Causal(), *WINDOWS]


def sees(mask, query: int, key: int) -> bool:
    if isinstance(mask, SlidingWindow):
        near = query - mask.left <= key <= query + mask.right
        known = min(query, key) < mask.global_tokens and (mask.right > 0 or key <= query)
        return near or known
    return mask == Full() or key <= query


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
def test_every_token_belongs_to_exactly_one_rank_in_ascending_order(layout, cp_size) -> None:
    seq_len = 5 * layout.chunks(cp_size)
    shards = [shard_positions(layout, seq_len, cp_size, rank) for rank in range(cp_size)]
    assert all(shard == sorted(shard) for shard in shards)
    assert {len(shard) for shard in shards} == {seq_len // cp_size}
    assert sorted(token for shard in shards for token in shard) == list(range(seq_len))


def test_zigzag_of_documents_cuts_each_document_by_itself() -> None:
    found = [shard_positions(ZigzagOfDocuments((4, 8)), 12, 2, rank) for rank in range(2)]
    assert found == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    with pytest.raises(ValueError, match="a document has 6 tokens, which do not split into 2 x cp_size = 4"):
        shard_positions(ZigzagOfDocuments((6, 6)), 12, 2, 0)
    with pytest.raises(ValueError, match="2 documents hold 12 tokens and the sequence has 16"):
        shard_positions(ZigzagOfDocuments((4, 8)), 16, 2, 0)


@pytest.mark.parametrize(("layout", "mask"), list(product(LAYOUTS.values(), MASKS)), ids=str)
def test_tiles_cover_exactly_the_visible_pairs_once(layout, mask) -> None:
    for cp_size in (1, 2, 3, 4):
        seq_len = 3 * layout.chunks(cp_size)
        for q_rank, k_rank in product(range(cp_size), repeat=2):
            queries = shard_positions(layout, seq_len, cp_size, q_rank)
            keys = shard_positions(layout, seq_len, cp_size, k_rank)
            counts = [[0] * len(keys) for _ in queries]
            for tile in rank_pair_tiles(mask, layout, seq_len, cp_size, q_rank, k_rank):
                seen = 0
                for i, j in product(range(tile.rows), range(tile.columns)):
                    if (tile.band.lo is None or j - i >= tile.band.lo) and (
                        tile.band.hi is None or j - i <= tile.band.hi
                    ):
                        counts[tile.q.start + i][tile.k.start + j] += 1
                        seen |= 1 << i
                assert seen == (1 << tile.rows) - 1, "a row of a tile sees no key"
                assert tile.band.kind != "causal" or tile.rows == tile.columns
            assert counts == [[int(sees(mask, q, k)) for k in keys] for q in queries]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(-15, 15), st.integers(-15, 15))
def test_the_area_of_a_band_is_its_number_of_pairs(rows, columns, lo, hi) -> None:
    pairs = [(i, j) for i in range(rows) for j in range(columns) if lo <= j - i <= hi]
    assert band_area(rows, columns, lo, hi) == len(pairs)
    tile = trim(rows, columns, lo, hi)
    assert (tile is None) == (not pairs)
    if tile is not None:
        assert tile.area() == len(pairs)
        assert (tile.q.start, tile.q.stop) == (min(i for i, _ in pairs), max(i for i, _ in pairs) + 1)
        assert (tile.k.start, tile.k.stop) == (min(j for _, j in pairs), max(j for _, j in pairs) + 1)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(-15, 15), st.integers(-15, 15), st.integers(1, 5))
def test_blocks_of_rows_hold_each_visible_pair_of_a_tile_once_and_span_only_keys_they_see(
    rows, columns, lo, hi, block_rows
) -> None:
    tile = trim(rows, columns, lo, hi)
    if tile is None:
        return
    blocks = list(row_blocks(tile.band, tile.rows, tile.columns, block_rows))
    assert [row for block in blocks for row in range(block.q.start, block.q.stop)] == list(range(tile.rows))
    assert sum(block.area() for block in blocks) == tile.area()
    for block in blocks:
        assert block.rows <= block_rows
        pairs = band_pairs(block)
        assert pairs <= band_pairs(Tile(slice(0, tile.rows), slice(0, tile.columns), tile.band))
        assert {key for _, key in pairs} >= {block.k.start, block.k.stop - 1}


def band_pairs(tile) -> set[tuple[int, int]]:
    """The visible (query, key) pairs of a tile, in the indices that its corner is given in."""
    return {
        (tile.q.start + i, tile.k.start + j)
        for i, j in product(range(tile.rows), range(tile.columns))
        if (tile.band.lo is None or j - i >= tile.band.lo) and (tile.band.hi is None or j - i <= tile.band.hi)
    }


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_area_of_a_mask_is_exact_and_shared_out_completely(mask) -> None:
    for layout, cp_size in product(LAYOUTS.values(), (1, 2, 4)):
        seq_len = 4 * layout.chunks(cp_size)
        expected = sum(sees(mask, q, k) for q in range(seq_len) for k in range(seq_len))
        assert mask.area(seq_len) == expected
        assert sum(rank_areas(mask, layout, seq_len, cp_size)) == expected


def test_a_long_causal_window_keeps_a_shard_against_itself_one_square_call_and_few_besides() -> None:
    mask, layout = SlidingWindow(4095, global_tokens=64), layout_named("contiguous")
    tiles = [rank_pair_tiles(mask, layout, 1 << 16, 4, 3, k_rank) for k_rank in range(4)]
    # The last of four shards: the global tokens, nothing, the window's reach into the neighbour, its own band.
    assert [len(found) for found in tiles] == [1, 0, 1, 1]
    assert tiles[0][0].columns == 64
    assert [tile.band.kind for tile in rank_pair_tiles(mask, layout, 1 << 16, 4, 0, 0)] == ["full", "causal", "band"]


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_zigzag_gives_each_rank_equal_causal_work_and_contiguous_does_not(cp_size) -> None:
    zigzag, striped, contiguous = (LAYOUTS[name] for name in ("zigzag", "striped", "contiguous"))
    assert imbalance(Causal(), zigzag, 64 * cp_size, cp_size) == 1.0
    assert imbalance(Causal(), striped, 64 * cp_size, cp_size) < 1.02
    assert imbalance(Causal(), contiguous, 64 * cp_size, cp_size) > 1.45
    assert imbalance(Full(), contiguous, 64 * cp_size, cp_size) == 1.0


def test_zigzag_ring_steps_are_single_kernel_calls() -> None:
    for q_rank, k_rank in product(range(4), repeat=2):
        assert len(rank_pair_tiles(Causal(), LAYOUTS["zigzag"], 64, 4, q_rank, k_rank)) == 1


RINGS = [Ring(cp_size=p, node_size=n) for p in range(1, 9) for n in range(1, p + 1) if p % n == 0]


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_every_rank_computes_on_every_chunk_once(ring) -> None:
    for rank in range(ring.cp_size):
        assert sorted(ring.owner(rank, step) for step in range(ring.cp_size)) == list(range(ring.cp_size))
        assert ring.owner(rank, 0) == rank


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_every_chunk_is_received_from_the_peer_that_held_it(ring) -> None:
    for rank, step in product(range(ring.cp_size), range(1, ring.cp_size)):
        node, local_rank = divmod(rank, ring.node_size)
        if step % ring.node_size:  # forwarded inside the node
            relay = P2PRing(local_rank=local_rank, size=ring.node_size, chunks=Transport(), gradients=Transport())
            source, earlier = node * ring.node_size + relay.peers[1], step - 1
        else:  # sent by the node before, where the inner ring before it began with it
            source, earlier = (rank - ring.node_size) % ring.cp_size, step - ring.node_size
        assert ring.owner(source, earlier) == ring.owner(rank, step)


def links_into(rank: int, ring: Ring, ranks_per_node: int) -> list[tuple[int, int]]:
    """(rank that sent it, rank) for every shard that came to `rank` from another node of `ranks_per_node`."""
    links = []
    for step in range(1, ring.cp_size):
        first = rank // ring.node_size * ring.node_size
        within = first + (rank - first - 1) % ring.node_size
        source = within if step % ring.node_size else (rank - ring.node_size) % ring.cp_size
        if source // ranks_per_node != rank // ranks_per_node:
            links.append((source, rank))
    return links


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 4), (4, 2), (3, 2), (8, 1)])
def test_a_flat_ring_sends_all_chunks_over_a_slow_link_and_a_double_ring_one_per_other_node(nodes, per_node) -> None:
    ranks = range(nodes * per_node)
    flat, double = (Ring(cp_size=len(ranks), node_size=size) for size in (len(ranks), per_node))
    over_flat = Counter(link for rank in ranks for link in links_into(rank, flat, per_node))
    over_double = Counter(link for rank in ranks for link in links_into(rank, double, per_node))
    # One rank of a node does all its receiving, and every shard but its own comes that way; or all of them do a part.
    firsts = ranks[::per_node]
    assert over_flat == {((first - 1) % len(ranks), first): len(ranks) - 1 for first in firsts}
    assert over_double == {((rank - per_node) % len(ranks), rank): nodes - 1 for rank in ranks}


@pytest.mark.parametrize("size", range(1, 9))
def test_a_peer_that_is_sent_to_receives_from_the_sender(size) -> None:
    for local_rank in range(size):
        to = P2PRing(local_rank=local_rank, size=size, chunks=Transport(), gradients=Transport()).peers[0]
        assert P2PRing(local_rank=to, size=size, chunks=Transport(), gradients=Transport()).peers[1] == local_rank


@pytest.mark.parametrize("base", [LAYOUTS["contiguous"], LAYOUTS["zigzag"]], ids=str)
@pytest.mark.parametrize("members", [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)])
def test_gathered_shards_hold_their_members_tokens_in_order_and_stay_balanced(base, members) -> None:
    gathered = Gathered(base, members)
    shards = [shard_positions(gathered, 64, len(members), rank) for rank in range(len(members))]
    for shard, ranks in zip(shards, members, strict=True):
        assert shard == sorted(token for rank in ranks for token in shard_positions(base, 64, 4, rank))
    if base.name == "zigzag":
        assert imbalance(Causal(), gathered, 64, len(members)) == 1.0


def test_node_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="node_size 3 does not divide cp_size 4"):
        Ring(cp_size=4, node_size=3)


@pytest.mark.parametrize(
    ("layout", "seq_len", "cp_size", "words"),
    [
        ("zigzag", 100000, 32, "2 x cp_size = 64 equal zigzag chunks; the nearest lengths that do: 99968 and 100032"),
        ("contiguous", 10, 4, "cp_size = 4 equal contiguous chunks; the nearest lengths that do: 8 and 12"),
        ("striped", 3, 4, "the nearest lengths that do: 4"),
    ],
)
def test_a_length_that_does_not_split_names_the_nearest_that_do(layout, seq_len, cp_size, words) -> None:
    assert words in (split_unsupported_reason(layout, seq_len, cp_size) or "")
    assert split_unsupported_reason(layout, 64 * cp_size, cp_size) is None
    assert split_unsupported_reason(layout, seq_len, 1) is None


def test_masks_are_parsed_from_their_own_string() -> None:
    for mask in MASKS:
        assert parse_mask(str(mask)) == mask
    for wrong in ("casual", "sliding_window", "sliding_window:-1", "causal:3", "sliding_window:1:2:3:4"):
        with pytest.raises(ValueError, match="is unknown"):
            parse_mask(wrong)
    for wrong in (-1, 2.5, "4k", None, True, 1 << 40, math.inf):
        for name in ("left", "right", "global_tokens"):
            with pytest.raises(ValueError, match=f"sliding window has {name} .*; give a whole number from 0 to"):
                SlidingWindow(**{"left": 3, name: wrong})  # type: ignore[arg-type]
        for pattern in (LocalGlobal, Strided, lambda blocks: BlockSparse(blocks, Strided(2))):
            with pytest.raises(ValueError, match=r"give a whole number from [01] to"):
                pattern(wrong)
    assert SlidingWindow(np.int64(3)) == SlidingWindow(3)
    with pytest.raises(ValueError, match="choose one of"):
        layout_named("zigzig")
