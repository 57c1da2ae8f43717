"""LM head and loss as torch writes them, all logits at once: the reference of every other implementation.

Also what the others share with it: which labels count, and how many tokens have logits at one time in place of all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.lm_head.loss_kernel import gpu_tile_tokens
from engine.ops.autograd import accumulation_dtype
from engine.ops.runs import runs

LossSum = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden_TE, weight_VE, labels_T) -> sum of the losses

IGNORE = -100  # label of a token that predicts nothing: torch's own convention

CPU_TILE_BYTES = 1 << 26  # of one tile's logits, in fp32


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


def tile_tokens(vocabulary: int, hidden_TE: Tensor, tiles: int = 0) -> int:
    """Tokens of a tile: the logits that exist at one time are theirs, each of the whole vocabulary.

    With `tiles`: one of so many runs of the tokens. Without: as many as suit the device.
    """
    tokens, width = hidden_TE.shape
    if tiles:
        return max(1, -(-tokens // tiles))
    if hidden_TE.device.type != "cuda":
        return max(1, CPU_TILE_BYTES // (4 * vocabulary))
    return max(1, int(gpu_tile_tokens(vocabulary, width, hidden_TE.itemsize, tokens)))


def check_labels(labels_T: Tensor, vocabulary: int) -> None:
    """Raises ValueError for a label that is neither a word nor -100. Reads the labels on the host, once."""
    runs_with_labels(labels_T, labels_T.shape[0], vocabulary)


def runs_with_labels(labels_T: Tensor, size: int, vocabulary: int) -> list[tuple[slice, bool]]:
    """Runs of `size` tokens, each with whether any of its labels counts: the others need no logits.

    Reads the labels on the host, once: where they are on a GPU, that waits for all work before. Raises ValueError for a
    label that is no word, which a GPU kernel would take as an address.
    """
    counted_T = labels_T != IGNORE
    wrong_T = counted_T & ((labels_T < 0) | (labels_T >= vocabulary))
    slices = list(runs(labels_T.shape[0], size))
    *present, wrong = torch.stack([*(counted_T[run].any() for run in slices), wrong_T.any()]).tolist()
    if wrong:
        raise ValueError(
            f"label {labels_T[wrong_T][0].item()} is no word of a vocabulary of {vocabulary}; expected 0 to "
            f"{vocabulary - 1}, or {IGNORE} for a token that predicts nothing"
        )
    return list(zip(slices, present, strict=True))
