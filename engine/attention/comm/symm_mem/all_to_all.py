"""The all-to-all of Ulysses inside a node by the GPU's copy engines: no packing, and no multiprocessor is occupied.

A copy engine reads rows of some heads out of [tokens, heads, dim] and writes them elsewhere as fast as it moves one
long run (346 GiB/s between two H200, rows of 512 bytes), so shards are copied from where they are to where the kernel
reads them. While one head chunk is computed the next is received and the last one's results are sent back. A received
chunk is copied out of its receive slot only where backward needs it again.

The exchange is that of DeepSpeed-Ulysses (arXiv:2309.14509). Slots and counters:
`engine.attention.comm.symm_mem.channel`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.comm.all_to_all import AllToAllPass, HeadChunk, TokenRun
from engine.attention.comm.p2p import Traffic
from engine.attention.comm.symm_mem.all_to_all_copies import CopyPlanner, Planned, in_rows
from engine.attention.comm.symm_mem.channel import Message, SymmMemChannel
from engine.attention.comm_volume import HEAD_SLOTS
from engine.cuda.streams import own_stream


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


class _SlotChunk:
    """A `HeadChunk` in a receive slot."""

    def __init__(
        self,
        channel: SymmMemChannel,
        message: Message,
        planned: Planned,
        save_stream: torch.cuda.Stream,
        ends: dict[str, torch.cuda.Event],
    ) -> None:
        self._tensors = message.buffer.tensors(message.number, planned.specs)
        self._channel, self._message, self._planned, self._save_stream = channel, message, planned, save_stream
        self._copied: list[torch.cuda.Event] = []
        self._ends = ends  # of the pass

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._tensors

    def save(self) -> tuple[Tensor, ...]:
        copies = tuple(torch.empty_like(tensor) for tensor in self._tensors)
        self._save_stream.wait_event(torch.cuda.current_stream().record_event())
        slot = self._message.buffer.slot(self._channel.rank, self._message.number)
        places = [copy.data_ptr() for copy in copies]
        self._planned.unpack[0].launch(self._save_stream.cuda_stream, [slot], places)
        self._ends["saved"] = self._save_stream.record_event()
        self._copied.append(self._ends["saved"])
        return copies

    def release(self) -> None:
        self._channel.release(self._message, *self._copied)
