"""Heads traded by copy engine: every byte lands where all-to-all, packing and unpacking would have put it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from engine.attention.head_copies import _Copies, _rows
from engine.attention.head_exchange import pieces_in_order
from engine.attention.layout import layout_named
from engine.attention.mailbox import aligned, message_bytes

BATCH, HEADS, HEAD_DIM = 2, 8, 3
SIZE = 4


def copy(block, slot: torch.Tensor) -> None:
    """What a copy engine does with a block, row by row."""
    for layer in range(block.layers):
        for row in range(block.rows):
            source = block.source + (layer * block.source_layer + row) * block.source_pitch
            target = block.target + (layer * block.target_layer + row) * block.target_pitch
            assert target + block.width <= slot.numel()
            ctypes.memmove(slot.data_ptr() + target, source, block.width)


def tensors_of(slot: torch.Tensor, likes) -> list[torch.Tensor]:
    found, offset = [], 0
    for like in likes:
        found.append(slot[offset : offset + like.nbytes].view(like.dtype).view(like.shape))
        offset += aligned(like.nbytes)
    return found


def trips(layout: str, parts: int, seq_len: int) -> tuple[list[_Copies], list[torch.Tensor]]:
    """The trip of every rank, and the global positions that each holds."""
    shards = tuple(layout_named(layout).segments(seq_len, SIZE, rank) for rank in range(SIZE))
    pieces = pieces_in_order(shards)
    found = [_Copies(SimpleNamespace(rank=rank, size=SIZE), pieces, parts, None) for rank in range(SIZE)]
    return found, [torch.cat([torch.arange(s.start, s.start + s.count) for s in shard]) for shard in shards]


def whole_tensors(seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Like dout and delta: rows of a head dim in float64, and single fp32 numbers whose heads do not lie together."""
    wide = torch.randn(BATCH, seq_len, HEADS, HEAD_DIM, dtype=torch.float64)
    return wide, torch.randn(BATCH, HEADS, seq_len).transpose(1, 2)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("parts", [1, 2])
def test_heads_arrive_with_the_groups_tokens_in_order(layout, parts) -> None:
    whole = whole_tensors(32)
    found, positions = trips(layout, parts, 32)
    share = HEADS // (SIZE * parts)
    for to in range(SIZE):
        for part in range(parts):
            slot = None
            for trip, held in zip(found, positions, strict=True):
                trip._inputs = tuple(_rows(tensor[:, held]) for tensor in whole)
                likes = tuple(trip._arriving(tensor) for tensor in trip._inputs)
                slot = torch.zeros(message_bytes(likes), dtype=torch.uint8) if slot is None else slot
                for block in trip._outward(likes, to * parts + part):
                    copy(block, slot)
            heads = slice((to * parts + part) * share, (to * parts + part + 1) * share)
            for arrived, tensor in zip(tensors_of(slot, likes), whole, strict=True):
                assert torch.equal(arrived, tensor[:, :, heads])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_results_come_home_beside_the_other_ranks_heads(layout) -> None:
    whole = whole_tensors(32)
    found, positions = trips(layout, 1, 32)
    share = HEADS // SIZE
    for to in range(SIZE):
        slot = None
        for trip in found:
            heads = slice(trip._trade.rank * share, (trip._trade.rank + 1) * share)
            results = tuple(tensor[:, :, heads].contiguous() for tensor in whole)
            likes = tuple(trip._returning(tensor) for tensor in results)
            slot = torch.zeros(message_bytes(likes), dtype=torch.uint8) if slot is None else slot
            for block in trip._homeward(results, likes, to):
                copy(block, slot)
        for arrived, tensor in zip(tensors_of(slot, likes), whole, strict=True):
            assert torch.equal(arrived.flatten(2, 3), tensor[:, positions[to]])


def test_rows_that_lie_apart_are_read_where_they_are_and_scattered_heads_are_gathered() -> None:
    projected = torch.randn(1, 6, 3, 4, 5).unbind(2)[1]  # as one of q, k, v of a joint projection
    assert _rows(projected) is projected
    scattered = torch.randn(1, 4, 6).transpose(1, 2)
    assert _rows(scattered).is_contiguous()


def test_two_runs_of_a_zigzag_rank_cross_in_one_copy() -> None:
    found, positions = trips("zigzag", 1, 32)
    trip = found[1]
    trip._inputs = (torch.randn(1, len(positions[1]), HEADS, HEAD_DIM),)
    likes = tuple(trip._arriving(tensor) for tensor in trip._inputs)
    (block,) = trip._outward(likes, 0)
    assert (block.layers, block.rows) == (2, 4)
