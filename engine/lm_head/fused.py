"""The fused operation: tile by tile from hidden states to loss and gradients.

For a token with logits x, label y and weight z of the squared log-partition, with lse = log sum exp(x) and p = softmax:

    loss = lse - x_y + z lse^2          d loss / d x = p (1 + 2 z lse) - onehot(y)

`Softmax` forms both of any tiles of the vocabulary; of the whole vocabulary on a GPU, one Triton kernel does. Source of
the running maximum and sum: online softmax, arXiv:1805.02867.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.lm_head.plain import IGNORE, LogitTile, choose_tile, runs_with_labels
from engine.ops.autograd import accumulation_dtype, kernels_for, refuse_second_derivative
from engine.ops.runs import add_product, runs

SOFTMAX_KERNELS = "engine.lm_head.softmax_triton"


def fused_loss_sum(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    labels_T: Tensor,
    z_loss: float = 0.0,
    tile: LogitTile | None = None,
    tiles: int = 0,
) -> Tensor:
    """`plain_loss_sum` with the logits of one tile in memory; without `tile` it is one of so many `tiles`, or with 0 of
    them sized for the problem and device.

    A sum, not a mean: only all ranks together know the number of tokens, and a rank whose labels are all -100 returns
    0. Matmuls run in the inputs' dtype; softmax, loss and all sums over tiles in fp32 or wider. Labels may be in host
    memory; those on a GPU are read back once, which waits for all work before.

    Raises ValueError for a label that is neither a word nor -100.
    """
    tile = tile or choose_tile(weight_VE.shape[0], hidden_TE, tiles)
    if torch.is_grad_enabled() and (hidden_TE.requires_grad or weight_VE.requires_grad):
        return _FusedLossSum.apply(hidden_TE, weight_VE, labels_T, z_loss, tile)
    loss = hidden_TE.new_zeros((), dtype=accumulation_dtype(hidden_TE.dtype))
    of_tokens = runs_with_labels(labels_T, tile.tokens, weight_VE.shape[0])
    labels_T = labels_T.to(hidden_TE.device, non_blocking=True)
    for tokens, counts in of_tokens:
        if counts and tile.words >= weight_VE.shape[0]:
            loss += _loss_and_dlogits(hidden_TE[tokens], weight_VE, labels_T[tokens], z_loss)[0]
        elif counts:
            softmax = Softmax(labels_T[tokens], z_loss, accumulation_dtype(hidden_TE.dtype))
            for words in runs(weight_VE.shape[0], tile.words):
                softmax.update(_logits(hidden_TE[tokens], weight_VE[words]), words.start)
            loss += softmax.loss_sum()
    return loss


class _FusedLossSum(torch.autograd.Function):
    """(hidden_TE, weight_VE, labels_T, z_loss, tile) -> loss sum; forward computes both gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, z_loss: float, tile: LogitTile
    ) -> Tensor:
        loss = hidden_TE.new_zeros((), dtype=accumulation_dtype(hidden_TE.dtype))
        dhidden_TE = torch.empty_like(hidden_TE)
        dweight_VE = (
            torch.zeros_like(weight_VE, dtype=accumulation_dtype(weight_VE.dtype)) if ctx.needs_input_grad[1] else None
        )
        of_tokens = runs_with_labels(labels_T, tile.tokens, weight_VE.shape[0])
        labels_T = labels_T.to(hidden_TE.device, non_blocking=True)
        for tokens, counts in of_tokens:
            if counts:
                loss += _loss_and_gradients(
                    hidden_TE[tokens], weight_VE, labels_T[tokens], z_loss, tile.words, dhidden_TE[tokens], dweight_VE
                )
            else:
                dhidden_TE[tokens].zero_()
        ctx.weight_dtype = weight_VE.dtype
        ctx.save_for_backward(dhidden_TE, dweight_VE)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        refuse_second_derivative("the fused loss")
        dhidden_TE, dweight_VE = ctx.saved_tensors
        again = torch._C._autograd._get_current_graph_task_keep_graph()  # the saved gradients will be used again
        return (
            _scaled(dhidden_TE, dloss, dhidden_TE.dtype, again) if ctx.needs_input_grad[0] else None,
            _scaled(dweight_VE, dloss, ctx.weight_dtype, again) if dweight_VE is not None else None,
            None,
            None,
            None,
        )


def _loss_and_gradients(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    labels_T: Tensor,
    z_loss: float,
    words: int,
    dhidden_TE: Tensor,
    dweight_VE: Tensor | None,
) -> Tensor:
    """Loss sum of one run of tokens, `words` words at a time; writes dhidden, adds to dweight.

    With the whole vocabulary at once the logits serve loss and gradient; else they are computed for each in turn.
    """
    if words >= weight_VE.shape[0]:
        loss, dlogits_TV = _loss_and_dlogits(hidden_TE, weight_VE, labels_T, z_loss)
        torch.mm(dlogits_TV, weight_VE, out=dhidden_TE)
        if dweight_VE is not None:
            add_product(dweight_VE, dlogits_TV, hidden_TE)
        return loss
    softmax = Softmax(labels_T, z_loss, accumulation_dtype(hidden_TE.dtype))
    tiles = list(runs(weight_VE.shape[0], words))
    for tile in tiles:
        softmax.update(_logits(hidden_TE, weight_VE[tile]), tile.start)
    total_TE = torch.zeros_like(hidden_TE, dtype=accumulation_dtype(hidden_TE.dtype))
    for tile in tiles:
        exps_TV = softmax.exps(_logits(hidden_TE, weight_VE[tile]))
        dlogits_TV = softmax.gradient(exps_TV, tile.start, hidden_TE.dtype)
        add_product(total_TE, dlogits_TV.T, weight_VE[tile])
        if dweight_VE is not None:
            add_product(dweight_VE[tile], dlogits_TV, hidden_TE)
        del exps_TV, dlogits_TV  # before the next tile's logits: two would be twice the memory
    dhidden_TE.copy_(total_TE)
    return softmax.loss_sum()


def _loss_and_dlogits(hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """(loss sum, gradient of the logits in the inputs' dtype) of the whole vocabulary.

    On GPUs the matmul writes the logits in the inputs' dtype, as in a plain run, and one Triton kernel overwrites them
    with their gradient. Elsewhere its reference implementation runs, in fp32 or wider.
    """
    kernels = kernels_for(hidden_TE, SOFTMAX_KERNELS)
    if kernels is not None:
        logits_TV = hidden_TE @ weight_VE.T
        return kernels.loss_with_gradient_in_place(logits_TV, labels_T, z_loss).sum(), logits_TV
    softmax = Softmax(labels_T, z_loss, accumulation_dtype(hidden_TE.dtype))
    exps_TV = softmax.update(_logits(hidden_TE, weight_VE), 0)
    return softmax.loss_sum(), softmax.gradient(exps_TV, 0, hidden_TE.dtype)


def _logits(hidden_TE: Tensor, weight_VE: Tensor) -> Tensor:
    """hidden @ weight^T, fp32 or wider. On CUDA the matmul writes its accumulator unrounded."""
    if hidden_TE.is_cuda and hidden_TE.dtype == torch.bfloat16:
        return torch.mm(hidden_TE, weight_VE.T, out_dtype=torch.float32)
    return (hidden_TE @ weight_VE.T).to(accumulation_dtype(hidden_TE.dtype))


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype, again: bool) -> Tensor:
    """gradient x factor in `dtype`: in the saved gradient's own memory where it fits and is not used `again`.

    The factor gets dimensions because torch would round a 0-dim one to the gradient's dtype first, and 1 / tokens in
    bf16 is wrong by up to 0.4% in every entry.
    """
    out = torch.empty_like(gradient, dtype=dtype) if again or gradient.dtype != dtype else gradient
    return torch.mul(gradient, factor.reshape((1,) * gradient.ndim), out=out)


class Softmax:
    """Softmax, loss and the gradient of the logits over the whole vocabulary, for the tokens of `labels_T`: `update`
    with every tile once, then read.

    Everything is computed in `dtype`. The logarithm of the sum is separate from the maximum: for a label of probability
    nearly 1 it is the whole loss, and adding the maximum would round it to 0.
    """

    def __init__(self, labels_T: Tensor, z_loss: float, dtype: torch.dtype) -> None:
        self._labels_T1, self._z_loss = labels_T[:, None], z_loss
        self._ignored_T1 = self._labels_T1 == IGNORE
        self._top_T1 = torch.full(self._labels_T1.shape, -torch.inf, dtype=dtype, device=labels_T.device)
        self._total_T1 = torch.zeros_like(self._top_T1)  # sum of exp(x - top)
        self._label_T1 = torch.zeros_like(self._top_T1)  # the label's logit

    def update(self, logits_TV: Tensor, first: int) -> Tensor:
        """Add the logits of the words from `first` on; returns exp(logits - top so far) in their place."""
        inside_T1, column_T1 = self._label_columns(logits_TV, first)
        self._label_T1 = torch.where(inside_T1, logits_TV.gather(1, column_T1), self._label_T1)
        top_T1 = torch.maximum(self._top_T1, logits_TV.amax(1, keepdim=True))
        # A row with only -inf so far: exp(-inf - 0) is the 0 that it adds.
        shift_T1 = top_T1.masked_fill(top_T1 == -torch.inf, 0)
        exps_TV = logits_TV.sub_(shift_T1).exp_()
        self._total_T1 = self._total_T1 * torch.exp(self._top_T1 - shift_T1) + exps_TV.sum(1, keepdim=True)
        self._top_T1 = top_T1
        return exps_TV

    def exps(self, logits_TV: Tensor) -> Tensor:
        """exp(logits - top) in place of the logits; after `update` with all tiles."""
        return logits_TV.sub_(self._top_T1).exp_()

    def loss_sum(self) -> Tensor:
        """Sum of the losses of all tokens that count, 0-dim."""
        loss_T1 = -self._label_log_p_T1() + self._z_loss * self._lse_T1().square()
        return loss_T1.masked_fill(self._ignored_T1, 0).sum()

    def gradient(self, exps_TV: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """d loss / d logits of the words from `first` on, in `dtype`; may take the place of `exps`. 0 where ignored.

        The label's own entry is computed before rounding, as expm1: with a rounded p, p - 1 would lose the gradient of
        a nearly certain label.
        """
        z_factor_T1 = 2 * self._z_loss * self._lse_T1()
        factor_T1 = ((1 + z_factor_T1) / self._total_T1).masked_fill(self._ignored_T1, 0)
        out = exps_TV if exps_TV.dtype == dtype else torch.empty_like(exps_TV, dtype=dtype)
        dlogits_TV = torch.mul(exps_TV, factor_T1, out=out)
        log_p_T1 = self._label_log_p_T1()
        entry_T1 = (torch.expm1(log_p_T1) + z_factor_T1 * torch.exp(log_p_T1)).to(dtype)
        inside_T1, column_T1 = self._label_columns(exps_TV, first)
        return dlogits_TV.scatter_(1, column_T1, torch.where(inside_T1, entry_T1, dlogits_TV.gather(1, column_T1)))

    def _label_columns(self, tile_TV: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Whether the label is in this tile, and its column there (any column where it does not)."""
        column_T1 = self._labels_T1 - first
        width = tile_TV.shape[1]
        inside_T1 = (column_T1 >= 0) & (column_T1 < width) & ~self._ignored_T1
        return inside_T1, column_T1.clamp(0, width - 1)

    def _label_log_p_T1(self) -> Tensor:
        return (self._label_T1 - self._top_T1) - torch.log(self._total_T1)

    def _lse_T1(self) -> Tensor:
        return self._top_T1 + torch.log(self._total_T1)
