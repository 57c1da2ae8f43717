"""Trading tokens for heads among some ranks, and back. Source: DeepSpeed-Ulysses (arXiv:2309.14509).

Shape letters as in `engine.attention.op`, with T for the group's tokens and H for this rank's share of the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.layout import Segment
from engine.attention.transport import Traffic

Arrival = Callable[[], Tensor]  # waits for a tensor under way; called once


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
    """All-to-all among the ranks of a group; a group of one keeps everything.

    The heads a rank will hold can come in several parts, one message each, so that one part travels while another is
    computed. Both directions return at once; calling what they return waits for the tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic) -> None:
        self.group, self._traffic = group, traffic
        self.size = 1 if group is None else dist.get_world_size(group)

    def to_heads(self, tensor_BLND: Tensor, pieces: tuple[Piece, ...], part: int = 0, parts: int = 1) -> Arrival:
        """Some tokens of all heads -> the group's tokens, in order, of a part of this rank's heads: [B, T, H, ...]."""
        if self.size == 1:
            mine = tensor_BLND.chunk(parts, dim=2)[part]
            return lambda: mine
        by_part = tensor_BLND.unflatten(2, (self.size, parts, tensor_BLND.shape[2] // (self.size * parts)))
        arrival = self._all_to_all(by_part.select(3, part).movedim(2, 0).contiguous())

        def arrived() -> Tensor:
            received = arrival()
            return torch.cat([received[p.member, :, p.offset : p.offset + p.count] for p in pieces], dim=1)

        return arrived

    def to_tokens(self, tensor_BTHD: Tensor, pieces: tuple[Piece, ...]) -> Arrival:
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

    def _all_to_all(self, by_rank: Tensor) -> Arrival:
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


def whole_heads(parts_BLGHD: list[Tensor]) -> Tensor:
    """Tokens of every member's heads, part after part as they travelled, in order of head: [B, L, N, ...]."""
    return torch.stack(parts_BLGHD, dim=3).flatten(2, 4)
