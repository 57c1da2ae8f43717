"""LM head and loss as one operation over the sequence: the logits of all tokens never exist together.

A 128256-word vocabulary turns 64K tokens into 31 GiB of fp32 logits. Here a tile of tokens at a time goes through
logits, loss and gradients, so that one tile's logits are the most there ever is; the gradients of hidden states and
weight are ready when the forward ends, and backward only scales them. Sources: the sequence-level fusion of BurstEngine
(arXiv:2509.19836); gradients formed in the forward pass as in Liger Kernel (arXiv:2410.10989).

Shape letters: T tokens, E embedding, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.weight_gradient import add_product

IGNORE = -100  # label of a token that predicts nothing: torch's own convention

# Bytes of one tile's logits in fp32. Each tile adds to the V x E weight gradient, which is read and written whole: with
# a 128256 x 4096 head, 1 GiB is 2K tokens, whose matmuls outweigh that traffic several times on an H200.
TILE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}


def plain_loss_sum(hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight^T)[label], as torch writes it: all logits at once, fp32 or wider.

    Tokens labelled -100 count nothing. This is the oracle of `fused_loss_sum`.
    """
    logits_TV = F.linear(hidden_TE, weight_VE)
    return F.cross_entropy(_widened(logits_TV), labels_T, ignore_index=IGNORE, reduction="sum")


def fused_loss_sum(hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, tile_tokens: int | None = None) -> Tensor:
    """`plain_loss_sum` with the logits of `tile_tokens` tokens in memory; None sizes the tile for the device.

    A sum, not a mean: how many tokens there are is known to all ranks together only, and a rank whose labels are all
    -100 gives 0. Matmuls run in the inputs' dtype; softmax, loss and the sum of the weight gradient in fp32 or wider.
    """
    if tile_tokens is None:
        tile_tokens = max(1, TILE_BYTES[hidden_TE.device.type] // (4 * weight_VE.shape[0]))
    if torch.is_grad_enabled() and (hidden_TE.requires_grad or weight_VE.requires_grad):
        return _FusedLossSum.apply(hidden_TE, weight_VE, labels_T, tile_tokens)
    loss = hidden_TE.new_zeros((), dtype=_wide(hidden_TE))
    for _, hidden, labels in _tiles(hidden_TE, labels_T, tile_tokens):
        loss -= _label_log_p(_log_p(hidden, weight_VE), labels).sum()
    return loss


class _FusedLossSum(torch.autograd.Function):
    """(hidden_TE, weight_VE, labels_T, tile_tokens) -> loss sum, with both gradients formed on the way."""

    @staticmethod
    def forward(ctx: Any, hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, tile_tokens: int) -> Tensor:
        wide = _wide(hidden_TE)
        loss = hidden_TE.new_zeros((), dtype=wide)
        dhidden_TE = torch.empty_like(hidden_TE)
        dweight_VE = torch.zeros_like(weight_VE, dtype=wide) if ctx.needs_input_grad[1] else None
        for tokens, hidden, labels in _tiles(hidden_TE, labels_T, tile_tokens):
            log_p_TV = _log_p(hidden, weight_VE)
            label_log_p_T = _label_log_p(log_p_TV, labels)
            loss -= label_log_p_T.sum()
            # d loss / d logits = p - onehot(label), in the matmuls' dtype. The label's own entry is formed in fp32:
            # once p has been rounded, p - 1 has lost what is left to learn.
            dlogits_TV = torch.exp(log_p_TV, out=torch.empty_like(log_p_TV, dtype=hidden.dtype))
            del log_p_TV
            entry_T1 = torch.expm1(label_log_p_T).to(hidden.dtype)[:, None]
            dlogits_TV.scatter_(1, labels.clamp(min=0)[:, None], entry_T1)
            # Ignored tokens are silenced in the small T x E operands rather than by a pass over T x V.
            ignored_T1 = (labels == IGNORE)[:, None]
            torch.mm(dlogits_TV, weight_VE, out=dhidden_TE[tokens]).masked_fill_(ignored_T1, 0)
            if dweight_VE is not None:
                add_product(dweight_VE, dlogits_TV, hidden.masked_fill(ignored_T1, 0))
        ctx.weight_dtype = weight_VE.dtype
        ctx.save_for_backward(dhidden_TE, dweight_VE)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        dhidden_TE, dweight_VE = ctx.saved_tensors
        return (
            _scaled(dhidden_TE, dloss, dhidden_TE.dtype) if ctx.needs_input_grad[0] else None,
            _scaled(dweight_VE, dloss, ctx.weight_dtype) if dweight_VE is not None else None,
            None,
            None,
        )


def _tiles(hidden_TE: Tensor, labels_T: Tensor, tile_tokens: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    for start in range(0, hidden_TE.shape[0], tile_tokens):
        tokens = slice(start, start + tile_tokens)
        yield tokens, hidden_TE[tokens], labels_T[tokens]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(_wide(tensor))


def _log_p(hidden_TE: Tensor, weight_VE: Tensor) -> Tensor:
    """log softmax(hidden @ weight^T), fp32 or wider. On CUDA the logits leave the matmul's accumulator unrounded."""
    if hidden_TE.is_cuda and hidden_TE.dtype == torch.bfloat16:
        logits_TV = torch.mm(hidden_TE, weight_VE.T, out_dtype=torch.float32)
    else:
        logits_TV = _widened(hidden_TE @ weight_VE.T)
    return torch.log_softmax(logits_TV, dim=-1)


def _label_log_p(log_p_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Each label's entry; 0 where the label is ignored."""
    entries_T = log_p_TV.gather(1, labels_T.clamp(min=0)[:, None]).squeeze(1)
    return entries_T.masked_fill_(labels_T == IGNORE, 0)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient x factor in `dtype`, without changing the stored gradient: backward may come twice.

    The factor gets dimensions because torch would round a 0-dim one to the gradient's dtype first, and 1 / tokens in
    bf16 is wrong by up to 0.4% in every entry.
    """
    out = torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, factor.reshape((1,) * gradient.ndim), out=out)
