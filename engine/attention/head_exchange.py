"""Trading tokens for heads among some ranks, and back. Source: DeepSpeed-Ulysses (arXiv:2309.14509).

Shape letters as in `engine.attention.op`, with T for the group's tokens and H for this rank's share of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass

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


class HeadExchange:
    """All-to-all among the ranks of a group; a group of one keeps everything."""

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic) -> None:
        self.group, self._traffic = group, traffic
        self.size = 1 if group is None else dist.get_world_size(group)

    def to_heads(self, tensor_BLND: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
        """Some tokens of all heads -> the group's tokens, in order, of some heads: [B, L, N, ...] -> [B, T, H, ...]."""
        if self.size == 1:
            return tensor_BLND
        heads = tensor_BLND.shape[2] // self.size
        received = self._all_to_all(tensor_BLND.unflatten(2, (self.size, heads)).movedim(2, 0).contiguous())
        return torch.cat([received[p.member, :, p.offset : p.offset + p.count] for p in pieces], dim=1)

    def to_tokens(self, tensor_BTHD: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
        """The group's tokens of some heads -> some tokens of all heads: `to_heads` undone."""
        if self.size == 1:
            return tensor_BTHD
        batch, tokens, heads, *rest = tensor_BTHD.shape
        by_rank = tensor_BTHD.new_empty(self.size, batch, tokens // self.size, heads, *rest)
        start = 0
        for p in pieces:
            by_rank[p.member, :, p.offset : p.offset + p.count] = tensor_BTHD[:, start : start + p.count]
            start += p.count
        received = self._all_to_all(by_rank)  # [group, B, L, H, ...]: heads of member after member
        return received.movedim(0, 2).flatten(2, 3)

    def _all_to_all(self, by_rank: Tensor) -> Tensor:
        received = torch.empty_like(by_rank)
        self._traffic.add(by_rank[1:])  # one part stays here
        if by_rank.is_cuda:
            dist.all_to_all_single(received, by_rank, group=self.group)
        else:  # gloo's all-to-all has no bf16
            dist.all_to_all_single(received.view(torch.uint8), by_rank.view(torch.uint8), group=self.group)
        return received
