"""A pass of some heads over more tokens, between two exchanges of heads for tokens.

With all ranks in the exchange each attends alone over the whole sequence (DeepSpeed-Ulysses, arXiv:2309.14509); with
some, a ring goes on among the others (USP, arXiv:2405.07719; LoongTrain, arXiv:2406.18485). O is not kept twice:
backward exchanges delta = rowsum(dO * O) in its place.

A rank's heads may come in parts: while one part is computed the next is on its way here and the last on its way back,
so that only the first arrival and the last return are left uncovered. UPipe (arXiv:2602.21196) goes through heads in
stages to save memory; here it is to hide a slow link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.algorithms.ring import RingPlan
from engine.attention.algorithms.ulysses_rows import UlyssesRows
from engine.attention.comm.all_to_all import AllToAll, HeadChunk, TokenRun
from engine.attention.context import ContextParallel
from engine.attention.planning.comm_volume import PassBytes, trade_bytes


@dataclass(frozen=True, kw_only=True)
class UlyssesPlan:
    """A pass of some heads over more tokens, between two exchanges."""

    cp: ContextParallel  # before the exchange
    members: tuple[int, ...]  # CP ranks in it
    schedule: str
    heads: AllToAll
    token_runs: tuple[TokenRun, ...]
    inner: RingPlan  # over one part of the heads
    parts: int = 1  # that a rank's heads come in

    def sent_bytes(self, *, kept: bool = True) -> PassBytes:
        """What this rank sends in a whole forward and its backward; `kept`: by `forward_keeping`, `backward_kept`."""
        packed, inner = self.heads.name != "copy_engine", self.inner
        traded = trade_bytes(self.members, self.cp.rank, self.cp.node_size, inner.shards, kept=kept, packed=packed)
        around = inner.sent_bytes()
        return PassBytes(
            (traded.forward + around.forward).times(self.parts), (traded.backward + around.backward).times(self.parts)
        )

    def forward(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """(out_BLND, lse_BNL) of this rank's queries over the whole sequence."""
        return self._forward(q_BLND, k_BLKD, v_BLKD, None)

    def forward_keeping(
        self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """`forward`, and what `backward_kept` wants: Q, K and V as they arrived, so that they are not sent twice."""
        kept: list[Tensor] = []
        out_BLND, lse_BNL = self._forward(q_BLND, k_BLKD, v_BLKD, kept)
        return out_BLND, lse_BNL, tuple(kept)

    def _forward(
        self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, kept: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """(out_BLND, lse_BNL); what backward wants of each part goes into `kept`, unless None."""

        def attend(part: int, here: HeadChunk) -> tuple[Tensor, ...]:
            if kept is not None:
                kept.extend(here.keep())
            out_BTHD, lse_BHT = self.inner.forward(*here.tensors)
            if kept is not None:
                kept.append(lse_BHT)
            return out_BTHD, lse_BHT.transpose(1, 2).contiguous()

        out_BLND, lse_BLN = self._exchanged((q_BLND, k_BLKD, v_BLKD), attend)
        return out_BLND.contiguous(), lse_BLN.transpose(1, 2).contiguous()

    def before(self, cut: int) -> UlyssesRows:
        """The forward of the queries before global position `cut` alone: this rank's first rows."""
        return UlyssesRows(plan=self, cut=cut)

    def recompute_share(self, cut: int) -> float:
        """Work of the busiest rank in the forward of `before(cut)`, over a rank's mean work in its own."""
        return self.inner.recompute_share(cut)

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

        def differentiate(part: int, here: HeadChunk) -> tuple[Tensor, ...]:
            q, k, v, dout, rows_BTH2 = here.tensors
            lse_BHT, delta_BHT = (row.transpose(1, 2).contiguous() for row in rows_BTH2.unbind(-1))
            # Complete sums: they cross in the inputs' dtype, nothing is added to them on the other side.
            return self.inner.backward(q, k, v, dout, lse_BHT, delta_BHT)

        rows_BLN2 = torch.stack((lse_BNL, delta_BNL), dim=-1).transpose(1, 2)
        dq, dk, dv = self._exchanged((q_BLND, k_BLKD, v_BLKD, dout_BLND, rows_BLN2), differentiate)
        return dq, dk, dv

    def backward_kept(
        self, kept: tuple[Tensor, ...], dout_BLND: Tensor, lse_BNL: Tensor, delta_BNL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`backward` of what `forward_keeping` kept: four tensors cross in place of seven."""

        def differentiate(part: int, here: HeadChunk) -> tuple[Tensor, ...]:
            dout, delta_BTH = here.tensors
            q, k, v, lse_BHT = kept[4 * part : 4 * part + 4]
            return self.inner.backward(q, k, v, dout, lse_BHT, delta_BTH.transpose(1, 2).contiguous())

        dq, dk, dv = self._exchanged((dout_BLND, delta_BNL.transpose(1, 2)), differentiate)
        return dq, dk, dv

    def _exchanged(self, tensors: tuple[Tensor, ...], compute: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `compute(part, arrived)` makes of the whole sequence's tensors of each part of this rank's heads, all
        heads of its own tokens together again."""
        trip = self.heads.trip(self.token_runs, self.parts, alternate=self.inner.cp.size > 1)
        coming = trip.send(tensors, 0)
        for part in range(self.parts):
            with trip.lane(part):
                here = coming()
                if part + 1 < self.parts:  # on its way before the device is given this part's work
                    coming = trip.send(tensors, part + 1)
                results = compute(part, here)
                here.done()
                del here
                trip.send_back(results, part)
                del results
        return trip.results()

    def resolved(self) -> dict[str, str]:
        """What was decided, for the record."""
        inner = self.inner.resolved()
        alone = inner["exchange"] == "none"
        return inner | {
            "schedule": self.schedule,
            "backward": self.heads.name if alone else inner["backward"],
            "exchange": self.heads.name if alone else f"{self.heads.name} + {inner['exchange']}",
            "num_head_chunks": str(self.parts),
        }
