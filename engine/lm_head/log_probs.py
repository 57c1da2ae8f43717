"""Log-probabilities of given tokens, from hidden states, with the logits of one run of tokens in memory.

The losses of reinforcement learning weigh each token in a way that is known only after all log-probabilities are. So
unlike the fused loss, backward computes the logits of each run again:

    log p = x_y - log sum exp(x)        d log p / d x = onehot(y) - p
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.lm_head.loss import losses_and_dlogits, runs_with_labels, tile_tokens
from engine.ops.autograd import accumulation_dtype, outside_autocast, refuse_second_derivative
from engine.ops.products import add_product
from engine.ops.runs import zeros_for_sum


def fused_log_probs(hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, *, tiles: int = 0) -> Tensor:
    """log softmax(hidden @ weight^T)[label] of each token, in fp32 or wider; 0 where the label is -100.

        log_probs_T = fused_log_probs(hidden_BLE.flatten(0, 1), head.weight, labels_BL.flatten())

    Args:
        hidden_TE: what the LM head is given; divide it by a temperature where there is one.
        weight_VE: of the LM head, which has no bias.
        labels_T: a word for each token, or -100.
        tiles: runs that the tokens are computed in; 0 takes as many as suit the device.

    Differentiable in hidden states and weight, whose dtype alone decides the precision, also under autocast. Raises
    ValueError for a label that is neither a word nor -100, for tensors that do not fit each other, and for negative
    `tiles`.
    """
    _check(hidden_TE, weight_VE, labels_T)
    if not isinstance(tiles, int) or tiles < 0:
        raise ValueError(f"tiles is {tiles!r}; give a whole number of runs, or 0")
    run = tile_tokens(weight_VE.shape[0], hidden_TE, tiles)
    log_probs_T: Tensor = _FusedLogProbs.apply(hidden_TE, weight_VE, labels_T, run)
    return log_probs_T


def _check(hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor) -> None:
    """Raises ValueError unless there is one label for each row, and a weight as wide as the rows and of their dtype."""
    if not all(isinstance(each, Tensor) for each in (hidden_TE, weight_VE, labels_T)):
        found = ", ".join(type(each).__name__ for each in (hidden_TE, weight_VE, labels_T))
        raise ValueError(f"hidden states, weight and labels are {found}; pass torch tensors")
    shapes = f"hidden states {tuple(hidden_TE.shape)}, weight {tuple(weight_VE.shape)}, labels {tuple(labels_T.shape)}"
    if (hidden_TE.ndim, weight_VE.ndim, labels_T.ndim) != (2, 2, 1) or hidden_TE.shape[1] != weight_VE.shape[1]:
        raise ValueError(f"{shapes} are not [tokens, width], [vocabulary, width] and [tokens]; flatten or transpose")
    if hidden_TE.shape[0] != labels_T.shape[0]:
        raise ValueError(f"{shapes} have {hidden_TE.shape[0]} rows and {labels_T.shape[0]} labels; pass one for each")
    if not weight_VE.shape[0]:
        raise ValueError(f"{shapes} have a vocabulary of no words; pass the weight of the LM head")
    if hidden_TE.dtype != weight_VE.dtype or not hidden_TE.dtype.is_floating_point or hidden_TE.itemsize < 2:
        raise ValueError(
            f"hidden states are {hidden_TE.dtype} and the weight {weight_VE.dtype}; pass one floating-point dtype of "
            "16 bits or more"
        )
    if labels_T.dtype not in (torch.int64, torch.int32, torch.int16):  # others have no -100, or are no numbers
        raise ValueError(f"labels are {labels_T.dtype}; pass whole numbers, words of the vocabulary or -100")


class _FusedLogProbs(torch.autograd.Function):
    """(hidden_TE, weight_VE, labels_T, tokens of a run) -> log_probs_T; backward computes the logits again."""

    @staticmethod
    @outside_autocast
    def forward(ctx: Any, hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, run: int) -> Tensor:
        log_probs_T = hidden_TE.new_zeros(labels_T.shape, dtype=accumulation_dtype(hidden_TE.dtype))
        ctx.of_tokens = runs_with_labels(labels_T, run, weight_VE.shape[0])
        labels_T = labels_T.to(hidden_TE.device, non_blocking=True)
        for tokens, counts in ctx.of_tokens:
            if counts:
                log_probs_T[tokens] -= losses_and_dlogits(hidden_TE[tokens], weight_VE, labels_T[tokens])[0]
        ctx.save_for_backward(hidden_TE, weight_VE, labels_T)
        return log_probs_T

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dlog_probs_T: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        refuse_second_derivative("fused log-probabilities")
        hidden_TE, weight_VE, labels_T = ctx.saved_tensors
        dhidden_TE = torch.zeros_like(hidden_TE) if ctx.needs_input_grad[0] else None
        dweight_VE = zeros_for_sum(weight_VE) if ctx.needs_input_grad[1] else None
        for tokens, counts in ctx.of_tokens:
            if not counts:
                continue
            _, dlogits_TV = losses_and_dlogits(hidden_TE[tokens], weight_VE, labels_T[tokens])
            dlogits_TV.mul_(-dlog_probs_T[tokens, None])
            if dhidden_TE is not None:
                torch.mm(dlogits_TV, weight_VE, out=dhidden_TE[tokens])
            if dweight_VE is not None:
                add_product(dweight_VE, dlogits_TV, hidden_TE[tokens])
            del dlogits_TV  # before the next run's logits: two would be twice the memory
        return dhidden_TE, None if dweight_VE is None else dweight_VE.to(weight_VE.dtype), None, None
