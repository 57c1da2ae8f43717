"""The copies of an all-to-all: where each token's heads are written, as copies of rows, planned once for a shape.

Shape letters as in `engine.attention.comm.all_to_all`. A message holds its tensors one behind the other in the
receiver's slot: [B, T, H, ...] when sent, [B, L, group, H, ...] when sent back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.accumulate.accumulators import TensorSpec
from engine.attention.comm.all_to_all import TokenRun
from engine.attention.comm.symm_mem.channel import message_bytes, offsets
from engine.cuda.driver import Block, Copies

Entry = tuple[Block, int, int]  # of `engine.cuda.driver.Copies`


@dataclass(frozen=True, slots=True)
class Planned:
    """The copies of one message."""

    plan: Copies
    specs: tuple[TensorSpec, ...]  # of the tensors that arrive in every rank's slot
    slot_bytes: int  # that they need there
    away_bytes: int  # that leave this GPU
    unpack: tuple[Copies, ...]  # of what has arrived, out of its slot: for head chunk i of results number i, else one


class _Source(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _sources(tensors: tuple[Tensor, ...]) -> tuple[_Source, ...]:
    return tuple([_Source(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])


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

    def _plan(self, entries: list[Entry], specs: tuple[TensorSpec, ...], unpack: tuple[Copies, ...]) -> Planned:
        away = sum(block.nbytes for block, _tensor, to in entries if to != self.rank)
        return Planned(Copies(entries), specs, message_bytes(specs), away, unpack)

    def _arriving(self, source: _Source) -> TensorSpec:
        batch, tokens, heads, *rest = source.shape
        return TensorSpec((batch, tokens * self.size, heads // (self.size * self.num_head_chunks), *rest), source.dtype)

    def _returning(self, source: _Source) -> TensorSpec:
        batch, tokens, heads, *rest = source.shape
        return TensorSpec((batch, tokens // self.size, self.size, heads, *rest), source.dtype)

    def _send(
        self, sources: tuple[_Source, ...], specs: tuple[TensorSpec, ...], to: int, share: int
    ) -> Iterator[Entry]:
        for index, (source, spec, place) in enumerate(zip(sources, specs, offsets(specs), strict=True)):
            width = row_bytes(spec, 2)
            target = (place, spec.nbytes // spec.shape[0], width)
            for block in _blocks(source, share * width, target, width, self._runs[self.rank]):
                yield block, index, to

    def _send_back(self, sources: tuple[_Source, ...], specs: tuple[TensorSpec, ...], to: int) -> Iterator[Entry]:
        runs = [(start, offset, count) for offset, start, count in self._runs[to]]
        for index, (source, spec, place) in enumerate(zip(sources, specs, offsets(specs), strict=True)):
            width = row_bytes(spec, 3)
            target = (place + self.rank * width, spec.nbytes // spec.shape[0], width * self.size)
            for block in _blocks(source, 0, target, width, runs):
                yield block, index, to

    def _from_the_next(self) -> Iterator[int]:
        """All ranks, this one last: at any time every rank receives from one other."""
        return ((self.rank + step) % self.size for step in range(1, self.size + 1))


def unpack_slot(specs: tuple[TensorSpec, ...], num_head_chunks: int = 1, chunk: int = 0) -> Copies:
    """From a slot (the only tensor) to allocated tensors (the places): those received, or for results all ranks' heads,
    [B, L, group, head chunks, H, ...], of which this chunk's are number `chunk`."""
    entries = []
    for index, (spec, place) in enumerate(zip(specs, offsets(specs), strict=True)):
        width = row_bytes(spec, 3 if num_head_chunks > 1 else 2)
        entries.append(
            (Block(place, chunk * width, width, spec.nbytes // width, width, num_head_chunks * width), 0, index)
        )
    return Copies(entries)


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
    source: _Source, first_byte: int, target: tuple[int, int, int], width: int, runs: list[tuple[int, int, int]]
) -> Iterator[Block]:
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
