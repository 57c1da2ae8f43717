"""Receive slots are given back in the order of their messages, also where a message carried nothing, and not before all
of a message was read.

A transport with slots counts releases: releasing message 5 says that 4 may be overwritten too.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.attention.accumulate.accumulators import GradAccumulator, TensorSpec
from engine.attention.comm.exchange import AllPairsP2P
from engine.attention.comm_plan import ChunkRanges
from engine.attention.comm_volume import HELD_GRADIENTS


class RecordingTransport:
    """Hands out ones for what is expected, which are gone once they are released, and notes how many messages are
    unreleased when another is started, and when it is waited for."""

    def __init__(self) -> None:
        self.released: list[int] = []
        self.unreleased_at_start: list[int] = []
        self.unreleased_at_wait: list[int] = []
        self.messages = itertools.count()

    def reserve(self, largest: tuple[TensorSpec, ...]) -> None:
        """Nothing to make room for."""

    def start(self, sent, to, expected, source):
        message, transport = next(self.messages), self
        self.unreleased_at_start.append(message - len(self.released))

        class Transfer:
            def wait(self):
                transport.unreleased_at_wait.append(message - len(transport.released))
                self.received = tuple(torch.ones(like.shape, dtype=like.dtype) for like in expected)
                return self.received

            def release(self):
                for tensor in self.received:
                    tensor.fill_(torch.nan)
                transport.released.append(message)

        return Transfer()


@pytest.mark.parametrize("tensors", [1, 2])  # dQ, or dK and dV
@pytest.mark.parametrize("silent", [set(), {1}, {2, 3}, {1, 4, 6}], ids=str)
def test_slots_are_released_in_order_once_read_and_never_more_are_held_than_there_are(silent, tensors) -> None:
    size = 8
    ranges = {pair: (0, 4) for pair in itertools.product(range(size), repeat=2)}
    ranges |= {(0, worker): (0, 0) for worker in silent}  # these send local rank 0 no gradient
    chunk_ranges = ChunkRanges(ranges, dict.fromkeys(ranges, True), longest=4, all_unreduced=True)
    gradients = RecordingTransport()
    pattern = AllPairsP2P(local_rank=0, size=size, chunks=RecordingTransport(), gradients=gradients)
    grad_return = pattern.grad_return(None, chunk_ranges)
    like = torch.zeros(1, 4, 2, 8)
    for step in range(size):
        parts = tuple(GradAccumulator(like, torch.float32) for _ in range(tensors))
        for part in parts:
            part.add(slice(0, 4), torch.ones_like(like))
        grad_return.add(step, parts)
    for total in grad_return.finish():
        assert torch.equal(total.final(torch.float32), torch.full_like(like, size - len(silent)))
    assert gradients.released == list(range(size - 1))
    assert max(gradients.unreleased_at_wait) <= HELD_GRADIENTS
    # Else a stream could wait for a slot that is released by work behind it in the queue of the device.
    assert max(gradients.unreleased_at_start) <= HELD_GRADIENTS
