"""Softmax, loss and the gradient of the logits for one run of tokens, from logits given tile by tile.

For a token with logits x, label y and weight z of the squared log-partition, with lse = log sum exp(x) and p = softmax:

    loss = lse - x_y + z lse^2          d loss / d x = p (1 + 2 z lse) - onehot(y)

Source of the running maximum and sum: online softmax, arXiv:1805.02867.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.lm_head.plain import IGNORE


class Softmax:
    """Over the whole vocabulary, for the tokens of `labels_T`: `update` with every tile once, then read.

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
