"""Memory of a trial: peaks since the last reset, and how often an allocator ran out and had to give blocks back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.attention.comm.p2p import Traffic
from engine.measurement import ALLOCATION_RETRIES, Measurement
from engine.memory.resources import Usage, reset_peaks, usage
from engine.tasks import task

CPU = torch.device("cpu")
MIB = 1 << 20


def test_a_cpu_has_the_hosts_peak_alone() -> None:
    reset_peaks(CPU)
    found = usage(CPU, sent_bytes=5, window_bytes=0)
    assert (found.allocated_bytes, found.reserved_bytes, found.sent_bytes, found.retries) == (None, None, 5, 0)
    assert found.rss_bytes > MIB


def measurement(monkeypatch: pytest.MonkeyPatch, retries: list[int]) -> Measurement:
    """Of ranks whose allocators repeated so many allocations."""
    ranks = [Usage(allocated_bytes=1, reserved_bytes=2, rss_bytes=3, sent_bytes=0, retries=each) for each in retries]
    monkeypatch.setattr(task, "usage", lambda *_given: ranks[0])
    world = SimpleNamespace(device=CPU, gather=lambda _mine: ranks)
    cp = SimpleNamespace(traffic=Traffic())
    return task.measured(
        cast(Any, world), cast(Any, cp), [], [], Measurement(step_seconds=[1.0], extra={"held_gib": 1.0})
    )


def test_repeated_allocations_are_recorded_where_there_were_some(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measurement(monkeypatch, [0, 4]).extra == {"held_gib": 1.0, ALLOCATION_RETRIES: [0, 4]}
    assert measurement(monkeypatch, [0, 0]).extra == {"held_gib": 1.0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_an_allocation_that_finds_no_memory_is_counted_until_the_next_reset() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info(device)
    # This process may have 512 MiB more than it holds: one cached block of 300 has to go for another of 400.
    fraction = (torch.cuda.memory_reserved(device) + 512 * MIB) / whole
    assert free > 1024 * MIB
    reset_peaks(device)
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    try:
        for mib in (300, 400):
            torch.empty(mib * MIB, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert usage(device, 0, 0).retries == 1
    reset_peaks(device)
    assert usage(device, 0, 0).retries == 0
