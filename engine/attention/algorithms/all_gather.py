"""All-gather attention: every rank receives K and V of the whole sequence, and attends with its own queries.

TransformerEngine's communication type `all_gather` (as Llama 3, arXiv:2407.21783, section 3.3.2): one collective before
attention and nothing between its kernels, at the price of K and V of the whole sequence in memory. K and V are gathered
again in backward rather than saved; dK and dV of the whole sequence are formed and reduced to their owners. The calls
of a rank alternate over the plan's streams.

Shape letters as in `engine.attention.op`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from engine.attention.accumulate.accumulators import GradAccumulator, OutputAccumulator
from engine.attention.algorithms.saved import AttentionPlan, Saved
from engine.attention.comm.collectives import GroupGather, TokenRun, in_order, write_by_member
from engine.attention.geometry.tiles import Call
from engine.attention.kernels import BackwardInputs
from engine.attention.masks.pairs import tiles_of_all_keys
from engine.cuda.alternate import ONE_STREAM, Streams
from engine.ops.autograd import accumulation_dtype


@dataclass(frozen=True, kw_only=True)
class AllGatherPlan(AttentionPlan):
    """Attention over gathered keys among several ranks."""

    gather: GroupGather
    token_runs: tuple[TokenRun, ...]  # of all ranks, in order of position
    streams: Streams = ONE_STREAM  # that the calls of a forward use in turn

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """This rank's kernel calls."""
        table = tiles_of_all_keys(self.mask, self.cp.layout, self.choice.problem.seq_len, self.cp.size)
        return table.calls(self.cp.rank)

    def forward(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, save: bool) -> tuple[Tensor, Tensor, Saved]:
        saved = Saved((q_BLND, k_BLKD, v_BLKD))
        k_BSKD, v_BSKD = self._gathered(k_BLKD, v_BLKD)
        if self.expansion is not None:
            k_BSKD, v_BSKD = self.expansion.keys(k_BSKD, v_BSKD)
        if self.cut is not None:
            q_BLND = q_BLND[:, : self.cp.rows_before(self.cut, self.choice.problem.seq_len)]
        with self.streams.begin() as streams:
            output = OutputAccumulator(q_BLND, streams, self.choice.problem.value_dim)
            for index, call in enumerate(self.calls):
                with streams.turn(index):
                    part = self.kernel.forward(
                        q_BLND[:, call.q], k_BSKD[:, call.k], v_BSKD[:, call.k], call.visible, self.scale
                    )
                    output.update(call.q, *part)
                    del part
            streams.join()
            return *output.result(), saved

    def backward(
        self, saved: Saved, dout_BLND: Tensor, lse_BNL: Tensor, delta_BNL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_BLND, k_BLKD, v_BLKD = saved.tensors
        k_BSKD, v_BSKD = gathered = self._gathered(k_BLKD, v_BLKD)
        if self.expansion is not None:
            k_BSKD, v_BSKD = self.expansion.keys(k_BSKD, v_BSKD)
        dtype, deterministic = q_BLND.dtype, self.choice.choices.deterministic
        part_dtype = dtype if self.kernel.writes_input_dtype else accumulation_dtype(dtype)
        dq, dk, dv = (GradAccumulator(tensor, part_dtype) for tensor in (q_BLND, k_BSKD, v_BSKD))
        for call in self.calls:
            rows = q_BLND[:, call.q], dout_BLND[:, call.q], lse_BNL[:, :, call.q], delta_BNL[:, :, call.q]
            inputs = BackwardInputs(*rows, k_BSKD[:, call.k], v_BSKD[:, call.k])
            dq_part, dk_part, dv_part = self.kernel.backward(inputs, call.visible, self.scale, deterministic)
            dq.add(call.q, dq_part)
            dk.add(call.k, dk_part)
            dv.add(call.k, dv_part)
            del inputs, rows, dq_part, dk_part, dv_part
        del k_BSKD, v_BSKD
        sent = dtype if self.choice.narrow_grads.across else accumulation_dtype(dtype)
        if self.expansion is None:
            totals: tuple[Tensor, ...] = dk.final(sent), dv.final(sent)
        else:
            found = self.expansion.contracted(dk.final(part_dtype), dv.final(part_dtype), gathered[1])
            totals = tuple(each.to(sent) for each in found)
        del gathered
        dk_BLKD, dv_BLKD = self.gather.reduced(tuple(map(self._by_owner, totals)))
        return dq.final(dtype), dk_BLKD.to(dtype), dv_BLKD.to(dtype)

    def _gathered(self, *shards: Tensor) -> list[Tensor]:
        """[B, L, K, D] of every rank -> the whole sequence in order of position, [B, S, K, D]."""
        return [in_order(by_rank, self.token_runs) for by_rank in self.gather.start(shards)()]

    def _by_owner(self, whole_BSKD: Tensor) -> Tensor:
        """[B, S, K, D] in order of position -> the tokens of every rank, [ranks, B, L, K, D]."""
        batch, tokens, *heads = whole_BSKD.shape
        by_rank = whole_BSKD.new_empty(self.cp.size, batch, tokens // self.cp.size, *heads)
        write_by_member(by_rank, whole_BSKD, self.token_runs)
        return by_rank
