"""A node whose GPUs are processes of this host, for the code that needs streams, copy engines and graphs to run at all.

Each rank's symmetric memory is a file that the others map, so counters and copies between ranks are real. A stream runs
what it is given at once: everything happens in the order of the program, which transfers by copy engine must stand (a
device may run several streams as one). A wait for a counter that never comes fails after a while. A graph's capture
notes the driver's calls and torch's operations with what each depends on, as a device does: what came before on its
stream, and the events that the stream has waited for. A replay repeats them on the same memory, one after the other: in
the order of the program, or in any other one that these dependencies allow.
"""

from __future__ import annotations

import collections
import ctypes
import mmap
import os
import random
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from engine.attention.algorithms.ring import RingPlan
from engine.attention.algorithms.saved import AttentionPlan
from engine.attention.algorithms.ulysses import UlyssesPlan
from engine.attention.comm.exchange import AllPairsP2P, RingComms
from engine.attention.comm.symm_mem.all_to_all import CopyEngineAllToAll
from engine.attention.comm.symm_mem.copy_engine import CopyEngine
from engine.attention.comm_volume import CHUNK_SLOTS, GRADIENT_SLOTS
from engine.cuda import driver as cuda_driver
from engine.cuda.driver import WAIT_VALUE_32, WRITE_VALUE_32, _Box, _Operation

PATIENCE = 120.0  # seconds that a wait for a counter may take

calls: collections.Counter[str] = collections.Counter()  # of the driver and of streams, by name
_capture: list[Graph] = []  # the graph that is being captured, if any
_streams: dict[int, Stream] = {}  # by handle
_current: list[Stream] = []


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """A graph's operation."""

    work: Any
    stream: int  # handle of the one that it was captured on
    after: frozenset[Node]


Event = frozenset[Node]  # what is over once the event is; nothing of what ran when it was given


class Stream:
    """Work runs when it is given; in a capture it is noted."""

    def __init__(self, *_args: object, **_settings: object) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = len(_streams)
        self.last: Event = frozenset()  # in the graph that is being captured
        _streams[self.cuda_stream] = self

    def record_event(self) -> Event:
        calls["record event"] += 1
        return self.last

    def wait_event(self, event: Event) -> None:
        calls["wait for event"] += 1
        self.last |= event

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def note(self, work: Any) -> None:
        """`work` as the next node of the graph."""
        assert self.last, "a stream that has not waited for the graph's is given work of the graph"
        self.last = frozenset([_capture[-1].add(Node(work, self.cuda_stream, self.last))])


def _enqueue(name: str, stream: int, work: Any) -> int:
    """Run `work` now, or note it in the graph that is being captured."""
    calls[name] += 1
    if _capture:
        _streams[stream].note(work)
    else:
        work()
    return 0


class Driver:
    """The driver's functions that transfers use, on host addresses."""

    def cuStreamBatchMemOp_v2(self, stream: int, count: int, operations: Any, flags: int) -> int:
        given = ctypes.cast(operations, ctypes.POINTER(_Operation))
        noted = [(given[i].kind, given[i].address, given[i].value) for i in range(count)]
        return _enqueue("counters", stream, lambda: [_counter(*each) for each in noted])

    def cuMemcpyAsync(self, to: int, source: int, nbytes: int, stream: int) -> int:
        return _enqueue("copy", stream, lambda: ctypes.memmove(to, source, nbytes))

    def cuMemcpy3DBatchAsync_v2(self, count: int, operations: Any, flags: int, stream: int) -> int:
        if _capture:
            return 801  # CUDA_ERROR_NOT_SUPPORTED: a batch is no node of a graph
        words = ctypes.cast(operations, ctypes.POINTER(ctypes.c_uint64))
        boxes = [[words[14 * i + word] for word in range(14)] for i in range(count)]
        calls["copies in batches"] += count
        return _enqueue("batch of copies", stream, lambda: [_copy_box(box) for box in boxes])

    def cuMemcpy3DAsync_v2(self, reference: Any, stream: int) -> int:
        box: _Box = reference._obj
        words = [0, box.source, box.source_pitch, box.source_height, 0, 0, box.target, box.target_pitch]
        words += [box.target_height, 0, box.width, box.height, box.depth, 0]
        return _enqueue("copy", stream, lambda: _copy_box(words))


def _counter(kind: int, address: int, value: int) -> None:
    cell = ctypes.c_uint32.from_address(address)
    if kind == WRITE_VALUE_32:
        cell.value = value
        return
    assert kind == WAIT_VALUE_32
    ends = time.monotonic() + PATIENCE
    while (cell.value - value) & 0x80000000:  # at least, cyclic
        assert time.monotonic() < ends, "a counter that a stream waits for was never set"
        time.sleep(1e-4)


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


class Graph:
    """What a capture noted."""

    any_order: random.Random | None = None  # chooses the order of each replay; that of the program when None

    def __init__(self) -> None:
        self._nodes: list[Node] = []

    def add(self, node: Node) -> Node:
        self._nodes.append(node)
        return node

    def ended(self, stream: Stream) -> None:
        """Raises AssertionError where `stream`, on which the capture began, has not waited for all of it."""
        joined, behind = set(stream.last), list(stream.last)
        while behind:
            before = behind.pop().after - joined
            joined |= before
            behind += before
        assert joined >= set(self._nodes), "work of a graph on a stream that its first one does not wait for"

    def replay(self) -> None:
        calls["graph launch"] += 1
        with _disable_current_modes():  # no operation of the host is what a device repeats
            for node in self._nodes if self.any_order is None else self._ordered(self.any_order):
                node.work()

    def _ordered(self, chosen: random.Random) -> list[Node]:
        """The nodes as a device may run them that has one queue: those of one stream before those of another, in any
        order of the streams, as far as they depend on nothing else."""
        turns = {node.stream: chosen.random() for node in self._nodes}
        left = {node: len(node.after) for node in self._nodes}
        behind: dict[Node, list[Node]] = {node: [] for node in self._nodes}
        for node in self._nodes:
            for before in node.after:
                behind[before].append(node)
        ready, ordered = [node for node in self._nodes if not node.after], []
        while ready:
            node = min(ready, key=lambda node: turns[node.stream])
            ready.remove(node)
            ordered.append(node)
            for later in behind[node]:
                left[later] -= 1
                if not left[later]:
                    ready.append(later)
        assert len(ordered) == len(self._nodes)
        return ordered


class _Noting(TorchDispatchMode):
    """Notes torch's operations, so that their results can be formed again in the same memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        results = [each for each in tree_iter(found) if isinstance(each, torch.Tensor)]
        given = {
            each.untyped_storage().data_ptr() for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        if func._schema.is_mutable:
            _current[-1].note(lambda: func(*args, **kwargs))
        elif any(each.untyped_storage().data_ptr() not in given for each in results):

            def again() -> None:
                formed = [each for each in tree_iter(func(*args, **kwargs)) if isinstance(each, torch.Tensor)]
                for old, new in zip(results, formed, strict=True):
                    old.copy_(new)

            _current[-1].note(again)
        return found


@contextmanager
def _graph(graph: Graph, **_settings: object):
    for stream in _streams.values():
        stream.last = frozenset()  # events of earlier graphs
    _capture.append(graph)
    stream = Stream()
    stream.last = frozenset([graph.add(Node(lambda: None, stream.cuda_stream, frozenset()))])
    try:
        with _on(stream), _Noting():
            yield
        graph.ended(stream)
    finally:
        _capture.pop()


def become_a_gpu() -> None:
    """From now on this process, one of a group's ranks, has streams, copy engines and graphs."""
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
    torch.cuda.CUDAGraph = Graph
    torch.cuda.graph = _graph
    torch.cuda.graph_pool_handle = lambda: "pool"


@contextmanager
def _on(stream: Stream):
    calls["switch of stream"] += 1
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
