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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.algorithms.ring import RingPlan
from engine.attention.algorithms.saved import SAVED_PER_CHUNK, AttentionPlan, Saved
from engine.attention.comm.collectives import AllToAll, HeadChunk, TokenRun, token_runs_in_order
from engine.attention.comm_plan import reach
from engine.attention.geometry.layout import rows_before, split_at
from engine.attention.geometry.tiles import Visible


@dataclass(frozen=True, kw_only=True)
class UlyssesPlan(AttentionPlan):
    """Attention of some heads over more tokens between two all-to-alls.

    The first rows alone (`cut`) are what selective checkpointing computes again. Where every rank holds equally many of
    them, and they see no later keys, only those tokens are exchanged. Otherwise all tokens are exchanged, because an
    all-to-all sends the same number from every rank, and only attention computes less.
    """

    all_to_all: AllToAll
    token_runs: tuple[TokenRun, ...]
    inner: RingPlan  # over one head chunk, among the ranks as they are after the all-to-all

    @property
    def one_call(self) -> Visible | None:
        return self.inner.one_call if self.cp.size == 1 and self.choice.num_head_chunks == 1 else None

    def before(self, cut: int) -> Self:
        return replace(self, cut=cut, inner=self.inner.before(cut))

    def forward(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, save: bool) -> tuple[Tensor, Tensor, Saved]:
        """With `save`, Q, K and V are saved as they were received, so that backward receives only dO and delta."""
        saved = Saved((q_BLND, k_BLKD, v_BLKD))
        k_BLKD, v_BLKD = self._for_each_rank(k_BLKD, v_BLKD)
        shards, runs, rows = (q_BLND, k_BLKD, v_BLKD), self.token_runs, None
        if self.cut is not None:
            rows = self.cp.rows_before(self.cut, self.choice.problem.seq_len)
            if first_runs := self._runs_before(self.cut):
                shards, runs = (q_BLND[:, :rows], k_BLKD[:, :rows], v_BLKD[:, :rows]), first_runs
        gathered: list[Tensor] = []

        def attend(index: int, chunk: HeadChunk) -> tuple[Tensor, ...]:
            if save:
                gathered.extend(chunk.save())
            tokens = chunk.tensors[0].shape[1]
            out_BTHD, lse_BHT, _ = self._inner_of(index).forward(*chunk.tensors, save=False)
            if save:
                gathered.append(lse_BHT)
            if (others := tokens - out_BTHD.shape[1]) > 0:  # rows that are not computed are sent as zeros
                out_BTHD, lse_BHT = F.pad(out_BTHD, (0, 0, 0, 0, 0, others)), F.pad(lse_BHT, (0, others))
            return out_BTHD, lse_BHT.transpose(1, 2).contiguous()

        out_BLND, lse_BLN = self._exchanged(shards, attend, runs)
        out_BLND, lse_BNL = out_BLND.contiguous(), lse_BLN.transpose(1, 2).contiguous()
        if rows is not None:
            out_BLND, lse_BNL = out_BLND[:, :rows], lse_BNL[:, :, :rows]
        if save:
            saved = Saved(tuple(gathered), gathered=True, heads=self._chunk_heads)
        return out_BLND, lse_BNL, saved

    def backward(
        self, saved: Saved, dout_BLND: Tensor, lse_BNL: Tensor, delta_BNL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The all-to-all returns complete sums, without adding to them; of a latent a sum over each rank's heads, and
        these are added here."""

        def from_gathered(index: int, chunk: HeadChunk) -> tuple[Tensor, ...]:
            dout, delta_BTH = chunk.tensors
            *qkv, lse_BHT = saved.tensors[SAVED_PER_CHUNK * index : SAVED_PER_CHUNK * (index + 1)]
            delta_BHT = delta_BTH.transpose(1, 2).contiguous()
            return self._inner_of(index).backward(Saved(tuple(qkv)), dout, lse_BHT, delta_BHT)

        def from_shards(index: int, chunk: HeadChunk) -> tuple[Tensor, ...]:
            *qkv, dout, rows_BTH2 = chunk.tensors
            lse_BHT, delta_BHT = (row.transpose(1, 2).contiguous() for row in rows_BTH2.unbind(-1))
            return self._inner_of(index).backward(Saved(tuple(qkv)), dout, lse_BHT, delta_BHT)

        if saved.gathered:
            dq, dk, dv = self._exchanged((dout_BLND, delta_BNL.transpose(1, 2)), from_gathered, self.token_runs)
        else:
            rows_BLN2 = torch.stack((lse_BNL, delta_BNL), dim=-1).transpose(1, 2)
            q_BLND, k_BLKD, v_BLKD = saved.tensors
            tensors = q_BLND, *self._for_each_rank(k_BLKD, v_BLKD), dout_BLND, rows_BLN2
            dq, dk, dv = self._exchanged(tensors, from_shards, self.token_runs)
        if self.expansion is not None:
            dk, dv = (each.sum(2, keepdim=True).to(dq.dtype) for each in (dk, dv))
        return dq, dk, dv

    def _for_each_rank(self, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values whose heads the all-to-all divides; a latent is the same for every part of the heads."""
        if self.expansion is None:
            return k_BLKD, v_BLKD
        parts = self.all_to_all.size * self.choice.num_head_chunks
        return k_BLKD.expand(-1, -1, parts, -1), v_BLKD.expand(-1, -1, parts, -1)

    def _inner_of(self, index: int) -> RingPlan:
        """The ring of a chunk of this rank's heads, which expands a latent for these alone."""
        if self.expansion is None:
            return self.inner
        expansion = self.expansion.of_heads(self._chunk_heads[index])
        return replace(self.inner, expansion=expansion, key_gradient_dtype=expansion.gradient().dtype)

    def _exchanged(
        self,
        tensors: tuple[Tensor, ...],
        compute: Callable[..., tuple[Tensor, ...]],
        token_runs: tuple[TokenRun, ...],
    ) -> tuple[Tensor, ...]:
        """`compute(index, chunk)` of each head chunk over the group's tokens; its results, all heads together again,
        for this rank's tokens."""
        chunks = self.choice.num_head_chunks
        exchange = self.all_to_all.begin(token_runs, chunks, alternate=self.inner.cp.size > 1)
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

    def _runs_before(self, cut: int) -> tuple[TokenRun, ...] | None:
        """The all-to-all's tokens before `cut`, where it needs no others: all CP ranks hold equally many of them, and
        they see no later keys. Else None."""
        inner, seq_len = self.inner, self.choice.problem.seq_len
        by_rank = [self.cp.layout.segments(seq_len, self.cp.size, rank) for rank in range(self.cp.size)]
        equal = len({rows_before(segments, cut) for segments in by_rank}) == 1
        if not equal or reach(inner.mask, inner.cp.layout, inner.cp.size, seq_len) > inner.cp.rows_before(cut, seq_len):
            return None
        members = self.choice.division.members(self.cp.rank)
        return token_runs_in_order(tuple(split_at(by_rank[rank], cut)[0] for rank in members))
