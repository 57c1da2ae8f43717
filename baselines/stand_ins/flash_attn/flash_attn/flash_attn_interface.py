"""Stands for flash_attn.flash_attn_interface of flash-attn 2: the calls for one block that rings make, of rows of one
length and of packed sequences.

On GPUs FlashAttention-4 (`flash_attn.cute`) computes, where it is installed. It writes its LSE as flash-attn 2 does,
aligns the last query with the last key, and takes the gradients' buffers, so a call here is one call there; windows,
soft-capping and packed sequences are of the CPU alone. On the CPU scores are formed whole, in fp32 or wider, and
results are rounded to the inputs' dtype, as the kernel does.

With `FLASH_ATTN_STAND_IN=2.6` in the environment the forward returns its values as releases up to 2.6 do.

Shape letters: B batch, Q query tokens, S key tokens, N query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# What computes on GPUs, which records of trials name; "" for nothing.
KERNEL = "fa4" if importlib.util.find_spec(f"{__package__}.cute") else ""
if KERNEL:
    from flash_attn.cute import interface

ALL = (-1, -1)  # a window that hides nothing


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
) -> tuple[Tensor, ...]:
    """(out [B, Q, N, D], lse [B, N, Q] in fp32, two values that only dropout fills); up to 2.6 q, k, v and the padded
    out stand between out and lse."""
    window = (window_size_left, window_size_right) if window_size is None else tuple(window_size)
    _check(q, window, softcap, dropout_p, alibi_slopes)
    if _on_fa4(q):
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, softmax_scale=softmax_scale, causal=causal, return_lse=True)
    else:
        out, lse = _dense_forward(q, k, v, softmax_scale, causal, window, softcap)
    return _returned(q, k, v, out, lse)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
) -> tuple[Tensor, ...]:
    """The same of packed sequences, on the CPU: q is [all queries, N, D], out too, lse [N, all queries]. Sequence i has
    queries `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`, and keys alike."""
    _check(q, packed=True)
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), -torch.inf)
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        part = _flash_attn_forward(
            q[None, rows], k[None, keys], v[None, keys],
            dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            window_size=window_size,
        )  # fmt: skip
        out[rows], lse[:, rows] = part[0][0], part[-3][0]
    return _returned(q, k, v, out, lse)


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
) -> None:
    """Writes dq, dk and dv. `softmax_lse` and `out` are those of all the keys, not of this block's. The original also
    returns delta, which no caller here reads."""
    window = (window_size_left, window_size_right) if window_size is None else tuple(window_size)
    _check(q, window, softcap, dropout_p, alibi_slopes)
    into = (dq, dk, dv)
    if _on_fa4(q):
        lse, buffers = softmax_lse.contiguous(), {}
        if all(_takes(buffer, q) for buffer in into):
            buffers = dict(zip(("dq", "dk", "dv"), into, strict=True))
        found = interface._flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=softmax_scale, causal=causal, **buffers
        )  # fmt: skip
        if buffers:
            return
    else:
        found = _dense_backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal, window, softcap)
    for buffer, gradient in zip(into, found, strict=True):
        buffer.copy_(gradient)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
) -> None:
    """The same of packed sequences, on the CPU. Rows and keys of no sequence stay as they are in the buffers."""
    _check(q, packed=True)
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        _flash_attn_backward(
            dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows], softmax_lse[None, :, rows],
            dq[None, rows], dk[None, keys], dv[None, keys],
            dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            window_size=window_size,
        )  # fmt: skip


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = ALL,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """Differentiable attention of rows of one length: out [B, Q, N, D]."""
    out: Tensor = _Attention.apply(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = ALL,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Differentiable attention of packed sequences: out [all queries, N, D]."""
    parts = [
        flash_attn_func(
            q[None, rows], k[None, keys], v[None, keys], dropout_p, softmax_scale, causal, window_size, softcap,
            alibi_slopes,
        )[0]
        for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k)
    ]  # fmt: skip
    return torch.cat(parts)


class _Attention(torch.autograd.Function):
    """(q, k, v, settings of `flash_attn_func` up to the slopes) -> out."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, *settings: Any) -> Tensor:
        softmax_scale, causal, window, softcap, alibi_slopes = settings
        ctx.settings = {
            "dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal, "window_size": window,
            "softcap": softcap, "alibi_slopes": alibi_slopes,
        }  # fmt: skip
        returned = _flash_attn_forward(q, k, v, **ctx.settings)
        out, lse = returned[0], returned[-3]
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        found = [torch.empty_like(each) for each in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, out, lse, *found, **ctx.settings)
        return *found, *(None,) * 6


def _returned(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """What a forward gives. In both forms out is the first and lse the third from the end."""
    empty = torch.empty(0, device=q.device)
    old_calls = os.environ.get("FLASH_ATTN_STAND_IN") == "2.6"
    return (out, q, k, v, out, lse, empty, empty) if old_calls else (out, lse, empty, empty)


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    for queries, keys in zip(
        itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True
    ):
        yield slice(*queries), slice(*keys)


def _dense_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, ...],
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, scale, causal, window, softcap)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp().nan_to_num(0.0)  # a row that sees no key has lse -inf
    return torch.einsum("bnqs,bsnd->bqnd", p, _wide(_repeated(v, q))).to(q.dtype), lse.float()


def _dense_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, ...],
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, not yet rounded."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide_q, wide_k, wide_v, wide_dout = (_wide(t) for t in (q, _repeated(k, q), _repeated(v, q), dout))
    scores = _scores(q, k, scale, causal, window, softcap)
    p = (scores - _wide(lse)[:, :, : q.shape[1], None]).exp().nan_to_num(0.0)
    delta = torch.einsum("bqnd,bqnd->bnq", wide_dout, _wide(out))
    ds = p * (torch.einsum("bqnd,bsnd->bnqs", wide_dout, wide_v) - delta[..., None]) * scale
    if softcap:
        ds = ds * (1 - (scores.masked_fill(scores == -torch.inf, 0.0) / softcap) ** 2)
    # Of K and V: summed over the query heads of each KV head.
    dk, dv = (
        torch.einsum("bnqs,bqnd->bsnd", *each).unflatten(2, (k.shape[2], -1)).sum(3)
        for each in ((ds, wide_q), (p, wide_dout))
    )
    return torch.einsum("bnqs,bsnd->bqnd", ds, wide_k), dk, dv


def _scores(
    q: Tensor, k: Tensor, scale: float | None, causal: bool, window: tuple[int, ...], softcap: float | None
) -> Tensor:
    """Scaled scores [B, N, Q, S], -inf where hidden; the last query is aligned with the last key, as in flash_attn."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bqnd,bsnd->bnqs", _wide(q), _wide(_repeated(k, q))) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = scores.shape[-2:]
    visible = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
    left, right = window[0], 0 if causal else window[1]
    if right >= 0:
        visible = visible.tril(columns - rows + right)
    if left >= 0:
        visible = visible.triu(columns - rows - left)
    return scores.masked_fill(~visible, -torch.inf)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _repeated(tensor: Tensor, q: Tensor) -> Tensor:
    """K or V with one head for each of q's."""
    return tensor.repeat_interleave(q.shape[2] // tensor.shape[2], 2)


def _on_fa4(q: Tensor) -> bool:
    return bool(KERNEL) and q.device.type != "cpu"


def _takes(buffer: Tensor, q: Tensor) -> bool:
    """Whether FlashAttention-4 can write there: its own buffers are contiguous, of q's dtype, aligned to 16 bytes."""
    return buffer.is_contiguous() and buffer.dtype == q.dtype and buffer.data_ptr() % 16 == 0


def _check(
    q: Tensor,
    window: tuple[int, ...] = ALL,
    softcap: float | None = None,
    dropout_p: float | None = None,
    alibi_slopes: Tensor | None = None,
    packed: bool = False,
) -> None:
    """Raises RuntimeError on a GPU without FlashAttention-4, and NotImplementedError for what this stand-in leaves
    out."""
    cpu = q.device.type == "cpu"
    if not cpu and not KERNEL:
        raise RuntimeError(
            f"this flash_attn is a stand-in for CPU ranks, found q on {q.device}; install flash_attn or flash-attn-4"
        )
    found = {
        "dropout": dropout_p, "ALiBi": alibi_slopes is not None, "packed sequences": packed and not cpu,
        "windows": tuple(window) != ALL and not cpu, "soft-capping": softcap and not cpu,
    }  # fmt: skip
    if missing := [name for name, given in found.items() if given]:
        raise NotImplementedError(
            f"the stand-in for flash_attn has no {missing[0]} on {q.device.type}; install flash-attn 2"
        )
