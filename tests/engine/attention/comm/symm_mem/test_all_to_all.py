"""An all-to-all by copy engine: every byte is written where packing, all-to-all and unpacking would write it."""

from __future__ import annotations

import ctypes

import pytest
import torch

from engine.attention.comm.collectives import token_runs_in_order
from engine.attention.comm.symm_mem.all_to_all import CopyPlanner, in_rows, unpack_slot
from engine.attention.comm.symm_mem.channel import message_bytes, offsets
from engine.attention.geometry.layout import layout_named
from engine.cuda.driver import CopyBatch

BATCH, HEADS, HEAD_DIM = 2, 8, 3
SIZE = 4
TENSOR_ADDRESS, TENSOR_ROW, TENSOR_LAYER = 1, 2, 3  # words of a copy, as the driver reads them
PLACE_ADDRESS, PLACE_ROW, PLACE_LAYER = 6, 7, 8
WIDTH, ROWS, LAYERS = 10, 11, 12


class Driver:
    """Carries out copies on the host, row by row, as the driver does on a GPU."""

    def __init__(self) -> None:
        self.copies = 0

    def cuMemcpy3DBatchAsync_v2(self, count, operations, flags, stream) -> int:
        words = ctypes.cast(operations, ctypes.POINTER(ctypes.c_uint64))
        for first in range(0, 14 * count, 14):
            box = [words[first + word] for word in range(14)]
            for layer in range(box[LAYERS]):
                for row in range(box[ROWS]):
                    ctypes.memmove(
                        box[PLACE_ADDRESS] + (layer * (box[PLACE_LAYER] or box[ROWS]) + row) * box[PLACE_ROW],
                        box[TENSOR_ADDRESS] + (layer * (box[TENSOR_LAYER] or box[ROWS]) + row) * box[TENSOR_ROW],
                        box[WIDTH],
                    )
            self.copies += 1
        return 0


@pytest.fixture
def driver(monkeypatch) -> Driver:
    found = Driver()
    monkeypatch.setattr("engine.cuda.driver._driver", lambda: found)
    return found


def launch(plan: CopyBatch, tensors, slots) -> None:
    plan.launch(0, [tensor.data_ptr() for tensor in tensors], [slot.data_ptr() for slot in slots])


def tensors_of(slot: torch.Tensor, specs) -> list[torch.Tensor]:
    return [
        slot[start : start + like.nbytes].view(like.dtype).view(like.shape)
        for start, like in zip(offsets(specs), specs, strict=True)
    ]


def routes(layout: str, parts: int, seq_len: int) -> tuple[list[CopyPlanner], list[torch.Tensor]]:
    """The ways of every rank, and the global positions that each holds."""
    shards = tuple(layout_named(layout).segments(seq_len, SIZE, rank) for rank in range(SIZE))
    token_runs = token_runs_in_order(shards)
    found = [CopyPlanner(rank, SIZE, token_runs, parts) for rank in range(SIZE)]
    return found, [torch.cat([torch.arange(s.start, s.start + s.count) for s in shard]) for shard in shards]


def sent(planned, tensors_of_ranks) -> tuple[list[torch.Tensor], tuple]:
    """The slot of every rank once all ranks have sent, and what a slot holds. `planned`: of a rank, for its tensors."""
    slots: list[torch.Tensor] = []
    for rank, tensors in enumerate(tensors_of_ranks):
        message = planned(rank, tensors)
        slots = slots or [torch.zeros(message_bytes(message.specs), dtype=torch.uint8) for _ in range(SIZE)]
        launch(message.plan, tensors, slots)
        assert message.away_bytes == message.plan.nbytes * (SIZE - 1) // SIZE
    return slots, message.specs


def whole_tensors(seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Like dout and delta: rows of a head dim in float64, and single fp32 numbers whose heads do not lie together."""
    wide = torch.randn(BATCH, seq_len, HEADS, HEAD_DIM, dtype=torch.float64)
    return wide, torch.randn(BATCH, HEADS, seq_len).transpose(1, 2)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("parts", [1, 2])
def test_received_heads_have_the_groups_tokens_in_order(driver, layout, parts) -> None:
    whole = whole_tensors(32)
    found, positions = routes(layout, parts, 32)
    share = HEADS // (SIZE * parts)
    for part in range(parts):
        shards = [tuple(in_rows(tensor[:, held]) for tensor in whole) for held in positions]
        slots, specs = sent(lambda rank, tensors, part=part: found[rank].send(tensors, part), shards)
        for to, slot in enumerate(slots):
            heads = slice((to * parts + part) * share, (to * parts + part + 1) * share)
            for arrived, tensor in zip(tensors_of(slot, specs), whole, strict=True):
                assert torch.equal(arrived, tensor[:, :, heads])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("parts", [1, 2])
def test_results_sent_back_have_all_heads_in_order(driver, layout, parts) -> None:
    whole = whole_tensors(32)
    found, positions = routes(layout, parts, 32)
    share = HEADS // (SIZE * parts)
    results_by_rank = [
        [torch.zeros(BATCH, 8, SIZE, parts, share, *tensor.shape[3:], dtype=tensor.dtype) for tensor in whole]
        for _ in range(SIZE)
    ]
    for part in range(parts):
        heads = [slice((rank * parts + part) * share, (rank * parts + part + 1) * share) for rank in range(SIZE)]
        results = [tuple(tensor[:, :, some].contiguous() for tensor in whole) for some in heads]
        slots, _ = sent(lambda rank, tensors: found[rank].send_back(tensors), results)
        for rank, route in enumerate(found):
            unpack = route.send_back(results[rank]).unpack[part]
            launch(unpack, [slots[rank]], results_by_rank[rank])
    for results, held in zip(results_by_rank, positions, strict=True):
        for result, tensor in zip(results, whole, strict=True):
            assert torch.equal(result.flatten(2, 4), tensor[:, held])


def test_a_slot_is_copied_out_whole(driver) -> None:
    found, positions = routes("zigzag", 1, 32)
    shards = tuple(in_rows(tensor[:, positions[0]]) for tensor in whole_tensors(32))
    specs = found[0].send(shards, 0).specs
    slot = torch.randint(0, 255, (message_bytes(specs),), dtype=torch.uint8)
    copies = [torch.zeros(like.shape, dtype=like.dtype) for like in specs]
    launch(unpack_slot(specs), [slot], copies)
    for copy, arrived in zip(copies, tensors_of(slot, specs), strict=True):
        assert torch.equal(copy.view(torch.uint8), arrived.view(torch.uint8))


def test_rows_that_lie_apart_are_read_where_they_are_and_scattered_heads_are_gathered() -> None:
    projected = torch.randn(1, 6, 3, 4, 5).unbind(2)[1]  # as one of q, k, v of a joint projection
    assert in_rows(projected) is projected
    scattered = torch.randn(1, 4, 6).transpose(1, 2)
    assert in_rows(scattered).is_contiguous()
    assert in_rows(torch.randn(1, 1, 4, 5).expand(1, 6, 4, 5)).is_contiguous()  # tokens that lie in one place


def test_two_runs_of_a_zigzag_rank_cross_in_one_copy_and_a_plan_is_made_once(driver) -> None:
    found, positions = routes("zigzag", 1, 32)
    shard = torch.randn(1, len(positions[1]), HEADS, HEAD_DIM)
    planned = found[1].send((shard,), 0)
    launch(
        planned.plan,
        [shard],
        [torch.zeros(message_bytes(planned.specs), dtype=torch.uint8) for _ in range(SIZE)],
    )
    assert driver.copies == SIZE
    assert found[1].send((shard + 1,), 0) is planned
