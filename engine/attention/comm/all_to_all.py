"""Trading tokens for heads among some ranks, and back. Source: DeepSpeed-Ulysses (arXiv:2309.14509).

Here by the process group's all-to-all; `engine.attention.comm.symm_mem.all_to_all` does it inside a node by copy engine.
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

from engine.attention.accumulate.bundle import bundle, sections
from engine.attention.accumulate.tensor_spec import TensorSpec, tensor_specs
from engine.attention.call_order import peers_needed
from engine.attention.comm.p2p import Traffic
from engine.attention.geometry.layout import Segment


@dataclass(frozen=True, slots=True)
class TokenRun:
    """A run of consecutive tokens as a member of the group holds it."""

    member: int
    offset: int  # among the member's local tokens
    count: int


def token_runs_in_order(shards: tuple[tuple[Segment, ...], ...]) -> tuple[TokenRun, ...]:
    """The members' runs of tokens in order of global position."""
    runs = []
    for member, segments in enumerate(shards):
        offset = 0
        for segment in segments:
            assert segment.step == 1, "striped shards are refused before"
            runs.append((segment.start, TokenRun(member, offset, segment.count)))
            offset += segment.count
    return tuple(piece for _start, piece in sorted(runs, key=lambda run: run[0]))


class HeadChunk(Protocol):
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


class AllToAllPass(Protocol):
    """The exchanges around one pass: heads go out to their ranks part after part, and results come back."""

    def lane(self, part: int) -> AbstractContextManager[object]:
        """The stream on which a part is sent for, computed and given back, as the current stream."""
        ...

    def send(self, tensors: tuple[Tensor, ...], part: int) -> Callable[[], HeadChunk]:
        """Some tokens of all heads -> the group's tokens, in order, of a part of this rank's heads. Returns at once;
        calling what it returns, once, makes the current stream wait."""
        ...

    def send_back(self, results: tuple[Tensor, ...], part: int) -> None:
        """The group's tokens of a part of this rank's heads, [B, T, H, ...], go to the ranks whose tokens they are."""
        ...

    def results(self) -> tuple[Tensor, ...]:
        """What all members gave back of this rank's tokens, all heads in order: [B, L, N, ...]."""
        ...


class AllToAll(Protocol):
    """How some ranks trade tokens for heads. `name` goes into records as the exchange."""

    name: str
    size: int  # ranks in it

    def trip(self, token_runs: tuple[TokenRun, ...], parts: int, *, alternate: bool) -> AllToAllPass:
        """The exchanges of one pass whose heads come in `parts` parts. With `alternate`, parts may take two streams in
        turn: for passes that wait for transfers of their own, so that the next part's begin meanwhile."""
        ...


class GroupAllToAll:
    """A `AllToAll` by all-to-all, one message per part and direction; a group of one keeps everything."""

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic) -> None:
        self.group, self._traffic = group, traffic
        self.size = 1 if group is None else dist.get_world_size(group)
        self.name = "none" if self.size == 1 else "all_to_all"

    def trip(self, token_runs: tuple[TokenRun, ...], parts: int, *, alternate: bool) -> AllToAllPass:
        return _Messages(self, token_runs, parts)

    def swap(self, rows: Tensor) -> Callable[[], Tensor]:
        """Row r of a bundle goes to member r; calling what is returned makes the current stream wait for the bundle of
        what the members sent here."""
        received = torch.empty_like(rows)
        self._traffic.add(rows[1:])  # one row stays here
        group = self.group
        assert group is not None, "a group of one keeps everything"
        peers = f"ranks {', '.join(map(str, dist.get_process_group_ranks(group)))}"
        with peers_needed(group, peers):
            work = dist.all_to_all_single(received, rows, group=group, async_op=True)

        def arrived() -> Tensor:
            with peers_needed(group, peers):
                work.wait()
            return received

        return arrived


@dataclass(frozen=True, slots=True)
class _InMemory:
    """An `HeadChunk` in memory of the allocator: nothing has to be given back."""

    tensors: tuple[Tensor, ...]

    def keep(self) -> tuple[Tensor, ...]:
        return self.tensors

    def done(self) -> None:
        """The allocator knows."""


class _Messages:
    """The trip of a `GroupAllToAll`: the tensors of a part travel as one bundle.

    Each message takes multiprocessors, and waits for them while an attention kernel has them all.
    """

    def __init__(self, exchange: GroupAllToAll, token_runs: tuple[TokenRun, ...], parts: int) -> None:
        self._exchange, self._pieces, self._parts = exchange, token_runs, parts
        self._returning: list[Callable[[], tuple[Tensor, ...]]] = []  # parts on their way back, oldest first
        self._home = 0  # parts that are there
        self._whole: tuple[Tensor, ...] = ()  # [B, L, group, parts, H, ...]

    def lane(self, part: int) -> AbstractContextManager[object]:
        return nullcontext()

    def send(self, tensors: tuple[Tensor, ...], part: int) -> Callable[[], HeadChunk]:
        size, parts = self._exchange.size, self._parts
        if size == 1:
            return lambda: _InMemory(tuple(tensor.chunk(parts, dim=2)[part] for tensor in tensors))
        split = tuple(tensor.unflatten(2, (size, parts, -1)).select(3, part).movedim(2, 0) for tensor in tensors)
        shapes = tensor_specs(tuple(by_rank[0] for by_rank in split))
        rows = bundle(shapes, size, tensors[0].device)
        for section, by_rank in zip(sections(rows, shapes), split, strict=True):
            section.copy_(by_rank)
        coming = [self._exchange.swap(rows)]
        # An arrival holds what it received: it is let go when the tensors have been put in order.
        return lambda: _InMemory(tuple(self._in_order(section) for section in sections(coming.pop()(), shapes)))

    def _in_order(self, by_rank: Tensor) -> Tensor:
        """[group, B, L, H, ...] -> the group's tokens in order, [B, T, H, ...]."""
        token_runs = self._pieces
        return torch.cat([by_rank[p.member, :, p.offset : p.offset + p.count] for p in token_runs], dim=1)

    def send_back(self, results: tuple[Tensor, ...], part: int) -> None:
        self._returning.append(self._send_back(results))
        # This part's own message came behind that of the part before the last: waiting for it costs nothing now, and
        # its memory is free for the parts to come.
        if len(self._returning) > 2:
            self._bring_home()

    def _send_back(self, results: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """The group's tokens of some heads -> some tokens of every member's, each [B, L, group, H, ...]."""
        size = self._exchange.size
        if size == 1:
            return lambda: tuple(result.unsqueeze(2) for result in results)
        shapes = tuple(
            TensorSpec((result.shape[0], result.shape[1] // size, *result.shape[2:]), result.dtype)
            for result in results
        )
        rows = bundle(shapes, size, results[0].device)
        for section, result in zip(sections(rows, shapes), results, strict=True):
            start = 0
            for p in self._pieces:
                section[p.member, :, p.offset : p.offset + p.count] = result[:, start : start + p.count]
                start += p.count
        arrival = self._exchange.swap(rows)
        return lambda: tuple(section.movedim(0, 2) for section in sections(arrival(), shapes))

    def _bring_home(self) -> None:
        """Put what comes back of the oldest part on its way beside the other parts' heads."""
        arrived = self._returning.pop(0)()
        if not self._whole:
            self._whole = tuple(heads.new_empty(*heads.shape[:3], self._parts, *heads.shape[3:]) for heads in arrived)
        for whole, heads in zip(self._whole, arrived, strict=True):
            whole[:, :, :, self._home] = heads
        self._home += 1

    def results(self) -> tuple[Tensor, ...]:
        while self._returning:
            self._bring_home()
        return tuple(whole.flatten(2, 4) for whole in self._whole)
