"""The all-to-all of Ulysses inside a node by the GPU's copy engines: no packing, and no multiprocessor is occupied.

A copy engine reads rows of some heads out of [tokens, heads, dim] and writes them elsewhere as fast as it moves one
long run (346 GiB/s between two H200, rows of 512 bytes), so shards are copied from where they are to where the kernel
reads them. While one head chunk is computed the next is received and the last one's results are sent back. A received
chunk is copied out of its receive slot only where backward needs it again.

`CopyPlanner` plans the copies once for a shape: where each token's heads are written, as copies of rows. A message
holds its tensors one behind the other in the receiver's slot: [B, T, H, ...] when sent, [B, L, group, H, ...] when sent
back.

The exchange is that of DeepSpeed-Ulysses (arXiv:2309.14509). Slots and counters:
`engine.attention.comm.symm_mem.channel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.accumulate.accumulators import TensorSpec
from engine.attention.comm.collectives import AllToAllPass, HeadChunk, TokenRun
from engine.attention.comm.p2p import Traffic
from engine.attention.comm.symm_mem.channel import Message, SymmMemChannel, message_bytes, offsets
from engine.attention.comm_volume import HEAD_SLOTS
from engine.cuda.driver import CopyBatch, StridedCopy
from engine.cuda.streams import own_stream

RowCopy = tuple[StridedCopy, int, int]  # of `engine.cuda.driver.CopyBatch`


class CopyEngineAllToAll:
    """An `AllToAll` for the ranks of one node."""

    name = "copy_engine"

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self.outbound, self.inbound = (SymmMemChannel(group, traffic, HEAD_SLOTS) for _ in range(2))
        self.rank, self.size = self.outbound.rank, self.outbound.size
        self.unpack_stream = own_stream()  # copies results out of receive slots, beside the kernels
        self.save_stream = own_stream()  # copies tensors that backward needs again, beside the results
        self.chunk_streams = (own_stream(), own_stream())
        self._planners: dict[tuple[tuple[TokenRun, ...], int], CopyPlanner] = {}

    def begin(self, token_runs: tuple[TokenRun, ...], num_head_chunks: int, *, alternate: bool) -> AllToAllPass:
        planner = self._planners.get((token_runs, num_head_chunks))
        if planner is None:
            planner = self._planners[token_runs, num_head_chunks] = CopyPlanner(
                self.rank, self.size, token_runs, num_head_chunks
            )
        return _CopyEnginePass(
            self, planner, torch.cuda.current_stream(), self.chunk_streams if alternate and num_head_chunks > 1 else ()
        )


class _CopyEnginePass:
    """The pass of a `CopyEngineAllToAll`."""

    def __init__(
        self,
        all_to_all: CopyEngineAllToAll,
        planner: CopyPlanner,
        current: torch.cuda.Stream,
        chunk_streams: tuple[torch.cuda.Stream, ...],
    ) -> None:
        """`chunk_streams`: the streams that head chunks use in turn; empty for the current one."""
        self._all_to_all, self._planner, self._current, self._chunk_streams = (
            all_to_all,
            planner,
            current,
            chunk_streams,
        )
        self._inputs: tuple[Tensor, ...] = ()
        self._whole: tuple[Tensor, ...] = ()
        self._leaving: dict[int, tuple[torch.cuda.Event, tuple[Tensor, ...]]] = {}  # by index of the chunk stream
        self._ends: dict[str, torch.cuda.Event] = {}  # of what was last given to the streams of this pass, by stream

    def stream(self, index: int) -> AbstractContextManager[object]:
        return (
            torch.cuda.stream(self._chunk_streams[index % len(self._chunk_streams)])
            if self._chunk_streams
            else nullcontext()
        )

    def send(self, tensors: tuple[Tensor, ...], index: int) -> Callable[[], HeadChunk]:
        all_to_all, channel = self._all_to_all, self._all_to_all.outbound
        if index == 0:
            self._inputs = tuple(in_rows(tensor) for tensor in tensors)
        copies = self._planner.send(self._inputs, index)
        if index == 0 and self._chunk_streams:
            # Memory that these streams' allocator pools reuse was last used before this, by the current stream.
            ready = self._current.record_event()
            for stream in self._chunk_streams:
                stream.wait_event(ready)
        channel.reserve(copies.slot_bytes)
        message = channel.open()
        channel.follow()
        channel.send_all(message, copies.plan, self._inputs, copies.away_bytes)

        self._ends["sent"] = channel.sent()

        def receive() -> HeadChunk:
            channel.await_all(message)
            return _SlotChunk(channel, message, copies, all_to_all.save_stream, self._ends)

        return receive

    def send_back(self, results: tuple[Tensor, ...], index: int) -> None:
        all_to_all, channel = self._all_to_all, self._all_to_all.inbound
        results = tuple(in_rows(tensor) for tensor in results)
        copies = self._planner.send_back(results)
        channel.reserve(copies.slot_bytes)
        if not self._whole:
            # On the stream that receives the results.
            with torch.cuda.stream(self._current) if self._chunk_streams else nullcontext():
                self._whole = tuple(
                    result.new_empty(*spec.shape[:2], all_to_all.size, self._planner.num_head_chunks, *spec.shape[3:])
                    for result, spec in zip(results, copies.specs, strict=True)
                )
                all_to_all.unpack_stream.wait_event(self._current.record_event())
        message = channel.open()
        channel.follow()
        channel.send_all(message, copies.plan, results, copies.away_bytes)
        turn = index % max(1, len(self._chunk_streams))
        if turn in self._leaving:  # sent long ago: the results of the chunk that used this stream before
            torch.cuda.current_stream().wait_event(self._leaving.pop(turn)[0])
        sent = self._ends["sent back"] = channel.sent()
        self._leaving[turn] = (sent, results)
        stream = all_to_all.unpack_stream
        channel.await_all(message, stream)
        slot, wholes = message.buffer.slot(all_to_all.rank, message.number), [each.data_ptr() for each in self._whole]
        copies.unpack[index].launch(stream.cuda_stream, [slot], wholes)
        self._ends["unpacked"] = channel.release(message, stream=stream)

    def results(self) -> tuple[Tensor, ...]:
        # After this the allocator may reuse, on the current stream, memory that was sent or copied.
        for event in (*self._ends.values(), *(stream.record_event() for stream in self._chunk_streams)):
            self._current.wait_event(event)
        self._inputs, self._leaving = (), {}
        return tuple(whole.flatten(2, 4) for whole in self._whole)


class _SlotChunk(HeadChunk):
    """One in a receive slot."""

    def __init__(
        self,
        channel: SymmMemChannel,
        message: Message,
        planned: Planned,
        save_stream: torch.cuda.Stream,
        ends: dict[str, torch.cuda.Event],
    ) -> None:
        super().__init__(message.buffer.tensors(message.number, planned.specs))
        self._channel, self._message, self._planned, self._save_stream = channel, message, planned, save_stream
        self._copied: list[torch.cuda.Event] = []
        self._ends = ends  # of the pass

    def save(self) -> tuple[Tensor, ...]:
        copies = tuple(torch.empty_like(tensor) for tensor in self.tensors)
        self._save_stream.wait_event(torch.cuda.current_stream().record_event())
        slot = self._message.buffer.slot(self._channel.rank, self._message.number)
        places = [copy.data_ptr() for copy in copies]
        self._planned.unpack[0].launch(self._save_stream.cuda_stream, [slot], places)
        self._ends["saved"] = self._save_stream.record_event()
        self._copied.append(self._ends["saved"])
        return copies

    def release(self) -> None:
        self._channel.release(self._message, *self._copied)


@dataclass(frozen=True, slots=True)
class Planned:
    """The copies of one message."""

    plan: CopyBatch
    specs: tuple[TensorSpec, ...]  # of the tensors that arrive in every rank's slot
    slot_bytes: int  # that they need there
    away_bytes: int  # that leave this GPU
    unpack: tuple[
        CopyBatch, ...
    ]  # of what has arrived, out of its slot: for head chunk i of results number i, else one


class _TensorLayout(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _sources(tensors: tuple[Tensor, ...]) -> tuple[_TensorLayout, ...]:
    return tuple([_TensorLayout(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])


class CopyPlanner:
    """Plans the copies of one rank in a group of `size`, whose members hold `token_runs`; a rank's heads are cut
    into `num_head_chunks` chunks."""

    def __init__(self, rank: int, size: int, token_runs: tuple[TokenRun, ...], num_head_chunks: int) -> None:
        self.rank, self.size, self.num_head_chunks = rank, size, num_head_chunks
        self._runs: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
        start = 0
        for run in token_runs:  # by member: (offset among its tokens, among the group's, count)
            self._runs[run.member].append((run.offset, start, run.count))
            start += run.count
        self._planned: dict[object, Planned] = {}

    def send(self, tensors_BLND: tuple[Tensor, ...], index: int) -> Planned:
        """This rank's tokens of every rank's head chunk `index`, each to its place among the group's tokens."""
        sources = _sources(tensors_BLND)
        key = (index, sources)
        if key not in self._planned:
            specs = tuple(self._arriving(source) for source in sources)
            entries = [
                entry
                for to in self._from_the_next()
                for entry in self._send(sources, specs, to, to * self.num_head_chunks + index)
            ]
            self._planned[key] = self._plan(entries, specs, (unpack_slot(specs),))
        return self._planned[key]

    def send_back(self, tensors_BTHD: tuple[Tensor, ...]) -> Planned:
        """This rank's results for every rank's tokens, each to its place beside the other ranks' heads."""
        sources = _sources(tensors_BTHD)
        if sources not in self._planned:
            specs = tuple(self._returning(source) for source in sources)
            entries = [entry for to in self._from_the_next() for entry in self._send_back(sources, specs, to)]
            chunks = self.num_head_chunks
            unpack = tuple(unpack_slot(specs, chunks, index) for index in range(chunks))
            self._planned[sources] = self._plan(entries, specs, unpack)
        return self._planned[sources]

    def _plan(self, entries: list[RowCopy], specs: tuple[TensorSpec, ...], unpack: tuple[CopyBatch, ...]) -> Planned:
        away = sum(block.nbytes for block, _tensor, to in entries if to != self.rank)
        return Planned(CopyBatch(entries), specs, message_bytes(specs), away, unpack)

    def _arriving(self, source: _TensorLayout) -> TensorSpec:
        batch, tokens, heads, *rest = source.shape
        return TensorSpec((batch, tokens * self.size, heads // (self.size * self.num_head_chunks), *rest), source.dtype)

    def _returning(self, source: _TensorLayout) -> TensorSpec:
        batch, tokens, heads, *rest = source.shape
        return TensorSpec((batch, tokens // self.size, self.size, heads, *rest), source.dtype)

    def _send(
        self, sources: tuple[_TensorLayout, ...], specs: tuple[TensorSpec, ...], to: int, share: int
    ) -> Iterator[RowCopy]:
        for index, (source, spec, place) in enumerate(zip(sources, specs, offsets(specs), strict=True)):
            width = row_bytes(spec, 2)
            target = (place, spec.nbytes // spec.shape[0], width)
            for block in _blocks(source, share * width, target, width, self._runs[self.rank]):
                yield block, index, to

    def _send_back(
        self, sources: tuple[_TensorLayout, ...], specs: tuple[TensorSpec, ...], to: int
    ) -> Iterator[RowCopy]:
        runs = [(start, offset, count) for offset, start, count in self._runs[to]]
        for index, (source, spec, place) in enumerate(zip(sources, specs, offsets(specs), strict=True)):
            width = row_bytes(spec, 3)
            target = (place + self.rank * width, spec.nbytes // spec.shape[0], width * self.size)
            for block in _blocks(source, 0, target, width, runs):
                yield block, index, to

    def _from_the_next(self) -> Iterator[int]:
        """All ranks, this one last: at any time every rank receives from one other."""
        return ((self.rank + step) % self.size for step in range(1, self.size + 1))


def unpack_slot(specs: tuple[TensorSpec, ...], num_head_chunks: int = 1, chunk: int = 0) -> CopyBatch:
    """From a slot (the only tensor) to allocated tensors (the places): those received, or for results all ranks' heads,
    [B, L, group, head chunks, H, ...], of which this chunk's are number `chunk`."""
    entries = []
    for index, (spec, place) in enumerate(zip(specs, offsets(specs), strict=True)):
        width = row_bytes(spec, 3 if num_head_chunks > 1 else 2)
        entries.append(
            (StridedCopy(place, chunk * width, width, spec.nbytes // width, width, num_head_chunks * width), 0, index)
        )
    return CopyBatch(entries)


def in_rows(tensor: Tensor) -> Tensor:
    """The tensor with the bytes of a token's heads contiguous, as a copy engine's rows need them."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if size > 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    # A copy engine cannot read tokens that overlap, as an expanded tensor's do, as rows.
    return tensor if tensor.shape[1] == 1 or tensor.stride(1) >= expected else tensor.contiguous()


def row_bytes(spec: TensorSpec, first: int) -> int:
    """Bytes of the dimensions from `first` on."""
    return math.prod(spec.shape[first:]) * spec.dtype.itemsize


def _blocks(
    source: _TensorLayout, first_byte: int, target: tuple[int, int, int], width: int, runs: list[tuple[int, int, int]]
) -> Iterator[StridedCopy]:
    """Copies of `width` bytes of each token of some runs (token at the source, token at the target, count).

    `first_byte` is where they start in a token at the source; `target` where token 0 of the first sequence is written,
    with the bytes from one sequence and one token to the next. Two runs of one length, as a zigzag rank holds, are two
    layers of one copy.
    """
    place, sequence_bytes, target_pitch = target
    source_sequence, source_pitch = (source.stride[dim] * source.dtype.itemsize for dim in (0, 1))
    for sequence in range(source.shape[0]):
        at, to = first_byte + sequence * source_sequence, place + sequence * sequence_bytes
        index = 0
        while index < len(runs):
            first, start, count = runs[index]
            layers, source_layer, target_layer = 1, 0, 0
            if index + 1 < len(runs):
                next_first, next_start, next_count = runs[index + 1]
                if next_count == count and next_first - first >= count and next_start - start >= count:
                    layers, source_layer, target_layer = 2, next_first - first, next_start - start
            yield StridedCopy(
                source=at + first * source_pitch,
                target=to + start * target_pitch,
                width=width,
                rows=count,
                source_pitch=source_pitch,
                target_pitch=target_pitch,
                layers=layers,
                source_layer=source_layer,
                target_layer=target_layer,
            )
            index += layers
