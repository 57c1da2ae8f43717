"""LM head and loss as torch writes them, all logits at once: the reference of every other implementation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.autograd import accumulation_dtype

LossSum = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden_TE, weight_VE, labels_T) -> sum of the losses

IGNORE = -100  # label of a token that predicts nothing: torch's own convention


def plain_loss_sum(hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, z_loss: float = 0.0) -> Tensor:
    """Sum over tokens of -log softmax(logits)[label] + z_loss x (log sum exp(logits))^2, in fp32 or wider.

    The logits are hidden @ weight^T. Tokens labelled -100 do not count. The second term keeps the softmax's
    normaliser near 1 (PaLM, arXiv:2204.02311). Labels may be in host memory.
    """
    labels_T = labels_T.to(hidden_TE.device, non_blocking=True)
    logits_TV = F.linear(hidden_TE, weight_VE)
    logits_TV = logits_TV.to(accumulation_dtype(logits_TV.dtype))
    loss = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE, reduction="sum")
    if z_loss:
        lse_T = torch.logsumexp(logits_TV, dim=-1)
        loss = loss + z_loss * lse_T.square().masked_fill(labels_T == IGNORE, 0).sum()
    return loss
