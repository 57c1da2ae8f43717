"""Ulysses attention: an all-to-all gives each rank some heads of more tokens, and another one returns the results.

With all ranks in the all-to-all each attends alone over the whole sequence (DeepSpeed-Ulysses, arXiv:2309.14509,
schedule `ulysses`); with some, a ring runs among the others (USP, arXiv:2405.07719; LoongTrain, arXiv:2406.18485,
schedules `usp` and `usp_transposed`). O is not saved a second time: backward exchanges delta = rowsum(dO * O) instead.

A rank's heads may come in chunks: while one head chunk is computed the next is received and the last one's results are
sent back, so that only the first receive and the last return are not overlapped. UPipe (arXiv:2602.21196) goes through
heads in stages to save memory; here it hides a slow link.

Shape letters as in `engine.attention.op`, with T for the group's tokens and H for this rank's heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.algorithms.ring import RingPlan
from engine.attention.algorithms.saved import SAVED_PER_CHUNK, Saved
from engine.attention.comm.collectives import AllToAll, HeadChunk, TokenRun, token_runs_in_order
from engine.attention.comm_plan import reach
from engine.attention.comm_volume import CallBytes
from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import Segment, rows_before, split_at
from engine.attention.geometry.tiles import Band
from engine.attention.kernels import Kernel
from engine.attention.resolve import Resolved


@dataclass(frozen=True, kw_only=True)
class UlyssesPlan:
    """Attention of some heads over more tokens between two all-to-alls: an
    `engine.attention.algorithms.saved.AttentionPlan`."""

    cp: ContextParallel  # all ranks, as they are before the all-to-all
    choice: Resolved
    all_to_all: AllToAll
    token_runs: tuple[TokenRun, ...]
    inner: RingPlan  # over one head chunk

    @property
    def kernel(self) -> Kernel:
        return self.inner.kernel

    @property
    def scale(self) -> float:
        return self.inner.scale

    @property
    def one_call(self) -> Band | None:
        return self.inner.one_call if self.cp.size == 1 and self.choice.num_head_chunks == 1 else None

    def forward(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, save: bool) -> tuple[Tensor, Tensor, Saved]:
        """(out_BLND, lse_BNL, saved): this rank's queries over the whole sequence. With `save`, Q, K and V are saved as
        they were received, so that backward receives only dO and delta."""
        gathered: list[Tensor] = []

        def attend(index: int, chunk: HeadChunk) -> tuple[Tensor, ...]:
            if save:
                gathered.extend(chunk.save())
            out_BTHD, lse_BHT, _ = self.inner.forward(*chunk.tensors, save=False)
            if save:
                gathered.append(lse_BHT)
            return out_BTHD, lse_BHT.transpose(1, 2).contiguous()

        out_BLND, lse_BLN = self._exchanged((q_BLND, k_BLKD, v_BLKD), attend)
        saved = (
            Saved(tuple(gathered), gathered=True, heads=self._chunk_heads) if save else Saved((q_BLND, k_BLKD, v_BLKD))
        )
        return out_BLND.contiguous(), lse_BLN.transpose(1, 2).contiguous(), saved

    def backward(
        self, saved: Saved, dout_BLND: Tensor, lse_BNL: Tensor, delta_BNL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq_BLND, dk_BLKD, dv_BLKD) of this rank's shards, in the inputs' dtype: complete sums, which the all-to-all
        returns without adding to them."""

        def from_gathered(index: int, chunk: HeadChunk) -> tuple[Tensor, ...]:
            dout, delta_BTH = chunk.tensors
            *qkv, lse_BHT = saved.tensors[SAVED_PER_CHUNK * index : SAVED_PER_CHUNK * (index + 1)]
            return self.inner.backward(Saved(tuple(qkv)), dout, lse_BHT, delta_BTH.transpose(1, 2).contiguous())

        def from_shards(index: int, chunk: HeadChunk) -> tuple[Tensor, ...]:
            *qkv, dout, rows_BTH2 = chunk.tensors
            lse_BHT, delta_BHT = (row.transpose(1, 2).contiguous() for row in rows_BTH2.unbind(-1))
            return self.inner.backward(Saved(tuple(qkv)), dout, lse_BHT, delta_BHT)

        if saved.gathered:
            dq, dk, dv = self._exchanged((dout_BLND, delta_BNL.transpose(1, 2)), from_gathered)
        else:
            rows_BLN2 = torch.stack((lse_BNL, delta_BNL), dim=-1).transpose(1, 2)
            dq, dk, dv = self._exchanged((*saved.tensors, dout_BLND, rows_BLN2), from_shards)
        return dq, dk, dv

    def _exchanged(self, tensors: tuple[Tensor, ...], compute: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """`compute(index, chunk)` of each head chunk over the group's tokens; its results, all heads together again,
        for this rank's tokens."""
        chunks = self.choice.num_head_chunks
        exchange = self.all_to_all.begin(self.token_runs, chunks, alternate=self.inner.cp.size > 1)
        receive = exchange.send(tensors, 0)
        for index in range(chunks):
            with exchange.stream(index):
                chunk = receive()
                if index + 1 < chunks:  # sent before the device gets this chunk's work
                    receive = exchange.send(tensors, index + 1)
                results = compute(index, chunk)
                chunk.release()
                del chunk
                exchange.send_back(results, index)
                del results
        return exchange.results()

    @cached_property
    def _chunk_heads(self) -> tuple[slice, ...]:
        """The query heads of each chunk of this rank."""
        heads, chunks = self.choice.shards.heads, self.choice.num_head_chunks
        first = self.choice.division.members(self.cp.rank).index(self.cp.rank) * chunks * heads
        return tuple(slice(first + index * heads, first + (index + 1) * heads) for index in range(chunks))

    def before(self, cut: int) -> UlyssesFirstRows:
        """The forward of the queries before global position `cut` alone: this rank's first rows."""
        return UlyssesFirstRows(plan=self, cut=cut)

    def recompute_share(self, cut: int) -> float:
        """Work of the busiest rank in the forward of `before(cut)`, over a rank's mean work in its own."""
        return self.inner.recompute_share(cut)

    def sent_bytes(self, *, gathered: bool = True) -> CallBytes:
        """What this rank sends in a whole forward and its backward; `gathered`: forward ran with `save`."""
        return self.choice.sent(self.cp.rank, gathered=gathered)

    def resolved(self) -> dict[str, str]:
        """What each `auto` became, for the record."""
        choice, inner = self.choice, self.inner.resolved()
        name, alone = str(choice.head_exchange), choice.exchange == "none"
        return inner | {
            "backward": name if alone else inner["backward"],
            "exchange": name if alone else f"{name} + {choice.exchange}",
            "num_head_chunks": str(choice.num_head_chunks),
        }


@dataclass(frozen=True, kw_only=True)
class UlyssesFirstRows:
    """The forward of a `UlyssesPlan` for the queries before a position: what selective checkpointing computes again.

    Where every rank holds equally many of them, and they see no later keys, only those tokens are exchanged. Otherwise
    all tokens are exchanged, because an all-to-all sends the same number from every rank, and only attention computes
    less.
    """

    plan: UlyssesPlan
    cut: int  # global position

    def forward(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, save: bool) -> tuple[Tensor, Tensor, Saved]:
        """(out_BLND, lse_BNL, saved) of this rank's first rows; the tensors are those of its whole shard."""
        plan, first, choice = self.plan, self.plan.inner.before(self.cut), self.plan.choice
        rows = plan.cp.rows_before(self.cut, choice.problem.seq_len)
        if self._needs_no_other_tokens(first):
            members = choice.division.members(plan.cp.rank)
            runs = token_runs_in_order(tuple(split_at(self._segments(rank), self.cut)[0] for rank in members))
            shards = (tensor[:, :rows] for tensor in (q_BLND, k_BLKD, v_BLKD))
            return replace(plan, token_runs=runs, inner=first).forward(*shards, save=save)
        inner = _ZeroPaddedRing(**{field.name: getattr(first, field.name) for field in fields(first)})
        out_BLND, lse_BNL, saved = replace(plan, inner=inner).forward(q_BLND, k_BLKD, v_BLKD, save=save)
        return out_BLND[:, :rows], lse_BNL[:, :, :rows], saved

    def _segments(self, cp_rank: int) -> tuple[Segment, ...]:
        return self.plan.cp.layout.segments(self.plan.choice.problem.seq_len, self.plan.cp.size, cp_rank)

    def _needs_no_other_tokens(self, first: RingPlan) -> bool:
        """All CP ranks hold equally many of the tokens, and those tokens see no others."""
        counts = {rows_before(self._segments(rank), self.cut) for rank in range(self.plan.cp.size)}
        inner, seq_len = first.cp, self.plan.choice.problem.seq_len
        return len(counts) == 1 and reach(first.mask, inner.layout, inner.size, seq_len) <= inner.rows_before(
            self.cut, seq_len
        )


@dataclass(frozen=True, kw_only=True)
class _ZeroPaddedRing(RingPlan):
    """The forward of some rows, followed by zeros for the others."""

    def forward(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, save: bool) -> tuple[Tensor, Tensor, Saved]:
        out_BLND, lse_BNL, saved = super().forward(q_BLND, k_BLKD, v_BLKD, save=save)
        others = q_BLND.shape[1] - out_BLND.shape[1]
        return F.pad(out_BLND, (0, 0, 0, 0, 0, others)), F.pad(lse_BNL, (0, others)), saved
