"""Trading tokens for heads inside a node by the GPU's copy engines: nothing is packed, nothing takes a multiprocessor.

A copy engine cuts rows of some heads out of [tokens, heads, dim] and lays them down elsewhere as fast as it moves one
long run (347 GiB/s between two H200, rows of 512 bytes), so shards cross from where they lie to where the kernel reads
them. While one part of the heads is computed the next arrives and the last one's results go home. What arrived is
copied out of its receive slot only where backward wants it again.

Idea of the exchange: DeepSpeed-Ulysses (arXiv:2309.14509). Slots and counters: `engine.attention.mailbox`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.cuda_driver import Block
from engine.attention.head_exchange import Arrived, HeadTrip, Piece
from engine.attention.like import Like
from engine.attention.mailbox import Mailbox, Message, aligned, message_bytes
from engine.attention.transport import Traffic

SLOTS = 2  # one part is used while the next arrives
# Up to this many bytes of its largest tensor, a part is computed on the other of two streams than the one before it:
# its first tiles then run on the multiprocessors that the last ones of that part leave idle. Long kernels gain nothing
# from it and would hold two parts' workspace.
SHORT_PART_BYTES = 1 << 26


class HeadCopies:
    """A `HeadTrade` for the ranks of one node."""

    name = "copy_engine"

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self.out, self.back = Mailbox(group, traffic, SLOTS), Mailbox(group, traffic, SLOTS)
        self.rank, self.size = self.out.rank, self.out.size
        self.beside = torch.cuda.Stream()  # copies out of slots, beside the kernels
        self.lanes = (torch.cuda.Stream(), torch.cuda.Stream())  # for kernels of short parts

    def trip(self, pieces: tuple[Piece, ...], parts: int) -> HeadTrip:
        return _Copies(self, pieces, parts, torch.cuda.current_stream())


class _Copies:
    """The trip of `HeadCopies`."""

    def __init__(self, trade: HeadCopies, pieces: tuple[Piece, ...], parts: int, current: torch.cuda.Stream) -> None:
        self._trade, self._parts, self._current = trade, parts, current
        self._runs: list[list[tuple[int, int, int]]] = [[] for _ in range(trade.size)]
        start = 0
        for piece in pieces:  # by member: (offset among its tokens, among the group's, count)
            self._runs[piece.member].append((piece.offset, start, piece.count))
            start += piece.count
        self._inputs: tuple[Tensor, ...] = ()
        self._whole: tuple[Tensor, ...] = ()
        self._lanes: tuple[torch.cuda.Stream, ...] = ()  # none: the stream that is current
        self._leaving: dict[int, tuple[torch.cuda.Event, tuple[Tensor, ...]]] = {}  # by lane

    def lane(self, part: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._lanes[part % len(self._lanes)]) if self._lanes else nullcontext()

    def send(self, tensors: tuple[Tensor, ...], part: int) -> Callable[[], Arrived]:
        trade, box = self._trade, self._trade.out
        if part == 0:
            self._inputs = tuple(_rows(tensor) for tensor in tensors)
        likes = tuple(self._arriving(tensor) for tensor in self._inputs)
        if part == 0 and self._parts > 1 and max(like.nbytes for like in likes) <= SHORT_PART_BYTES:
            self._lanes = trade.lanes
            # What a lane's allocator takes again was last used before this, by the stream that is current.
            ready = torch.cuda.current_stream().record_event()
            for stream in self._lanes:
                stream.wait_event(ready)
        box.reserve(message_bytes(likes))
        message = box.open()
        box.follow()
        for to in _from_the_next(trade.rank, trade.size):
            box.send(message, to, self._outward(likes, to * self._parts + part))

        def arrived() -> Arrived:
            for source in range(trade.size):
                box.await_part(message, source)
            return _InSlot(box, message, likes, trade.beside)

        return arrived

    def give_back(self, results: tuple[Tensor, ...], part: int) -> None:
        trade, box = self._trade, self._trade.back
        results = tuple(_rows(tensor) for tensor in results)
        likes = tuple(self._returning(tensor) for tensor in results)
        box.reserve(message_bytes(likes))
        if not self._whole:
            with torch.cuda.stream(self._current):  # who gets the results
                self._whole = tuple(
                    result.new_empty(*like.shape[:2], trade.size, self._parts, *like.shape[3:])
                    for result, like in zip(results, likes, strict=True)
                )
                trade.beside.wait_event(self._current.record_event())
        message = box.open()
        box.follow()
        for to in _from_the_next(trade.rank, trade.size):
            box.send(message, to, self._homeward(results, likes, to))
        lane = part % max(1, len(self._lanes))
        if lane in self._leaving:  # gone long ago: what was computed on this lane before
            torch.cuda.current_stream().wait_event(self._leaving.pop(lane)[0])
        self._leaving[lane] = (box.sent(), results)
        with torch.cuda.stream(trade.beside):
            for source in range(trade.size):
                box.await_part(message, source)
            for whole, slot in zip(self._whole, message.window.tensors(message.number, likes), strict=True):
                whole[:, :, :, part].copy_(slot)
            box.release(message)

    def results(self) -> tuple[Tensor, ...]:
        # The allocator may give what was sent, and what was copied, to the current stream after this.
        ends = [stream.record_event() for stream in (self._trade.beside, *self._lanes)]
        for event in (*ends, self._trade.out.sent(), self._trade.back.sent()):
            self._current.wait_event(event)
        self._inputs, self._leaving = (), {}
        return tuple(whole.flatten(2, 4) for whole in self._whole)

    def _arriving(self, tensor_BLND: Tensor) -> Like:
        batch, tokens, heads, *rest = tensor_BLND.shape
        share = heads // (self._trade.size * self._parts)
        return Like((batch, tokens * self._trade.size, share, *rest), tensor_BLND.dtype)

    def _returning(self, tensor_BTHD: Tensor) -> Like:
        batch, tokens, heads, *rest = tensor_BTHD.shape
        return Like((batch, tokens // self._trade.size, self._trade.size, heads, *rest), tensor_BTHD.dtype)

    def _outward(self, likes: tuple[Like, ...], share: int) -> Iterator[Block]:
        """This rank's tokens of the `share`-th part of all heads, each where it belongs among the group's tokens."""
        start = 0
        for tensor, like in zip(self._inputs, likes, strict=True):
            width = _row_bytes(like, 2)
            yield from _blocks(
                tensor,
                tensor.data_ptr() + share * width,
                (start, like.nbytes // like.shape[0], width),
                width,
                self._runs[self._trade.rank],
            )
            start += aligned(like.nbytes)

    def _homeward(self, results: tuple[Tensor, ...], likes: tuple[Like, ...], to: int) -> Iterator[Block]:
        """What this rank computed of the tokens of rank `to`, each beside the other ranks' heads of the token."""
        runs = [(start, offset, count) for offset, start, count in self._runs[to]]
        target = 0
        for tensor, like in zip(results, likes, strict=True):
            width = _row_bytes(like, 3)
            place = target + self._trade.rank * width
            layout = (place, like.nbytes // like.shape[0], width * self._trade.size)
            yield from _blocks(tensor, tensor.data_ptr(), layout, width, runs)
            target += aligned(like.nbytes)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with the bytes of a token's heads side by side, as a copy engine's rows need them; tokens may lie
    apart."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if size > 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def _row_bytes(like: Like, first: int) -> int:
    return math.prod(like.shape[first:]) * like.dtype.itemsize


def _blocks(
    tensor: Tensor, source: int, target: tuple[int, int, int], width: int, runs: list[tuple[int, int, int]]
) -> Iterator[Block]:
    """Copies of `width` bytes of each token of some runs (token at the source, token at the target, count).

    `source` is the address of token 0 of the first sequence, `target` its offset with the bytes from one sequence and
    one token to the next. Two runs of one length, as a zigzag rank holds, are two layers of one copy.
    """
    place, sequence_bytes, target_pitch = target
    source_pitch, source_sequence = (tensor.stride(dim) * tensor.itemsize for dim in (1, 0))
    for sequence in range(tensor.shape[0]):
        at, to = source + sequence * source_sequence, place + sequence * sequence_bytes
        index = 0
        while index < len(runs):
            first, start, count = runs[index]
            layers, source_layer, target_layer = 1, 0, 0
            if index + 1 < len(runs):
                next_first, next_start, next_count = runs[index + 1]
                if next_count == count and next_first - first >= count and next_start - start >= count:
                    layers, source_layer, target_layer = 2, next_first - first, next_start - start
            yield Block(
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


def _from_the_next(rank: int, size: int) -> Iterator[int]:
    """All ranks, the own one last: at any time every rank is sent to by one other."""
    return ((rank + step) % size for step in range(1, size + 1))


class _InSlot:
    """An `Arrived` in a receive slot."""

    def __init__(self, box: Mailbox, message: Message, likes: tuple[Like, ...], beside: torch.cuda.Stream) -> None:
        self._tensors = message.window.tensors(message.number, likes)
        self._box, self._message, self._beside = box, message, beside
        self._kept: list[torch.cuda.Event] = []

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._tensors

    def keep(self) -> tuple[Tensor, ...]:
        copies = tuple(torch.empty_like(tensor) for tensor in self._tensors)
        self._beside.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._beside):
            for copy, tensor in zip(copies, self._tensors, strict=True):
                copy.copy_(tensor)
        self._kept.append(self._beside.record_event())
        return copies

    def done(self) -> None:
        self._box.release(self._message, *self._kept)
