"""The calls of flash_attn 2 that rings are built on: forward with LSE, and backward into given gradients.

Scores of a block are formed whole, in fp32 or wider, and results are rounded to the inputs' dtype, as the kernel does.
With FLASH_ATTN_STAND_IN=2.6 in the environment the forward returns the eight values of releases up to 2.6, rather than
the four of later ones.

Shape letters: B batch, Q query tokens, S key tokens, N query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

_EIGHT_VALUES = "2.6"


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    window_size: tuple[int, int] | None = None,  # releases up to 2.6
) -> tuple[Any, ...]:
    """(out [B, Q, N, D], lse [B, N, Q] in fp32, two values that only dropout fills)."""
    window = window_size or (window_size_left, window_size_right)
    _check(q, dropout_p, softcap, alibi_slopes, window)
    wide_q, wide_k, wide_v = (_wide(t) for t in (q, _repeated(k, q), _repeated(v, q)))
    scores = _scores(wide_q, wide_k, softmax_scale, causal)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp().nan_to_num(0.0)  # a row that sees no key has lse -inf
    out = torch.einsum("bnqs,bsnd->bqnd", p, wide_v).to(q.dtype)
    empty = torch.empty(0)
    if os.environ.get("FLASH_ATTN_STAND_IN") == _EIGHT_VALUES:
        return out, q, k, v, out, lse.float(), empty, empty
    return out, lse.float(), empty, empty


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
) -> Tensor:
    """Writes dq, dk and dv; returns delta [B, N, Q]. `softmax_lse` is that of all the keys, not of this block's."""
    window = window_size or (window_size_left, window_size_right)
    _check(q, dropout_p, softcap, alibi_slopes, window)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    wide_q, wide_k, wide_v, wide_dout = (_wide(t) for t in (q, _repeated(k, q), _repeated(v, q), dout))
    lse = _wide(softmax_lse)[:, :, : q.shape[1], None]
    p = (_scores(wide_q, wide_k, scale, causal) - lse).exp()
    delta = torch.einsum("bqnd,bqnd->bnq", wide_dout, _wide(out))
    ds = p * (torch.einsum("bqnd,bsnd->bnqs", wide_dout, wide_v) - delta[..., None]) * scale
    dq.copy_(torch.einsum("bnqs,bsnd->bqnd", ds, wide_k))
    dk.copy_(_summed(torch.einsum("bnqs,bqnd->bsnd", ds, wide_q), k))
    dv.copy_(_summed(torch.einsum("bnqs,bqnd->bsnd", p, wide_dout), v))
    return delta.float()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
        values = _flash_attn_forward(q, k, v, 0.0, scale, causal)
        out, lse = values[0], values[5 if len(values) == 8 else 1]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal = scale, causal
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        _flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, ctx.scale, ctx.causal)
        return dq, dk, dv, None, None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """out [B, Q, N, D], differentiable; with `return_attn_probs` also the LSE, and None for the probabilities."""
    _check(q, dropout_p, softcap, alibi_slopes, window_size)
    out, lse = _Attention.apply(q, k, v, softmax_scale, causal)
    return (out, lse, None) if return_attn_probs else out


def _absent(*arguments: Any, **more: Any) -> Any:
    raise NotImplementedError("the CPU stand-in of flash_attn has no packed and no variable-length calls; use a GPU")


_flash_attn_varlen_forward = _flash_attn_varlen_backward = flash_attn_varlen_func = _absent
flash_attn_qkvpacked_func = flash_attn_kvpacked_func = _absent
flash_attn_varlen_qkvpacked_func = flash_attn_varlen_kvpacked_func = _absent


def _check(q: Tensor, dropout_p: float, softcap: float | None, alibi_slopes: Any, window: tuple[int, int]) -> None:
    """Raises RuntimeError on a GPU, and NotImplementedError for what dense attention here leaves out."""
    if q.device.type != "cpu":
        raise RuntimeError(f"this flash_attn is a stand-in for CPU ranks, found q on {q.device}; install flash_attn")
    if dropout_p or softcap or alibi_slopes is not None or tuple(window) != (-1, -1):
        raise NotImplementedError(
            "the CPU stand-in of flash_attn is full or causal attention alone; leave dropout, softcap, ALiBi and "
            "windows out"
        )


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _repeated(tensor: Tensor, q: Tensor) -> Tensor:
    """K or V with one head for each of q's."""
    return tensor.repeat_interleave(q.shape[2] // tensor.shape[2], 2)


def _summed(gradient: Tensor, of: Tensor) -> Tensor:
    """The gradient of `_repeated`: summed over the query heads of each KV head."""
    return gradient.unflatten(2, (of.shape[2], -1)).sum(3)


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool) -> Tensor:
    """Scaled scores [B, N, Q, S]; causal attention aligns the last query with the last key, as flash_attn does."""
    scores = torch.einsum("bqnd,bsnd->bnqs", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        rows, columns = scores.shape[-2:]
        visible = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores
