"""Trading tokens for heads among some ranks, and back. Source: DeepSpeed-Ulysses (arXiv:2309.14509).

Here by the process group's all-to-all; `engine.attention.head_copies` does it inside a node by copy engine.
Shape letters as in `engine.attention.op`, with T for the group's tokens and H for this rank's share of the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.layout import Segment
from engine.attention.transport import Traffic


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of consecutive tokens as a member of the group holds it."""

    member: int
    offset: int  # among the member's local tokens
    count: int


def pieces_in_order(shards: tuple[tuple[Segment, ...], ...]) -> tuple[Piece, ...]:
    """The members' runs of tokens in order of global position."""
    runs = []
    for member, segments in enumerate(shards):
        offset = 0
        for segment in segments:
            assert segment.step == 1, "striped shards are refused before"
            runs.append((segment.start, Piece(member, offset, segment.count)))
            offset += segment.count
    return tuple(piece for _start, piece in sorted(runs, key=lambda run: run[0]))


class Arrived(Protocol):
    """The whole sequence's tensors of one part of this rank's heads."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Each [B, T, H, ...], usable until `done`."""
        ...

    def keep(self) -> tuple[Tensor, ...]:
        """The same values to hold on to for longer. Called before the work on `tensors` is launched."""
        ...

    def done(self) -> None:
        """The last use of `tensors` has been launched."""
        ...


class HeadTrip(Protocol):
    """The exchanges around one pass: heads go out to their ranks part after part, and results come back."""

    def lane(self, part: int) -> AbstractContextManager[object]:
        """The stream on which a part is sent for, computed and given back, as the current stream."""
        ...

    def send(self, tensors: tuple[Tensor, ...], part: int) -> Callable[[], Arrived]:
        """Some tokens of all heads -> the group's tokens, in order, of a part of this rank's heads. Returns at once;
        calling what it returns, once, makes the current stream wait."""
        ...

    def give_back(self, results: tuple[Tensor, ...], part: int) -> None:
        """The group's tokens of a part of this rank's heads, [B, T, H, ...], go to the ranks whose tokens they are."""
        ...

    def results(self) -> tuple[Tensor, ...]:
        """What all members gave back of this rank's tokens, all heads in order: [B, L, N, ...]."""
        ...


class HeadTrade(Protocol):
    """How some ranks trade tokens for heads. `name` goes into records as the exchange."""

    name: str
    size: int  # ranks in it

    def trip(self, pieces: tuple[Piece, ...], parts: int, *, alternate: bool) -> HeadTrip:
        """The exchanges of one pass whose heads come in `parts` parts. With `alternate`, parts may take two streams in
        turn: for passes that wait for transfers of their own, so that the next part's begin meanwhile."""
        ...


class HeadExchange:
    """A `HeadTrade` by all-to-all messages, one per tensor and part; a group of one keeps everything."""

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic) -> None:
        self.group, self._traffic = group, traffic
        self.size = 1 if group is None else dist.get_world_size(group)
        self.name = "none" if self.size == 1 else "all_to_all"

    def trip(self, pieces: tuple[Piece, ...], parts: int, *, alternate: bool) -> HeadTrip:
        return _Messages(self, pieces, parts)

    def to_heads(self, tensor_BLND: Tensor, pieces: tuple[Piece, ...], part: int, parts: int) -> Callable[[], Tensor]:
        """One tensor of `HeadTrip.send`."""
        if self.size == 1:
            mine = tensor_BLND.chunk(parts, dim=2)[part]
            return lambda: mine
        by_part = tensor_BLND.unflatten(2, (self.size, parts, tensor_BLND.shape[2] // (self.size * parts)))
        arrival = self._all_to_all(by_part.select(3, part).movedim(2, 0).contiguous())

        def arrived() -> Tensor:
            received = arrival()
            return torch.cat([received[p.member, :, p.offset : p.offset + p.count] for p in pieces], dim=1)

        return arrived

    def to_tokens(self, tensor_BTHD: Tensor, pieces: tuple[Piece, ...]) -> Callable[[], Tensor]:
        """The group's tokens of some heads -> some tokens of every member's: [B, L, group, H, ...]."""
        if self.size == 1:
            return lambda: tensor_BTHD.unsqueeze(2)
        batch, tokens, heads, *rest = tensor_BTHD.shape
        by_rank = tensor_BTHD.new_empty(self.size, batch, tokens // self.size, heads, *rest)
        start = 0
        for p in pieces:
            by_rank[p.member, :, p.offset : p.offset + p.count] = tensor_BTHD[:, start : start + p.count]
            start += p.count
        arrival = self._all_to_all(by_rank)
        return lambda: arrival().movedim(0, 2)

    def _all_to_all(self, by_rank: Tensor) -> Callable[[], Tensor]:
        received = torch.empty_like(by_rank)
        self._traffic.add(by_rank[1:])  # one part stays here
        output, sent = received, by_rank
        if not by_rank.is_cuda:  # gloo's all-to-all has no bf16; flat, because a last dimension of one has any stride
            output, sent = received.flatten().view(torch.uint8), by_rank.flatten().view(torch.uint8)
        work = dist.all_to_all_single(output, sent, group=self.group, async_op=True)

        def arrived() -> Tensor:
            work.wait()
            return received

        return arrived


@dataclass(frozen=True, slots=True)
class _InMemory:
    """An `Arrived` in memory of the allocator: nothing has to be given back."""

    tensors: tuple[Tensor, ...]

    def keep(self) -> tuple[Tensor, ...]:
        return self.tensors

    def done(self) -> None:
        """The allocator knows."""


class _Messages:
    """The trip of a `HeadExchange`."""

    def __init__(self, exchange: HeadExchange, pieces: tuple[Piece, ...], parts: int) -> None:
        self._exchange, self._pieces, self._parts = exchange, pieces, parts
        self._returning: list[list[Callable[[], Tensor]]] = []

    def lane(self, part: int) -> AbstractContextManager[object]:
        return nullcontext()

    def send(self, tensors: tuple[Tensor, ...], part: int) -> Callable[[], Arrived]:
        coming = [self._exchange.to_heads(tensor, self._pieces, part, self._parts) for tensor in tensors]
        # An arrival holds what it received: each is let go when its tensor has been put in order.
        return lambda: _InMemory(tuple(coming.pop(0)() for _ in range(len(coming))))

    def give_back(self, results: tuple[Tensor, ...], part: int) -> None:
        self._returning.append([self._exchange.to_tokens(tensor, self._pieces) for tensor in results])

    def results(self) -> tuple[Tensor, ...]:
        def whole() -> Tensor:
            # Tokens of every member's heads, part after part as they travelled, in order of head.
            return torch.stack([part.pop(0)() for part in self._returning], dim=3).flatten(2, 4)

        return tuple(whole() for _ in range(len(self._returning[0])))
