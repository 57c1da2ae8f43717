"""From a layout's order of tokens to consecutive tokens on every rank, and back.

Hidden states move, once before a linear layer's norm and once after its output matrix: fewer bytes than queries, keys
and values. All tokens that a rank sends to another one are consecutive in its shard, because shards ascend in position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.accumulate.accumulators import TensorSpec
from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import Layout
from engine.linear.runs import COPIES
from engine.linear.volume import moved_tokens
from engine.ops.autograd import refuse_second_derivative


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenOrder:
    """The move of one rank's tokens."""

    sent: tuple[int, ...]  # tokens for each rank, in local order
    received: tuple[int, ...]  # tokens from each rank
    arrival_L: Tensor  # of each arriving token, rank by rank, its place among this rank's consecutive tokens
    place_L: Tensor  # the reverse: of each consecutive token, its number among those that arrive
    _copies: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`arrival_L` and `place_L` on a device: layers share one copy."""
        if device not in self._copies:
            self._copies[device] = self.arrival_L.to(device), self.place_L.to(device)
        return self._copies[device]


@lru_cache(maxsize=COPIES)
def order_of(layout: Layout, seq_len: int, cp_size: int, cp_rank: int) -> TokenOrder | None:
    """None where the layout's order is that of consecutive tokens, on every rank."""
    tokens, moved = seq_len // cp_size, moved_tokens(layout, seq_len, cp_size)
    if (moved == tokens * np.eye(cp_size)).all():  # shards ascend in position
        return None
    arrival = np.concatenate(
        [_within(layout, seq_len, cp_size, rank, cp_rank * tokens, tokens) for rank in range(cp_size)]
    )
    return TokenOrder(
        sent=tuple(moved[cp_rank].tolist()),
        received=tuple(moved[:, cp_rank].tolist()),
        arrival_L=torch.from_numpy(arrival),
        place_L=torch.from_numpy(np.argsort(arrival)),
    )


def _within(layout: Layout, seq_len: int, cp_size: int, rank: int, first: int, tokens: int) -> NDArray[np.int64]:
    """Of a rank's tokens those at the positions from `first` on, `tokens` of them, counted from there."""
    held = np.concatenate([np.asarray(each.positions()) for each in layout.segments(seq_len, cp_size, rank)]) - first
    return held[(held >= 0) & (held < tokens)]


def to_consecutive(x_BLE: Tensor, cp: ContextParallel) -> Tensor:
    """This rank's consecutive tokens, from the shards in the layout's order. Collective, and differentiable."""
    order = order_of(cp.layout, x_BLE.shape[1] * cp.size, cp.size, cp.rank) if cp.size > 1 else None
    return x_BLE if order is None else _Move.apply(x_BLE, cp, order, True)


def from_consecutive(x_BLE: Tensor, cp: ContextParallel) -> Tensor:
    """The reverse."""
    order = order_of(cp.layout, x_BLE.shape[1] * cp.size, cp.size, cp.rank) if cp.size > 1 else None
    return x_BLE if order is None else _Move.apply(x_BLE, cp, order, False)


class _Move(torch.autograd.Function):
    """(x_BLE, ranks, order, whether to consecutive tokens) -> the moved x_BLE."""

    @staticmethod
    def forward(ctx: Any, x_BLE: Tensor, cp: ContextParallel, order: TokenOrder, consecutive: bool) -> Tensor:
        ctx.cp, ctx.order, ctx.consecutive = cp, order, consecutive
        return _moved(x_BLE, cp, order, consecutive)

    @staticmethod
    def backward(ctx: Any, dx_BLE: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative("the order of tokens", dx_BLE)
        return _moved(dx_BLE, ctx.cp, ctx.order, not ctx.consecutive), None, None, None


def _moved(x_BLE: Tensor, cp: ContextParallel, order: TokenOrder, consecutive: bool) -> Tensor:
    if not consecutive:
        x_BLE = x_BLE.index_select(1, order.on(x_BLE.device)[0])
    sent, received = (order.sent, order.received) if consecutive else (order.received, order.sent)
    parts, others = x_BLE.split(sent, 1), [rank for rank in range(cp.size) if rank != cp.rank]
    sources = [rank for rank in others if received[rank]]
    specs = [TensorSpec((x_BLE.shape[0], received[rank], x_BLE.shape[2]), x_BLE.dtype) for rank in sources]
    with cp.comms.collective():
        to = [(rank, parts[rank]) for rank in others if sent[rank]]
        transfer = cp.comms.linear().exchange(to, list(zip(sources, specs, strict=True)))
        by_rank = {cp.rank: parts[cp.rank]} | dict(zip(sources, transfer.wait(), strict=True))
    arrived = [by_rank[rank] for rank in sorted(by_rank)]
    joined_BLE = torch.cat(arrived, 1)
    return joined_BLE.index_select(1, order.on(x_BLE.device)[1]) if consecutive else joined_BLE
