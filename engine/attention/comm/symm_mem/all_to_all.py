"""Trading tokens for heads inside a node by the GPU's copy engines: nothing is packed, nothing takes a multiprocessor.

A copy engine cuts rows of some heads out of [tokens, heads, dim] and lays them down elsewhere as fast as it moves one
long run (346 GiB/s between two H200, rows of 512 bytes), so shards cross from where they lie to where the kernel reads
them. While one part of the heads is computed the next arrives and the last one's results go home. What arrived is
copied out of its receive slot only where backward wants it again.

Idea of the exchange: DeepSpeed-Ulysses (arXiv:2309.14509). Slots and counters: `engine.attention.comm.symm_mem.channel`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.accumulate.tensor_spec import TensorSpec
from engine.attention.comm.all_to_all import AllToAllPass, HeadChunk, TokenRun
from engine.attention.comm.p2p import Traffic
from engine.attention.comm.symm_mem.all_to_all_copies import CopyPlanner, from_slot, in_rows
from engine.attention.comm.symm_mem.channel import Message, SymmMemChannel, message_bytes
from engine.streams import own_stream

SLOTS = 2  # one part is used while the next arrives


class CopyEngineAllToAll:
    """A `AllToAll` for the ranks of one node."""

    name = "copy_engine"

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self.out, self.back = SymmMemChannel(group, traffic, SLOTS), SymmMemChannel(group, traffic, SLOTS)
        self.rank, self.size = self.out.rank, self.out.size
        self.beside = own_stream()  # copies results out of slots, beside the kernels
        self.keeping = own_stream()  # copies what backward wants again, beside the results
        self.lanes = (own_stream(), own_stream())
        self._routes: dict[tuple[tuple[TokenRun, ...], int], CopyPlanner] = {}

    def trip(self, token_runs: tuple[TokenRun, ...], parts: int, *, alternate: bool) -> AllToAllPass:
        route = self._routes.get((token_runs, parts))
        if route is None:
            route = self._routes[token_runs, parts] = CopyPlanner(self.rank, self.size, token_runs, parts)
        return _Copies(self, route, torch.cuda.current_stream(), self.lanes if alternate and parts > 1 else ())


class _Copies:
    """The trip of `CopyEngineAllToAll`."""

    def __init__(
        self,
        trade: CopyEngineAllToAll,
        route: CopyPlanner,
        current: torch.cuda.Stream,
        lanes: tuple[torch.cuda.Stream, ...],
    ) -> None:
        """`lanes`: the streams that parts take in turn; none for the one that is current."""
        self._trade, self._route, self._current, self._lanes = trade, route, current, lanes
        self._inputs: tuple[Tensor, ...] = ()
        self._whole: tuple[Tensor, ...] = ()
        self._leaving: dict[int, tuple[torch.cuda.Event, tuple[Tensor, ...]]] = {}  # by lane

    def lane(self, part: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._lanes[part % len(self._lanes)]) if self._lanes else nullcontext()

    def send(self, tensors: tuple[Tensor, ...], part: int) -> Callable[[], HeadChunk]:
        trade, box = self._trade, self._trade.out
        if part == 0:
            self._inputs = tuple(in_rows(tensor) for tensor in tensors)
        copies = self._route.outward(self._inputs, part)
        if part == 0 and self._lanes:
            # What a lane's allocator takes again was last used before this, by the stream that is current.
            ready = self._current.record_event()
            for stream in self._lanes:
                stream.wait_event(ready)
        box.reserve(message_bytes(copies.tensor_specs))
        message = box.open()
        box.follow()
        box.send_all(message, copies.plan, self._inputs, copies.away_bytes)

        def arrived() -> HeadChunk:
            box.await_all(message)
            return _InSlot(box, message, copies.tensor_specs, trade.keeping)

        return arrived

    def send_back(self, results: tuple[Tensor, ...], part: int) -> None:
        trade, box = self._trade, self._trade.back
        results = tuple(in_rows(tensor) for tensor in results)
        copies = self._route.homeward(results)
        box.reserve(message_bytes(copies.tensor_specs))
        if not self._whole:
            with torch.cuda.stream(self._current):  # who gets the results
                self._whole = tuple(
                    result.new_empty(*like.shape[:2], trade.size, self._route.parts, *like.shape[3:])
                    for result, like in zip(results, copies.tensor_specs, strict=True)
                )
                trade.beside.wait_event(self._current.record_event())
        message = box.open()
        box.follow()
        box.send_all(message, copies.plan, results, copies.away_bytes)
        lane = part % max(1, len(self._lanes))
        if lane in self._leaving:  # gone long ago: what was computed on this lane before
            torch.cuda.current_stream().wait_event(self._leaving.pop(lane)[0])
        self._leaving[lane] = (box.sent(), results)
        with torch.cuda.stream(trade.beside):
            box.await_all(message)
            unpack = self._route.homecoming(copies.tensor_specs, part)
            slot = message.window.slot(trade.rank, message.number)
            unpack.launch(trade.beside.cuda_stream, [slot], [whole.data_ptr() for whole in self._whole])
            box.release(message)

    def results(self) -> tuple[Tensor, ...]:
        # The allocator may give what was sent, and what was copied, to the current stream after this.
        ends = [stream.record_event() for stream in (self._trade.beside, self._trade.keeping, *self._lanes)]
        for event in (*ends, self._trade.out.sent(), self._trade.back.sent()):
            self._current.wait_event(event)
        self._inputs, self._leaving = (), {}
        return tuple(whole.flatten(2, 4) for whole in self._whole)


class _InSlot:
    """An `HeadChunk` in a receive slot."""

    def __init__(
        self, box: SymmMemChannel, message: Message, tensor_specs: tuple[TensorSpec, ...], keeping: torch.cuda.Stream
    ) -> None:
        self._tensors = message.window.tensors(message.number, tensor_specs)
        self._box, self._message, self._likes, self._keeping = box, message, tensor_specs, keeping
        self._kept: list[torch.cuda.Event] = []

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._tensors

    def keep(self) -> tuple[Tensor, ...]:
        copies = tuple(torch.empty_like(tensor) for tensor in self._tensors)
        self._keeping.wait_event(torch.cuda.current_stream().record_event())
        slot = self._message.window.slot(self._box.rank, self._message.number)
        from_slot(self._likes).launch(self._keeping.cuda_stream, [slot], [copy.data_ptr() for copy in copies])
        self._kept.append(self._keeping.record_event())
        return copies

    def done(self) -> None:
        self._box.release(self._message, *self._kept)
