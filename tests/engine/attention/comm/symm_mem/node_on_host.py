"""A node whose GPUs are processes of this host, for the code that needs streams and copy engines to run at all.

Each rank's symmetric memory is a file that the others map, so counters and copies between ranks are real. A stream runs
what it is given at once: everything happens in the order of the program, which transfers by copy engine must stand (a
device may run several streams as one). A wait for a counter that never comes fails after a while.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from engine.attention.algorithms.ring import RingPlan
from engine.attention.algorithms.saved import AttentionPlan
from engine.attention.algorithms.ulysses import UlyssesPlan
from engine.attention.comm.exchange import AllPairsP2P, RingComms
from engine.attention.comm.symm_mem.all_to_all import CopyEngineAllToAll
from engine.attention.comm.symm_mem.channel import CopyEngine
from engine.attention.comm_volume import CHUNK_SLOTS, GRADIENT_SLOTS
from engine.cuda import driver as cuda_driver
from engine.cuda.driver import WAIT_VALUE_32, WRITE_VALUE_32, _Box, _Operation

PATIENCE = 120.0  # seconds that a wait for a counter may take

_streams: list[Stream] = []
_current: list[Stream] = []


class Stream:
    """Work runs when it is given, so events order nothing."""

    def __init__(self, *_args: object, **_settings: object) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = len(_streams)
        _streams.append(self)

    def record_event(self) -> None:
        return None

    def wait_event(self, event: None) -> None:
        return None

    def wait_stream(self, stream: Stream) -> None:
        return None


class Driver:
    """The driver's functions that transfers use, on host addresses."""

    def cuStreamBatchMemOp_v2(self, stream: int, count: int, operations: Any, flags: int) -> int:
        given = ctypes.cast(operations, ctypes.POINTER(_Operation))
        for each in given[:count]:
            _counter(each.kind, each.address, each.value)
        return 0

    def cuMemcpyAsync(self, to: int, source: int, nbytes: int, stream: int) -> int:
        ctypes.memmove(to, source, nbytes)
        return 0

    def cuMemcpy3DBatchAsync_v2(self, count: int, operations: Any, flags: int, stream: int) -> int:
        words = ctypes.cast(operations, ctypes.POINTER(ctypes.c_uint64))
        for first in range(0, 14 * count, 14):
            _copy_box(words[first : first + 14])
        return 0

    def cuMemcpy3DAsync_v2(self, reference: Any, stream: int) -> int:
        box: _Box = reference._obj
        words = [0, box.source, box.source_pitch, box.source_height, 0, 0, box.target, box.target_pitch]
        words += [box.target_height, 0, box.width, box.height, box.depth, 0]
        _copy_box(words)
        return 0


def _counter(kind: int, address: int, value: int) -> None:
    cell = ctypes.c_uint32.from_address(address)
    if kind == WRITE_VALUE_32:
        cell.value = value
        return
    assert kind == WAIT_VALUE_32
    ends, pause = time.monotonic() + PATIENCE, 1e-4
    while (cell.value - value) & 0x80000000:  # at least, cyclic
        assert time.monotonic() < ends, "a counter that a stream waits for was never set"
        time.sleep(pause)
        pause = min(2 * pause, 0.01)  # the others may need the core


def _copy_box(box: list[int]) -> None:
    for layer in range(box[12]):
        for row in range(box[11]):
            ctypes.memmove(
                box[6] + (layer * (box[8] or box[11]) + row) * box[7],
                box[1] + (layer * (box[3] or box[11]) + row) * box[2],
                box[10],
            )


class Mapped:
    """Symmetric memory of the ranks of a group: torch's handle, as far as it is used."""

    def __init__(self, group: dist.ProcessGroup, memory: torch.Tensor, path: str) -> None:
        paths = [""] * dist.get_world_size(group)
        dist.all_gather_object(paths, path, group=group)
        self._group, mine = group, dist.get_rank(group)
        self._memory = [memory if rank == mine else _mapped(path) for rank, path in enumerate(paths)]
        dist.barrier(group)
        Path(path).unlink()

    def get_buffer(self, rank: int, sizes: object, dtype: torch.dtype) -> torch.Tensor:
        return self._memory[rank]

    def barrier(self) -> None:
        dist.barrier(self._group)


def _mapped(path: str) -> torch.Tensor:
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


_paths: dict[int, str] = {}  # by address


def _empty(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    handle, path = tempfile.mkstemp(prefix="symmetric_")
    os.ftruncate(handle, nbytes)
    os.close(handle)
    memory = _mapped(path)
    _paths[memory.data_ptr()] = path
    return memory


def become_a_gpu() -> None:
    """From now on this process, one of a group's ranks, has streams and copy engines."""
    driver = Driver()
    cuda_driver._driver = lambda: driver
    cuda_driver.driver_unsupported_reason = lambda: "these are no GPUs"  # streams are then those of torch.cuda
    symmetric_memory.empty = _empty
    symmetric_memory.rendezvous = lambda memory, group: Mapped(group, memory, _paths.pop(memory.data_ptr()))
    _current.append(Stream())
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device=None: _current[-1]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream = Stream
    torch.cuda.stream = _on


@contextmanager
def _on(stream: Stream):
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


def by_copy_engine(plan: AttentionPlan, group: dist.ProcessGroup) -> AttentionPlan:
    """The same plan with its exchange inside the node by copy engine, which CPU ranks are refused."""
    if isinstance(plan, UlyssesPlan):
        choice = replace(plan.choice, head_exchange="copy_engine")
        return replace(plan, choice=choice, all_to_all=CopyEngineAllToAll(group, plan.cp.traffic))
    assert isinstance(plan, RingPlan)
    chunks, gradients = (CopyEngine(group, plan.cp.traffic, slots) for slots in (CHUNK_SLOTS, GRADIENT_SLOTS))
    pattern = AllPairsP2P(local_rank=plan.cp.rank, size=plan.cp.size, chunks=chunks, gradients=gradients)
    return replace(plan, choice=replace(plan.choice, exchange="copy_engine"), comms=RingComms(pattern))
