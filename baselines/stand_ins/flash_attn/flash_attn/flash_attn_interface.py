"""Stands for flash_attn.flash_attn_interface of flash-attn 2: the two calls for one block that rings make.

On GPUs FlashAttention-4 (`flash_attn.cute`) computes, where it is installed. It writes its LSE as flash-attn 2 does,
aligns the last query with the last key, and takes the gradients' buffers, so a call here is one call there. On the CPU
scores are formed whole, in fp32 or wider, and results are rounded to the inputs' dtype, as the kernel does.

With `FLASH_ATTN_STAND_IN=2.6` in the environment the forward returns its values as releases up to 2.6 do.

Shape letters: B batch, Q query tokens, S key tokens, N query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

# What computes on GPUs, which records of trials name; "" for nothing.
KERNEL = "fa4" if importlib.util.find_spec(f"{__package__}.cute") else ""
if KERNEL:
    from flash_attn.cute import interface

# What is not computed, with the value that leaves it out; None does so too.
_OFF: dict[str, Any] = {
    "dropout_p": 0.0,
    "softcap": 0.0,
    "alibi_slopes": None,
    "window_size": (-1, -1),
    "window_size_left": -1,
    "window_size_right": -1,
}


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
    _check(
        q, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, window_size=window_size,
        window_size_left=window_size_left, window_size_right=window_size_right,
    )  # fmt: skip
    if _on_fa4(q):
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, softmax_scale=softmax_scale, causal=causal, return_lse=True)
    else:
        scores = _scores(q, k, softmax_scale, causal)
        wide_lse = scores.logsumexp(-1)
        p = (scores - wide_lse[..., None]).exp().nan_to_num(0.0)  # a row that sees no key has lse -inf
        out, lse = torch.einsum("bnqs,bsnd->bqnd", p, _wide(_repeated(v, q))).to(q.dtype), wide_lse.float()
    empty = torch.empty(0, device=q.device)
    old_calls = os.environ.get("FLASH_ATTN_STAND_IN") == "2.6"
    return (out, q, k, v, out, lse, empty, empty) if old_calls else (out, lse, empty, empty)


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
    _check(
        q, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, window_size=window_size,
        window_size_left=window_size_left, window_size_right=window_size_right,
    )  # fmt: skip
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
        found = _dense_backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
    for buffer, gradient in zip(into, found, strict=True):
        buffer.copy_(gradient)


def _absent(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the stand-in for flash_attn has the calls of a ring alone; install flash-attn 2")


# What yunchang imports beside the two.
flash_attn_func = _flash_attn_varlen_forward = _flash_attn_varlen_backward = _absent


def _dense_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, not yet rounded."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide_q, wide_k, wide_v, wide_dout = (_wide(t) for t in (q, _repeated(k, q), _repeated(v, q), dout))
    p = (_scores(q, k, scale, causal) - _wide(lse)[:, :, : q.shape[1], None]).exp()
    delta = torch.einsum("bqnd,bqnd->bnq", wide_dout, _wide(out))
    ds = p * (torch.einsum("bqnd,bsnd->bnqs", wide_dout, wide_v) - delta[..., None]) * scale
    # Of K and V: summed over the query heads of each KV head.
    dk, dv = (
        torch.einsum("bnqs,bqnd->bsnd", *each).unflatten(2, (k.shape[2], -1)).sum(3)
        for each in ((ds, wide_q), (p, wide_dout))
    )
    return torch.einsum("bnqs,bsnd->bqnd", ds, wide_k), dk, dv


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool) -> Tensor:
    """Scaled scores [B, N, Q, S]; causal attention aligns the last query with the last key, as flash_attn does."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bqnd,bsnd->bnqs", _wide(q), _wide(_repeated(k, q))) * scale
    if causal:
        rows, columns = scores.shape[-2:]
        visible = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores


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


def _check(q: Tensor, **options: Any) -> None:
    """Raises RuntimeError on a GPU without FlashAttention-4, and NotImplementedError for what this stand-in leaves
    out."""
    if q.device.type != "cpu" and not KERNEL:
        raise RuntimeError(
            f"this flash_attn is a stand-in for CPU ranks, found q on {q.device}; install flash_attn or flash-attn-4"
        )
    for name, value in options.items():
        given = tuple(value) if isinstance(value, list) else value
        if given is not None and given != _OFF[name]:
            raise NotImplementedError(
                f"the stand-in for flash_attn has no {name}, found {value!r}: it is full or causal attention alone; "
                "install flash-attn 2"
            )
