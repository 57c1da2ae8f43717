"""LM head and loss: as torch writes them, all logits at once, and fused, run by run of the tokens.

The first is the reference of every other implementation. For a token with logits x, label y and weight z of the squared
log-partition, with lse = log sum exp(x) and p = softmax:

    loss = lse - x_y + z lse^2          d loss / d x = p (1 + 2 z lse) - onehot(y)

The fused operation forms loss and gradients of a run before the logits of the next one: on a GPU by one Triton kernel,
elsewhere by its reference implementation `loss_and_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.lm_head.loss_kernel import IGNORE, gpu_tile_tokens
from engine.ops.autograd import accumulation_dtype, kernels_for, refuse_second_derivative
from engine.ops.products import add_product
from engine.ops.runs import runs, zeros_for_sum

LossSum = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden_TE, weight_VE, labels_T) -> sum of the losses

CPU_TILE_BYTES = 1 << 26  # of one tile's logits, in fp32

SOFTMAX_KERNELS = "engine.lm_head.softmax_triton"


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


def fused_loss_sum(
    hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, z_loss: float = 0.0, tiles: int = 0
) -> Tensor:
    """`plain_loss_sum` with the logits of one run of tokens in memory: one of `tiles` runs, or with 0 of runs sized for
    the problem and device.

    A sum, not a mean: only all ranks together know the number of tokens, and a rank whose labels are all -100 returns
    0. Matmuls run in the inputs' dtype; softmax, loss and all sums over tiles in fp32 or wider. Labels may be in host
    memory; those on a GPU are read back once, which waits for all work before.

    Raises ValueError for a label that is neither a word nor -100.
    """
    run = tile_tokens(weight_VE.shape[0], hidden_TE, tiles)
    if torch.is_grad_enabled() and (hidden_TE.requires_grad or weight_VE.requires_grad):
        return _FusedLossSum.apply(hidden_TE, weight_VE, labels_T, z_loss, run)
    loss = hidden_TE.new_zeros((), dtype=accumulation_dtype(hidden_TE.dtype))
    of_tokens = runs_with_labels(labels_T, run, weight_VE.shape[0])
    labels_T = labels_T.to(hidden_TE.device, non_blocking=True)
    for tokens, counts in of_tokens:
        if counts:
            loss += losses_and_dlogits(hidden_TE[tokens], weight_VE, labels_T[tokens], z_loss)[0].sum()
    return loss


class _FusedLossSum(torch.autograd.Function):
    """(hidden_TE, weight_VE, labels_T, z_loss, tokens of a run) -> loss sum; forward computes both gradients."""

    @staticmethod
    def forward(ctx: Any, hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, z_loss: float, run: int) -> Tensor:
        loss = hidden_TE.new_zeros((), dtype=accumulation_dtype(hidden_TE.dtype))
        dhidden_TE = torch.empty_like(hidden_TE)
        dweight_VE = zeros_for_sum(weight_VE) if ctx.needs_input_grad[1] else None
        of_tokens = runs_with_labels(labels_T, run, weight_VE.shape[0])
        labels_T = labels_T.to(hidden_TE.device, non_blocking=True)
        for tokens, counts in of_tokens:
            if not counts:
                dhidden_TE[tokens].zero_()
                continue
            losses_T, dlogits_TV = losses_and_dlogits(hidden_TE[tokens], weight_VE, labels_T[tokens], z_loss)
            loss += losses_T.sum()
            torch.mm(dlogits_TV, weight_VE, out=dhidden_TE[tokens])
            if dweight_VE is not None:
                add_product(dweight_VE, dlogits_TV, hidden_TE[tokens])
            del dlogits_TV  # before the next run's logits: two would be twice the memory
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


def losses_and_dlogits(
    hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(loss of each token, gradient of the logits in the inputs' dtype) of one run of tokens; 0 where ignored.

    On GPUs the matmul writes the logits in the inputs' dtype, as in a plain run, and one Triton kernel overwrites them
    with their gradient. Elsewhere its reference implementation runs, in fp32 or wider.
    """
    kernels = kernels_for(hidden_TE, SOFTMAX_KERNELS)
    if kernels is not None:
        logits_TV = hidden_TE @ weight_VE.T
        return kernels.loss_with_gradient_in_place(logits_TV, labels_T, z_loss), logits_TV
    logits_TV = (hidden_TE @ weight_VE.T).to(accumulation_dtype(hidden_TE.dtype))
    return loss_and_gradient(logits_TV, labels_T, z_loss, hidden_TE.dtype)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype, again: bool) -> Tensor:
    """gradient x factor in `dtype`: in the saved gradient's own memory where it fits and is not used `again`.

    The factor gets dimensions because torch would round a 0-dim one to the gradient's dtype first, and 1 / tokens in
    bf16 is wrong by up to 0.4% in every entry.
    """
    out = torch.empty_like(gradient, dtype=dtype) if again or gradient.dtype != dtype else gradient
    return torch.mul(gradient, factor.reshape((1,) * gradient.ndim), out=out)


def loss_and_gradient(logits_TV: Tensor, labels_T: Tensor, z_loss: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(loss of each token, d loss / d logits in `dtype`), which may take the place of the logits; 0 where ignored.

    Two sums are formed so that they keep what a label of probability nearly 1 leaves. The logarithm of the sum of
    exponentials is separate from the maximum: it is then the whole loss, and adding the maximum would round it to 0.
    The label's own entry of the gradient is computed as expm1, before rounding: p - 1 of a rounded p would lose it.
    """
    ignored_T1 = (labels_T == IGNORE)[:, None]
    label_T1 = labels_T[:, None].masked_fill(ignored_T1, 0)
    top_T1 = logits_TV.amax(1, keepdim=True)
    label_less_top_T1 = logits_TV.gather(1, label_T1) - top_T1
    exps_TV = logits_TV.sub_(top_T1).exp_()
    total_T1 = exps_TV.sum(1, keepdim=True)
    log_p_T1 = label_less_top_T1 - total_T1.log()
    lse_T1 = top_T1 + total_T1.log()
    loss_T1 = -log_p_T1 + z_loss * lse_T1.square()
    z_factor_T1 = 2 * z_loss * lse_T1
    factor_T1 = ((1 + z_factor_T1) / total_T1).masked_fill(ignored_T1, 0)
    out_TV = exps_TV if exps_TV.dtype == dtype else torch.empty_like(exps_TV, dtype=dtype)
    dlogits_TV = torch.mul(exps_TV, factor_T1, out=out_TV)
    entry_T1 = (torch.expm1(log_p_T1) + z_factor_T1 * log_p_T1.exp()).masked_fill(ignored_T1, 0).to(dtype)
    return loss_T1.masked_fill(ignored_T1, 0).squeeze(1), dlogits_TV.scatter_(1, label_T1, entry_T1)


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
