"""Forms of Ulysses that DeepSpeed has beside the plain one: repeated K and V heads, all-to-alls beside projections.

Shape letters as in `engine.attention.op`, with T for all tokens, H for this rank's heads and P for ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.algorithms.saved import SavedOutput
from engine.attention.bound import BoundAttention
from engine.attention.comm.p2p import peers_needed
from engine.attention.comm_volume import Sent
from engine.attention.context import ContextParallel
from engine.attention.masks import parse_mask
from engine.attention.prepared import PreparedAttention, prepare_attention
from engine.settings import TrialSettings


def repeated(kv_BLKD: Tensor, heads: int) -> Tensor:
    """K or V with `heads` heads, a multiple of its own: each one so many times, next to each other."""
    times = heads // kv_BLKD.shape[2]
    return kv_BLKD.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3)


class RepeatingHeads:
    """An `engine.method.AttentionFn`: another one, given K and V with as many heads as there are ranks. Source:
    DeepSpeed's `UlyssesSPAttentionHF`, where each rank then attends with one of them."""

    def __init__(self, attend: BoundAttention, ranks: int) -> None:
        self._attend, self._ranks = attend, ranks
        self.keep, self.resolved, self.computed_sent = attend.keep, attend.resolved, attend.computed_sent

    def __call__(
        self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, saved: SavedOutput | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._attend(q_BLND, repeated(k_BLKD, self._ranks), repeated(v_BLKD, self._ranks), saved=saved)


class OverlappedUlysses:
    """An `engine.method.AttentionFn` with an all-to-all of its own for each of q, k and v, begun when that is formed.

    The model calls `formed` with q, k and v in this order: q's all-to-all runs beside the projection of k, and k's
    beside that of v. In backward all three begin together, and each is waited for where its projection's gradients are
    formed. Source: DeepSpeed's `DistributedAttention` with `sp_stream`. Neither LSE nor delta is sent: attention is one
    call over all tokens of this rank's heads, which saves O and LSE of them.
    """

    def __init__(self, cp: ContextParallel, settings: TrialSettings) -> None:
        self.cp, self._settings, self._mask = cp, settings, parse_mask(settings.mask)
        assert cp.group is not None, "one rank exchanges nothing"
        self.group = cp.group
        self._peers = f"ranks {', '.join(map(str, dist.get_process_group_ranks(self.group)))}"
        self._alone = ContextParallel.single("contiguous")
        self._begun: list[_Exchange] = []  # of q, k and v that the model has formed
        self._prepared: dict[object, PreparedAttention] = {}
        self._sent: Sent | None = None

    def formed(self, heads_BLND: Tensor) -> Tensor:
        """Begin to send q, k or v. Returns what is being received, for the call of attention alone."""
        ranks = self.cp.size
        exchange = _Exchange(self)
        self._begun.append(exchange)
        if heads_BLND.shape[2] % ranks:
            heads_BLND = repeated(heads_BLND, ranks)
        with self.cp.collective():
            received: Tensor = _Begin.apply(heads_BLND, exchange)
        return received

    def __call__(
        self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, saved: SavedOutput | None = None
    ) -> tuple[Tensor, Tensor]:
        """(out_BLND, lse_BHT): the LSE is that of this rank's heads, and nothing is kept of it."""
        received = (q_BLND, k_BLKD, v_BLKD)
        with self.cp.collective():
            if not self._begun:
                received = (self.formed(q_BLND), self.formed(k_BLKD), self.formed(v_BLKD))
            begun, self._begun = self._begun, []
            q, k, v = (_End.apply(part, exchange) for part, exchange in zip(received, begun, strict=True))
            out_BTHD, lse_BHT = self._prepared_for(q, k)(q, k, v)
            out_BLND: Tensor = _Back.apply(out_BTHD, self)
        self._count(q, k)
        return out_BLND, lse_BHT

    def _prepared_for(self, q_BTHD: Tensor, k_BTHD: Tensor) -> PreparedAttention:
        key = (q_BTHD.shape, k_BTHD.shape, q_BTHD.dtype, q_BTHD.device)
        if key not in self._prepared:
            self._prepared[key] = prepare_attention(
                q_BTHD, k_BTHD, mask=self._mask, cp=self._alone, kernel=self._settings.kernel,
                deterministic=self._settings.deterministic, return_lse=True, lse_gradient=False,
                tensor_layout="BSHD",
            )  # fmt: skip
        return self._prepared[key]

    def _count(self, q_BTHD: Tensor, k_BTHD: Tensor) -> None:
        """q, k, v and out, and the gradients of each."""
        cp, of_one = self.cp, 4 * (q_BTHD.numel() + k_BTHD.numel()) * q_BTHD.itemsize // self.cp.size
        self._sent = Sent(of_one * (cp.node_size - 1), of_one * (cp.size - cp.node_size))

    def keep(self, out_BLND: Tensor, lse_BNL: Tensor, tail: float) -> SavedOutput | None:
        """Nothing: a repeated call computes everything again."""
        return None

    def resolved(self) -> dict[str, str]:
        last = next(reversed(self._prepared.values()), None)
        if last is None:
            return {}
        exchange = {"schedule": "ulysses", "backward": "all_to_all", "exchange": "all_to_all"}
        return last.resolved() | exchange | {"num_head_chunks": "1", "grad_comm_dtype": "fp32"}

    def computed_sent(self) -> Sent | None:
        """Bytes this rank sends in one forward and backward; None before the first call."""
        return self._sent

    def begin(self, rows: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Send row r to rank r. Returns the memory that is received into, and a function that makes the current stream
        wait for it."""
        received = torch.empty_like(rows)
        self.cp.traffic.add(rows[1:])  # one row stays here
        with peers_needed(self.group, self._peers):
            work = dist.all_to_all_single(received, rows, group=self.group, async_op=True)

        def wait() -> None:
            nonlocal rows
            with peers_needed(self.group, self._peers):
                work.wait()
            del rows  # was held until it had been sent

        return received, wait

    def by_heads(self, tensor_BLND: Tensor) -> Tensor:
        """Heads of each rank, [P, B, L, H, D]."""
        return tensor_BLND.unflatten(2, (self.cp.size, -1)).movedim(2, 0).contiguous()

    def by_tokens(self, tensor_BTHD: Tensor) -> Tensor:
        """Tokens of each rank, [P, B, L, H, D]."""
        return tensor_BTHD.unflatten(1, (self.cp.size, -1)).movedim(1, 0).contiguous()


class _Exchange:
    """One tensor on its way to the heads' ranks, and its gradient on the way back."""

    def __init__(self, ulysses: OverlappedUlysses) -> None:
        self.ulysses = ulysses
        self.wait: Callable[[], None] | None = None

    def begin(self, rows: Tensor) -> Tensor:
        received, self.wait = self.ulysses.begin(rows)
        return received

    def end(self) -> None:
        assert self.wait is not None, "begun before"
        self.wait()
        self.wait = None


class _Begin(torch.autograd.Function):
    """(tensor_BLND, exchange) -> what is being received, [P, B, L, H, D]; backward waits for the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor_BLND: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(exchange.ulysses.by_heads(tensor_BLND))

    @staticmethod
    def backward(ctx: Any, received_PBLHD: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.end()
        return received_PBLHD.movedim(0, 2).flatten(2, 3), None


class _End(torch.autograd.Function):
    """(what is being received, exchange) -> [B, T, H, D], received; backward begins to send the gradient."""

    @staticmethod
    def forward(ctx: Any, received_PBLHD: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.end()
        return received_PBLHD.movedim(0, 1).flatten(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, grad_BTHD: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        return exchange.begin(exchange.ulysses.by_tokens(grad_BTHD)), None


class _Back(torch.autograd.Function):
    """(out_BTHD, the attention) -> out_BLND of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, out_BTHD: Tensor, ulysses: OverlappedUlysses) -> Tensor:
        ctx.ulysses = ulysses
        received_PBLHD, wait = ulysses.begin(ulysses.by_tokens(out_BTHD))
        wait()
        return received_PBLHD.movedim(0, 2).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, dout_BLND: Tensor) -> tuple[Tensor, None]:
        ulysses = ctx.ulysses
        received_PBLHD, wait = ulysses.begin(ulysses.by_heads(dout_BLND))
        wait()
        return received_PBLHD.movedim(0, 1).flatten(1, 2), None
