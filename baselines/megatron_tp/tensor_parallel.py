"""Matrices divided among ranks, as Megatron-LM divides them: set on the one-device model from outside.

Between the matrices a rank holds 1/P of the tokens, consecutive ones. Before the projections, the MLP and the LM head
all P ranks' tokens are gathered, and each rank computes with 1/P of the columns: of the heads, of the MLP's width, of
the vocabulary. Behind the last matrix of attention and of the MLP the ranks' results are summed, and each keeps its
tokens. Sources: Megatron-LM (arXiv:1909.08053), sequence parallelism (arXiv:2205.05198).

Shape letters: B sequences, L tokens held here, S tokens of all ranks, T = B x S of them in one row, E embedding,
V words held here, P ranks.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.attention.algorithms.saved import Attend
from engine.attention.comm.collectives import GroupGather
from engine.attention.context import ContextParallel
from engine.initialise import Part
from engine.lm_head.loss import check_labels
from engine.lm_head.loss_kernel import IGNORE
from engine.models.decoder import MLP, Attention, Decoder, Projected, Rotary, rotary_of
from engine.models.matrices import Norm, normed
from engine.ops.autograd import accumulation_dtype, refuse_second_derivative
from engine.ops.products import add_product
from engine.ops.runs import runs, zeros_for_sum
from engine.optimizer import gradient_norm
from engine.parallelize import WholeMatrices
from engine.settings import TrialSettings
from engine.shape import ModelShape

_TILE_LOGITS = 1 << 26  # of a rank's tile of the fused loss, 256 MiB in fp32

# Which dimension of a matrix is divided: rows (0) where results stay apart, columns (1) where they are summed.
_DIVIDED = {
    "embedding.weight": 0, "head.weight": 0, "attention.q.weight": 0, "attention.k.weight": 0, "attention.v.weight": 0,
    "attention.q.bias": 0, "attention.k.bias": 0, "attention.v.bias": 0, "attention.gate.weight": 0,
    "attention.gate.bias": 0,
    "attention.output.weight": 1, "mlp.gate.weight": 0, "mlp.up.weight": 0, "mlp.down.weight": 1,
}  # fmt: skip


class TensorParallel(WholeMatrices):
    """The ranks that hold the columns of every matrix between them; `cp` are these ranks as those that hold the tokens
    of a sequence, contiguous shards."""

    def __init__(self, cp: ContextParallel, settings: TrialSettings) -> None:
        assert cp.layout.name == "contiguous", "gathered tokens are in order of position"
        super().__init__(settings.model)
        self.cp, self.size, self.rank, self._settings = cp, cp.size, cp.rank, settings
        self._rotary: dict[object, Rotary] = {}

    @property
    def gather(self) -> GroupGather:
        """Collective at first use."""
        return self.cp.comms.gather()

    def shape(self) -> ModelShape:
        whole, size = self.whole, self.size
        return replace(
            whole,
            heads=whole.heads // size,
            kv_heads=whole.kv_heads // size,
            ffn=whole.ffn // size,
            vocab=whole.vocab // size,
        )

    def part(self, name: str) -> Part | None:
        dim = next((dim for suffix, dim in _DIVIDED.items() if name.endswith(suffix)), None)
        return None if dim is None else (dim, self.rank, self.size)

    def set(self, model: Decoder, attend: Attend) -> None:
        """As the engine asks; `attend` is for this rank's heads, and all tokens."""
        settings = self._settings
        model.embedding = _VocabParallelEmbedding(model.embedding, self)
        for block in model.blocks:
            block.attend, block.project, block.add_mlp = attend, self._project, self._add_mlp
            block.attention.output = _RowParallelOutput(block.attention.output, self)
        model.head.loss_sum = functools.partial(self._loss_sum, z_loss=settings.z_loss, tiled=settings.lm_head_fusion)

    def gathered(self, x_BLE: Tensor) -> Tensor:
        """All ranks' tokens; backward sums the ranks' gradients of this rank's tokens."""
        whole: Tensor = _Gather.apply(x_BLE, self)
        return whole

    def summed(self, x_BSE: Tensor) -> Tensor:
        """The sum over the ranks, of this rank's tokens; backward gathers all ranks' gradients."""
        own: Tensor = _Sum.apply(x_BSE, self)
        return own

    def gather_tokens(self, *shards: Tensor) -> list[Tensor]:
        """[B, L, ...] of every rank -> [B, S, ...]; nothing is differentiable."""
        with self.cp.collective():
            return [by_rank.movedim(0, 1).flatten(1, 2) for by_rank in self.gather.start(shards)()]

    def sum_tokens(self, whole_BSE: Tensor) -> Tensor:
        """[B, S, ...] of every rank -> the sum, of this rank's tokens; formed in fp32 or wider and rounded once."""
        by_owner = whole_BSE.unflatten(1, (self.size, -1)).movedim(1, 0)
        with self.cp.collective():
            (own,) = self.gather.reduced((by_owner,))
        return own.to(whole_BSE.dtype)

    def _project(self, norm: Norm, attention: Attention, x_BLE: Tensor, rotary: Rotary) -> Projected:
        """An `engine.models.decoder.Project`: queries, keys and values are those of this rank's heads, all tokens."""
        x_BSE = self.gathered(normed(norm, x_BLE))
        key = (x_BSE.shape[1], x_BSE.device, rotary[0].dtype)
        if key not in self._rotary:
            positions_S = torch.arange(x_BSE.shape[1], device=x_BSE.device)
            angles = rotary_of(self.whole, False, positions_S, rotary[0].dtype, len(positions_S))
            self._rotary = {key: angles}
        return (*attention.project(x_BSE, self._rotary[key]), x_BLE)

    def _add_mlp(self, norm: Norm, mlp: MLP, x_BLE: Tensor, branch_BLE: Tensor | None = None) -> Tensor:
        """An `engine.models.decoder.AddMLP`."""
        x_BLE = x_BLE if branch_BLE is None else x_BLE + branch_BLE
        return x_BLE + self.summed(mlp(self.gathered(normed(norm, x_BLE))))

    def _loss_sum(
        self, hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, *, z_loss: float, tiled: bool
    ) -> Tensor:
        """The sum of this rank's tokens' losses, of a vocabulary that all ranks hold between them.

        Raises ValueError for a label of this rank that is neither a word nor -100.
        """
        words = weight_VE.shape[0]
        check_labels(labels_T, words * self.size)  # before the copy: labels may be in host memory
        labels_T = labels_T.to(hidden_TE.device, non_blocking=True)
        # One row of tokens, rank after rank: a sum has no order.
        hidden_TE = self.gathered(hidden_TE.unsqueeze(0)).squeeze(0)
        (labels_T,) = (whole.squeeze(0) for whole in self.gather_tokens(labels_T.unsqueeze(0)))
        run = max(1, _TILE_LOGITS // words) if tiled else len(labels_T)
        loss: Tensor = _Loss.apply(hidden_TE, weight_VE, labels_T, self, z_loss, run)
        return loss

    def complete_gradients(self, model: Decoder) -> None:
        """Sum over the ranks the gradients of the parameters that all hold whole: each saw its own tokens, or heads."""
        gradients = [
            _local(p.grad) for name, p in model.named_parameters() if self.part(name) is None and p.grad is not None
        ]
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.cp.group)

    def gradient_norm(self, model: Decoder) -> Tensor:
        divided, whole = (
            gradient_norm(p for name, p in model.named_parameters() if (self.part(name) is not None) == is_divided)
            for is_divided in (True, False)
        )
        square = divided.to(accumulation_dtype(divided.dtype)) ** 2
        dist.all_reduce(square, group=self.cp.group)
        return (square + whole.to(square.dtype) ** 2).sqrt()


def _local(tensor: Tensor | None) -> Tensor:
    """This rank's part of a tensor that FSDP2 may have sharded."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _VocabParallelEmbedding(nn.Module):
    """Rows of this rank's words, of all tokens; the ranks' rows are summed."""

    def __init__(self, embedding: nn.Embedding, ranks: TensorParallel) -> None:
        super().__init__()
        self.weight, self._ranks = embedding.weight, ranks

    def forward(self, tokens_BL: Tensor) -> Tensor:
        (tokens_BS,) = self._ranks.gather_tokens(tokens_BL)
        words = self.weight.shape[0]
        local_BS = tokens_BS - self._ranks.rank * words
        elsewhere_BS = (local_BS < 0) | (local_BS >= words)
        rows_BSE = F.embedding(local_BS.masked_fill(elsewhere_BS, 0), self.weight)
        return self._ranks.summed(rows_BSE.masked_fill(elsewhere_BS.unsqueeze(-1), 0.0))


class _RowParallelOutput(nn.Module):
    """The output projection of this rank's heads; the ranks' results are summed."""

    def __init__(self, linear: nn.Linear, ranks: TensorParallel) -> None:
        super().__init__()
        self.weight, self._ranks = linear.weight, ranks

    def forward(self, heads_BSF: Tensor) -> Tensor:
        return self._ranks.summed(F.linear(heads_BSF, self.weight))


class _Gather(torch.autograd.Function):
    """(x_BLE, ranks) -> x_BSE."""

    @staticmethod
    def forward(ctx: Any, x_BLE: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather_tokens(x_BLE)[0]

    @staticmethod
    def backward(ctx: Any, dx_BSE: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative("tensor parallelism")
        return ctx.ranks.sum_tokens(dx_BSE), None


class _Sum(torch.autograd.Function):
    """(x_BSE, ranks) -> the sum over the ranks, x_BLE."""

    @staticmethod
    def forward(ctx: Any, x_BSE: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum_tokens(x_BSE)

    @staticmethod
    def backward(ctx: Any, dx_BLE: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative("tensor parallelism")
        return ctx.ranks.gather_tokens(dx_BLE)[0], None


class _Loss(torch.autograd.Function):
    """(hidden_TE, weight_VE, labels_T of all ranks, ranks, z_loss, tokens of a tile) -> this rank's tokens' loss."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, ranks: TensorParallel, z_loss: float, run: int
    ) -> Tensor:
        dtype = accumulation_dtype(hidden_TE.dtype)
        local_T = labels_T - ranks.rank * weight_VE.shape[0]
        here_T = (local_T >= 0) & (local_T < weight_VE.shape[0])
        local_T = local_T.masked_fill(~here_T, 0)
        lse_T, target_T = (hidden_TE.new_empty(len(labels_T), dtype=dtype) for _ in range(2))
        for tokens in runs(len(labels_T), run):
            logits_TV = F.linear(hidden_TE[tokens], weight_VE).to(dtype)
            lse_T[tokens] = logits_TV.logsumexp(dim=-1)
            target_T[tokens] = logits_TV.gather(1, local_T[tokens].unsqueeze(1)).squeeze(1)
        target_T.masked_fill_(~here_T, 0.0)
        with ranks.cp.collective():
            lse_PT, target_PT = ranks.gather.start((lse_T, target_T))()
        lse_T, ignored_T = lse_PT.logsumexp(dim=0), labels_T == IGNORE
        loss_T = (lse_T - target_PT.sum(dim=0) + z_loss * lse_T.square()).masked_fill(ignored_T, 0.0)
        ctx.ranks, ctx.z_loss, ctx.run = ranks, z_loss, run
        ctx.save_for_backward(hidden_TE, weight_VE, local_T, here_T, ignored_T, lse_T)
        return loss_T.chunk(ranks.size)[ranks.rank].sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the sum of all ranks' losses: `dloss` is the same on all."""
        refuse_second_derivative("the vocabulary-parallel loss")
        hidden_TE, weight_VE, local_T, here_T, ignored_T, lse_T = ctx.saved_tensors
        dtype = lse_T.dtype
        dhidden_TE = torch.empty_like(hidden_TE)
        dweight_VE = zeros_for_sum(weight_VE)
        for tokens in runs(len(local_T), ctx.run):
            logits_TV = F.linear(hidden_TE[tokens], weight_VE).to(dtype)
            factor_T = 1.0 + 2.0 * ctx.z_loss * lse_T[tokens]
            d_TV = (logits_TV - lse_T[tokens].unsqueeze(1)).exp_().mul_(factor_T.unsqueeze(1))
            d_TV.scatter_add_(1, local_T[tokens].unsqueeze(1), -here_T[tokens].to(dtype).unsqueeze(1))
            d_TV.masked_fill_(ignored_T[tokens].unsqueeze(1), 0.0)
            d_TV = (d_TV * dloss).to(hidden_TE.dtype)
            dhidden_TE[tokens] = d_TV @ weight_VE
            add_product(dweight_VE, d_TV, hidden_TE[tokens])
        return dhidden_TE, dweight_VE.to(weight_VE.dtype), None, None, None, None
