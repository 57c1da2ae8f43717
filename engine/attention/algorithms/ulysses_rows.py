"""The first rows of a pass that trades heads for tokens: what selective checkpointing computes again."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from engine.attention.algorithms.ring import RingPlan
from engine.attention.comm.all_to_all import token_runs_in_order
from engine.attention.geometry.layout import Segment, rows_before, split_at
from engine.attention.planning.comm_plan import reach

if TYPE_CHECKING:
    from engine.attention.algorithms.ulysses import UlyssesPlan


@dataclass(frozen=True, kw_only=True)
class UlyssesRows:
    """The forward of a `UlyssesPlan` for the queries before a position.

    Where every rank holds equally many of them, and they see no later keys, only those tokens are exchanged. Elsewhere
    all are, since an exchange moves equally many of every rank, and attention alone is spared.
    """

    plan: UlyssesPlan
    cut: int  # global position

    def forward(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """(out_BLND, lse_BNL) of this rank's first rows; the tensors are those of its whole shard."""
        plan, first = self.plan, self.plan.inner.before(self.cut)
        rows = plan.cp.rows_before(self.cut, first.seq_len)
        if self._alone_suffices(first):
            token_runs = token_runs_in_order(
                tuple(split_at(self._segments(rank), self.cut)[0] for rank in plan.members)
            )
            shards = (tensor[:, :rows] for tensor in (q_BLND, k_BLKD, v_BLKD))
            return replace(plan, token_runs=token_runs, inner=first).forward(*shards)
        inner = _PaddedRing(**{field.name: getattr(first, field.name) for field in fields(first)})
        out_BLND, lse_BNL = replace(plan, inner=inner).forward(q_BLND, k_BLKD, v_BLKD)
        return out_BLND[:, :rows], lse_BNL[:, :, :rows]

    def _segments(self, cp_rank: int) -> tuple[Segment, ...]:
        return self.plan.cp.layout.segments(self.plan.inner.seq_len, self.plan.cp.size, cp_rank)

    def _alone_suffices(self, first: RingPlan) -> bool:
        """All CP ranks hold equally many of the tokens, and those tokens see no others."""
        shares = {rows_before(self._segments(rank), self.cut) for rank in range(self.plan.cp.size)}
        inner = first.cp
        return len(shares) == 1 and reach(first.mask, inner.layout, inner.size, first.seq_len) <= inner.rows_before(
            self.cut, first.seq_len
        )


@dataclass(frozen=True, kw_only=True)
class _PaddedRing(RingPlan):
    """The forward of some rows, followed by zeros for the others."""

    def forward(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        out_BLND, lse_BNL = super().forward(q_BLND, k_BLKD, v_BLKD)
        missing = q_BLND.shape[1] - out_BLND.shape[1]
        return F.pad(out_BLND, (0, 0, 0, 0, 0, missing)), F.pad(lse_BNL, (0, missing))
