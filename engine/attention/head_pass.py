"""A pass of some heads over more tokens, between two exchanges of heads for tokens.

With all ranks in the exchange each attends alone over the whole sequence (DeepSpeed-Ulysses, arXiv:2309.14509); with
some, a ring goes on among the others (USP, arXiv:2405.07719; LoongTrain, arXiv:2406.18485). O is not kept twice:
backward exchanges delta = rowsum(dO * O) in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.head_exchange import HeadExchange, Piece
from engine.attention.ring_pass import RingPlan


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """A pass of some heads over more tokens, between two exchanges."""

    schedule: str
    heads: HeadExchange
    pieces: tuple[Piece, ...]
    inner: RingPlan

    def forward(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """(out_BLND, lse_BNL) of this rank's queries over the whole sequence."""
        out_BTHD, lse_BHT = self.inner.forward(*(self._to_heads(tensor) for tensor in (q_BLND, k_BLKD, v_BLKD)))
        lse_BLN = self._to_tokens(lse_BHT.transpose(1, 2).contiguous())
        return self._to_tokens(out_BTHD).contiguous(), lse_BLN.transpose(1, 2).contiguous()

    def backward(
        self,
        q_BLND: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        dout_BLND: Tensor,
        lse_BNL: Tensor,
        delta_BNL: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq_BLND, dk_BLKD, dv_BLKD) of this rank's shards, in the inputs' dtype."""
        rows_BLN2 = torch.stack((lse_BNL, delta_BNL), dim=-1).transpose(1, 2)
        q, k, v, dout, rows = (self._to_heads(t) for t in (q_BLND, k_BLKD, v_BLKD, dout_BLND, rows_BLN2))
        lse_BHT, delta_BHT = (row.transpose(1, 2).contiguous() for row in rows.unbind(-1))
        # Complete sums: they cross in the inputs' dtype, nothing is added to them on the other side.
        dq, dk, dv = (self._to_tokens(gradient) for gradient in self.inner.backward(q, k, v, dout, lse_BHT, delta_BHT))
        return dq, dk, dv

    def _to_heads(self, tensor: Tensor) -> Tensor:
        return self.heads.to_heads(tensor, self.pieces)

    def _to_tokens(self, tensor: Tensor) -> Tensor:
        return self.heads.to_tokens(tensor, self.pieces)

    def chosen(self) -> dict[str, str]:
        """What was decided, for the record."""
        inner = self.inner.chosen()
        alone = inner["exchange"] == "none"
        traded = "all_to_all" if self.heads.size > 1 else "none"
        return inner | {
            "schedule": self.schedule,
            "backward": "all_to_all" if alone else inner["backward"],
            "exchange": traded if alone else f"{traded} + {inner['exchange']}",
        }
