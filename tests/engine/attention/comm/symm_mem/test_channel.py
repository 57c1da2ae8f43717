"""Receive slots and their counters, as far as they can be seen without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from engine.attention.accumulate.accumulators import TensorSpec
from engine.attention.comm.symm_mem.channel import SymmBuffer, message_bytes


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What a window does, in order, on a host that stands in for one with GPUs."""
    noted: list[str] = []

    class Handle(SimpleNamespace):
        def get_buffer(self, rank, sizes, dtype):
            return torch.empty(sizes, dtype=dtype)

        def barrier(self):
            noted.append("barrier")

    def rendezvous(memory, group):
        noted.append("rendezvous")
        return Handle()

    monkeypatch.setattr(symmetric_memory, "empty", lambda n, dtype, device: torch.full((n,), 7, dtype=dtype))
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: noted.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    return noted


def test_nothing_is_still_to_be_zeroed_when_peers_hear_of_a_window(events) -> None:
    SymmBuffer(object(), slots=2, slot_bytes=256)
    # What is zeroed on the stream, here and by torch, is done before any rank leaves the rendezvous; then all ranks
    # wait for each other.
    assert events == ["synchronize", "rendezvous", "synchronize", "barrier", "synchronize"]


def test_a_window_begins_with_counters_of_zero_and_messages_take_slots_in_turn(events) -> None:
    tensor_specs = (TensorSpec((3, 5), torch.float32), TensorSpec((4,), torch.bfloat16))
    window = SymmBuffer(object(), slots=2, slot_bytes=message_bytes(tensor_specs))
    assert window._memory[:16].eq(0).all()  # arrived and released, of two ranks
    first, second, third = (window.tensors(message, tensor_specs) for message in range(3))
    assert [tuple(t.shape) for t in first] == [(3, 5), (4,)]
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in third] != [t.data_ptr() for t in second]
    assert window.slot(1, 0) == window.slot(1, 2) != window.slot(1, 1)
