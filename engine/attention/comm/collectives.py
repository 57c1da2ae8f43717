"""Collectives of attention by the process group (NCCL or gloo): the all-to-all of Ulysses, and gathered K and V.

The all-to-all (DeepSpeed-Ulysses, arXiv:2309.14509) exchanges tokens for heads among some ranks, and returns results;
`engine.attention.comm.symm_mem.all_to_all` does it inside a node by copy engine. Gathered gradients are reduced by an
all-to-all of each rank's parts and one sum in fp32 on the rank that owns the tokens: as many bytes as a reduce-scatter,
and one rounding whatever the number of ranks.

Shape letters as in `engine.attention.op`, with T for the group's tokens and H for this rank's heads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.accumulate.accumulators import TensorSpec, tensor_specs
from engine.attention.comm.p2p import Traffic, peers_needed, send_rows
from engine.attention.geometry.layout import Segment
from engine.ops.autograd import accumulation_dtype

# The name since torch 2.13, and the one before it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
    return tuple(token_run for _start, token_run in sorted(runs, key=lambda run: run[0]))


def in_order(by_member: Tensor, token_runs: tuple[TokenRun, ...]) -> Tensor:
    """[members, B, L, H, ...] -> all members' tokens in order of position, [B, T, H, ...]."""
    return torch.cat([by_member[run.member, :, run.offset : run.offset + run.count] for run in token_runs], dim=1)


def write_by_member(by_member: Tensor, whole: Tensor, token_runs: tuple[TokenRun, ...]) -> None:
    """The reverse of `in_order`: write the tokens of `whole`, [B, T, H, ...], into `by_member`."""
    start = 0
    for run in token_runs:
        by_member[run.member, :, run.offset : run.offset + run.count] = whole[:, start : start + run.count]
        start += run.count


class HeadChunk:
    """The whole group's tokens of one chunk of this rank's heads, as received: here in memory of the allocator, which
    frees it with the last reference."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors  # each [B, T, H, ...], usable until `release`

    def save(self) -> tuple[Tensor, ...]:
        """The same values in memory that outlives `release`. Called before the work on `tensors` is launched."""
        return self.tensors

    def release(self) -> None:
        """The last use of `tensors` has been launched."""


class AllToAllPass(Protocol):
    """The exchanges of one forward or backward: head chunks are sent one after another, and results are sent back."""

    def stream(self, index: int) -> AbstractContextManager[object]:
        """Makes the stream that receives, computes and sends back head chunk `index` the current one."""
        ...

    def send(self, tensors: tuple[Tensor, ...], index: int) -> Callable[[], HeadChunk]:
        """Send this rank's tokens of every rank's head chunk `index`. Returns at once a function; calling it once
        makes the current stream wait and returns the chunk that this rank received."""
        ...

    def send_back(self, results: tuple[Tensor, ...], index: int) -> None:
        """Send results of a head chunk, [B, T, H, ...] over the group's tokens, to the ranks that own the tokens."""
        ...

    def results(self) -> tuple[Tensor, ...]:
        """All members' results of this rank's tokens, all heads in order: [B, L, N, ...]."""
        ...


class AllToAll(Protocol):
    """How some ranks exchange tokens for heads. `name` is recorded as the exchange."""

    name: str
    size: int  # ranks in it

    def begin(self, token_runs: tuple[TokenRun, ...], num_head_chunks: int, *, alternate: bool) -> AllToAllPass:
        """Begin one pass. With `alternate`, head chunks may use two streams in turn: for passes that wait for transfers
        of their own, so that the next chunk's begin meanwhile."""
        ...


class GroupAllToAll:
    """An `AllToAll` of the process group, one message per head chunk and direction; a group of one sends nothing."""

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic) -> None:
        self.group, self._traffic = group, traffic
        self.size = 1 if group is None else dist.get_world_size(group)
        self.name = "none" if self.size == 1 else "all_to_all"

    def begin(self, token_runs: tuple[TokenRun, ...], num_head_chunks: int, *, alternate: bool) -> AllToAllPass:
        return _GroupPass(self, token_runs, num_head_chunks)

    def exchange(self, rows: Tensor) -> Callable[[], Tensor]:
        """Send row r of a message to member r. Calling the result makes the current stream wait for the rows that the
        members sent here."""
        received = torch.empty_like(rows)
        self._traffic.add(rows[1:])  # one row stays here
        group = self.group
        assert group is not None, "a group of one keeps everything"
        peers = f"ranks {', '.join(map(str, dist.get_process_group_ranks(group)))}"
        with peers_needed(group, peers):
            if rows.is_cuda:
                works = [dist.all_to_all_single(received, rows, group=group, async_op=True)]
            else:
                works = send_rows(rows, received, group, self._traffic.tag)

        def receive() -> Tensor:
            with peers_needed(group, peers):
                for work in works:
                    work.wait()
            return received

        return receive


class _GroupPass:
    """The pass of a `GroupAllToAll`: the tensors of a head chunk are packed into one message.

    Each message needs multiprocessors, and waits for them while an attention kernel occupies all.
    """

    def __init__(self, all_to_all: GroupAllToAll, token_runs: tuple[TokenRun, ...], num_head_chunks: int) -> None:
        self._all_to_all, self._token_runs, self._num_head_chunks = all_to_all, token_runs, num_head_chunks
        self._returning: list[Callable[[], tuple[Tensor, ...]]] = []  # results being sent back, oldest first
        self._returned = 0  # head chunks whose results are here
        self._whole: tuple[Tensor, ...] = ()  # [B, L, group, head chunks, H, ...]

    def stream(self, index: int) -> AbstractContextManager[object]:
        return nullcontext()

    def send(self, tensors: tuple[Tensor, ...], index: int) -> Callable[[], HeadChunk]:
        size, chunks = self._all_to_all.size, self._num_head_chunks
        if size == 1:
            return lambda: HeadChunk(tuple(tensor.chunk(chunks, dim=2)[index] for tensor in tensors))
        split = tuple(tensor.unflatten(2, (size, chunks, -1)).select(3, index).movedim(2, 0) for tensor in tensors)
        specs = tensor_specs(tuple(by_rank[0] for by_rank in split))
        rows = message(specs, size, tensors[0].device)
        for section, by_rank in zip(sections(rows, specs), split, strict=True):
            section.copy_(by_rank)
        # The list holds the received message only until its tokens have been put in order.
        receive = [self._all_to_all.exchange(rows)]
        runs = self._token_runs
        return lambda: HeadChunk(tuple(in_order(section, runs) for section in sections(receive.pop()(), specs)))

    def send_back(self, results: tuple[Tensor, ...], index: int) -> None:
        self._returning.append(self._send_back(results))
        # The message of the chunk before the last was sent before the one of this chunk: it has arrived, waiting for it
        # now costs nothing, and its memory is free for later chunks.
        if len(self._returning) > 2:
            self._receive_results()

    def _send_back(self, results: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """The group's tokens of some heads -> some tokens of every member's, each [B, L, group, H, ...]."""
        size = self._all_to_all.size
        if size == 1:
            return lambda: tuple(result.unsqueeze(2) for result in results)
        specs = tuple(TensorSpec((t.shape[0], t.shape[1] // size, *t.shape[2:]), t.dtype) for t in results)
        rows = message(specs, size, results[0].device)
        for section, result in zip(sections(rows, specs), results, strict=True):
            write_by_member(section, result, self._token_runs)
        receive = self._all_to_all.exchange(rows)
        return lambda: tuple(section.movedim(0, 2) for section in sections(receive(), specs))

    def _receive_results(self) -> None:
        """Place the results of the oldest head chunk under way beside those of the other chunks."""
        received = self._returning.pop(0)()
        if not self._whole:
            shape = (self._num_head_chunks,)
            self._whole = tuple(heads.new_empty(*heads.shape[:3], *shape, *heads.shape[3:]) for heads in received)
        for whole, heads in zip(self._whole, received, strict=True):
            whole[:, :, :, self._returned] = heads
        self._returned += 1

    def results(self) -> tuple[Tensor, ...]:
        while self._returning:
            self._receive_results()
        return tuple(whole.flatten(2, 4) for whole in self._whole)


def message(specs: tuple[TensorSpec, ...], ranks: int, device: torch.device) -> Tensor:
    """Memory for tensors of `specs` from or to each rank: uint8 [ranks, bytes], values undefined.

    A row is as long as its tensors, rounded up so that the widest dtype is aligned in the next row.
    """
    widest = max(spec.dtype.itemsize for spec in specs)
    row_bytes = -(-sum(spec.nbytes for spec in specs) // widest) * widest
    return torch.empty(ranks, row_bytes, dtype=torch.uint8, device=device)


def sections(rows: Tensor, specs: tuple[TensorSpec, ...]) -> tuple[Tensor, ...]:
    """The tensors of a message, in the order of `specs`: views of it, each [ranks, *shape].

    The widest dtype is first: behind it all others are aligned without a gap.
    """
    views, start = {}, 0
    for index in sorted(range(len(specs)), key=lambda index: -specs[index].dtype.itemsize):
        spec = specs[index]
        views[index] = rows[:, start : start + spec.nbytes].view(spec.dtype).unflatten(1, spec.shape)
        start += spec.nbytes
    return tuple(views[index] for index in range(len(specs)))


class GroupGather:
    """Gathers and reduces among the ranks of a group, whose bytes are counted as sent to each other rank."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self._group, self._traffic, self._all_to_all = group, traffic, GroupAllToAll(group, traffic)
        self.size = dist.get_world_size(group)
        self._peers = f"ranks {', '.join(map(str, dist.get_process_group_ranks(group)))}"

    def start(self, tensors: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Send these to every rank. Calling the result makes the current stream wait and returns every rank's, each
        [ranks, *shape]."""
        specs = tensor_specs(tensors)
        row = message(specs, 1, tensors[0].device)
        for section, tensor in zip(sections(row, specs), tensors, strict=True):
            section[0].copy_(tensor)
        rows = row.new_empty(self.size, row.shape[1])
        self._traffic.sent_bytes += (self.size - 1) * row.numel()
        with peers_needed(self._group, self._peers):
            if row.is_cuda:
                works = [_all_gather(rows, row, group=self._group, async_op=True)]
            else:
                works = send_rows(row, rows, self._group, self._traffic.tag)

        def receive() -> tuple[Tensor, ...]:
            with peers_needed(self._group, self._peers):
                for work in works:
                    work.wait()
            return sections(rows, specs)

        return receive

    def reduced(self, by_owner: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Sums over the ranks of this rank's part of each tensor [ranks, *shape], in the dtype of accumulation."""
        specs = tensor_specs(tuple(tensor[0] for tensor in by_owner))
        rows = message(specs, self.size, by_owner[0].device)
        for section, tensor in zip(sections(rows, specs), by_owner, strict=True):
            section.copy_(tensor)
        received = sections(self._all_to_all.exchange(rows)(), specs)
        return tuple(part.sum(dim=0, dtype=accumulation_dtype(part.dtype)) for part in received)
