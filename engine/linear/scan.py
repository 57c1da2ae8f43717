"""The state before each rank's tokens: an exclusive prefix scan of affine maps over the ranks.

Rank r maps the state before its tokens, S, to the state after them, A S + B. The state before rank r is that of the
maps of ranks 0 to r - 1, one after another, applied to 0. In round i every rank sends the map of the last 2^i ranks up
to itself to rank r + 2^i (Hillis and Steele, 1986), so ceil(log2 ranks) rounds are enough, and a message has the size
of a state and of A, whatever the length of the sequence. The gradient is the same scan from the last rank to the first
with A transposed: with dS the gradient of the state before a rank,

    dB_r = the gradient of the state after rank r = A_(r+1)^T dB_(r+1) + dS_(r+1)        dA_r = dB_r S_r^T

A has one matrix per head (delta rule) or one number (Mamba-2). A document that starts on a rank has A = 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.attention.accumulate.accumulators import tensor_specs
from engine.attention.context import ContextParallel
from engine.ops.autograd import outside_autocast, refuse_second_derivative


class StateScan:
    """Among the ranks of a context, of which there are several."""

    def __init__(self, cp: ContextParallel) -> None:
        self._cp = cp

    def __call__(self, map_BVNN: Tensor, state_BVNP: Tensor) -> Tensor:
        """The state [B, V, N, P] before this rank's tokens, from A ([B, V, N, N], or [B, V, 1, 1] for a number) and B.

        Collective, and so is its backward.
        """
        return _Scan.apply(map_BVNN, state_BVNP, self)

    def exclusive(self, map_BVNN: Tensor, state_BVNP: Tensor, *, reverse: bool = False) -> Tensor:
        """The scan without autograd; `reverse`: from the last rank to the first."""
        cp = self._cp
        place = cp.size - 1 - cp.rank if reverse else cp.rank
        before = torch.zeros_like(state_BVNP)  # the maps of the ranks in front, applied to 0 ...
        reached = None  # ... and how they map a state before them, None: no rank yet
        distance = 1
        with cp.comms.collective():
            transport = cp.comms.linear()
            while distance < cp.size:
                last = 2 * distance >= cp.size  # nothing is in front of what arrives: its map is not needed
                sent = (state_BVNP,) if last else (map_BVNN, state_BVNP)
                to, source = place + distance, place - distance
                transfer = transport.start(
                    sent if to < cp.size else (),
                    self._rank(min(to, cp.size - 1), reverse),
                    tensor_specs(sent) if source >= 0 else (),
                    self._rank(max(source, 0), reverse),
                )
                arrived = transfer.wait()
                if arrived:
                    earlier = arrived[-1]
                    before = earlier if reached is None else before + applied(reached, earlier)
                    if not last:
                        reached = arrived[0] if reached is None else applied(reached, arrived[0])
                        state_BVNP = state_BVNP + applied(map_BVNN, earlier)
                        map_BVNN = applied(map_BVNN, arrived[0])
                distance *= 2
        return before

    def _rank(self, place: int, reverse: bool) -> int:
        return self._cp.size - 1 - place if reverse else place


def applied(map_BVNN: Tensor, state_BVNP: Tensor) -> Tensor:
    """A S: a matrix product, or a number times the state."""
    return map_BVNN * state_BVNP if map_BVNN.shape[-1] == 1 else map_BVNN @ state_BVNP


class _Scan(torch.autograd.Function):
    """(A, B) -> the state before this rank."""

    @staticmethod
    @outside_autocast
    def forward(ctx: Any, map_BVNN: Tensor, state_BVNP: Tensor, scan: StateScan) -> Tensor:
        before_BVNP = scan.exclusive(map_BVNN, state_BVNP)
        ctx.save_for_backward(map_BVNN, before_BVNP)
        ctx.scan = scan
        return before_BVNP

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dbefore_BVNP: Tensor) -> tuple[Tensor, Tensor, None]:
        refuse_second_derivative("the scan of states", dbefore_BVNP)
        map_BVNN, before_BVNP = ctx.saved_tensors
        dstate_BVNP = ctx.scan.exclusive(map_BVNN.mT, dbefore_BVNP, reverse=True)
        if map_BVNN.shape[-1] == 1:
            dmap = (dstate_BVNP * before_BVNP).sum((-2, -1), keepdim=True)
        else:
            dmap = dstate_BVNP @ before_BVNP.mT
        return dmap, dstate_BVNP, None
