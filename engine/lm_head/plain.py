"""LM head and loss as torch writes them, all logits at once: the reference of every other implementation.

Also what the others share with it: which labels count, and the tile whose logits exist at one time in place of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.autograd import accumulation_dtype
from engine.ops.runs import runs

LossSum = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden_TE, weight_VE, labels_T) -> sum of the losses

IGNORE = -100  # label of a token that predicts nothing: torch's own convention

# Bytes of one tile's logits. Every tile of tokens adds to the V x E weight gradient, which is read and written whole:
# with a 128256 x 4096 head 1 GiB is 4K tokens in bf16, whose matmuls outweigh that traffic many times on an H200.
TILE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}

# Fewest tokens of a tile that holds the whole vocabulary. Fewer would spend more time on the weight gradient's traffic
# than a tiled vocabulary spends on computing the logits twice (docs/notes/2026-11-21-lm-head.md).
FEWEST_TOKENS = {"cuda": 512, "cpu": 64}

# Tokens beyond which a larger tile gains little on a GPU: an eighth of all, between these two.
ENOUGH_TOKENS = (4096, 8192)

_STEP = 128  # tiles of part of the vocabulary are whole multiples of it, so that matmuls start at aligned addresses


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitTile:
    """The logits that exist at one time: those of `tokens` tokens for `words` words of the vocabulary."""

    tokens: int
    words: int

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.words < 1:
            raise ValueError(f"a tile of {self.tokens} tokens x {self.words} words holds no logit; give at least 1 x 1")


def choose_tile(vocabulary: int, hidden_TE: Tensor, tiles: int = 0) -> LogitTile:
    """The tile for these hidden states.

    With `tiles`: the whole vocabulary, and one of so many runs of the tokens. Without: the whole vocabulary, unless
    that leaves too few tokens. Its logits then take `TILE_BYTES` of the device at most; on a GPU as much as the hidden
    states, if they take more, and no more than `ENOUGH_TOKENS`.

    With part of the vocabulary, each tile moves 8 E bytes per word (weight gradient, read and written in fp32) and 8 E
    bytes per token (gradient of the hidden states, likewise); a square tile moves the least for its area.
    """
    if tiles:
        return LogitTile(tokens=max(1, -(-hidden_TE.shape[0] // tiles)), words=vocabulary)
    device = hidden_TE.device.type
    if device == "cuda":
        budget = max(TILE_BYTES[device], hidden_TE.nbytes)
        low, high = ENOUGH_TOKENS
        whole, enough = budget // hidden_TE.itemsize, min(max(low, hidden_TE.shape[0] // 8), high)
    else:
        whole = enough = TILE_BYTES[device] // 4
    if whole >= FEWEST_TOKENS[device] * vocabulary:
        return LogitTile(tokens=min(whole // vocabulary, enough), words=vocabulary)
    side = math.isqrt(TILE_BYTES[device] // 4) // _STEP * _STEP  # in fp32
    return LogitTile(tokens=side, words=min(side, vocabulary))


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
