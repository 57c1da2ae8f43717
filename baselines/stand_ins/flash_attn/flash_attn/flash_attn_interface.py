"""Stands for flash_attn.flash_attn_interface of flash-attn 2: full and causal attention, forward and backward.

On the CPU scores are formed whole, in fp32 or wider, and results are rounded to the inputs' dtype, as the kernel does.
On GPUs FlashAttention-4 computes, where it is installed; in attempts, the FlashAttention-2 inside torch. Two variables
of the environment are read:

`FLASH_ATTN_STAND_IN=2.6`         values are returned as by releases up to 2.6 rather than as by later ones
`FLASH_ATTN_STAND_IN_ATTEMPT=1`   set by `baselines.attempt`, which measures no speed: GPUs and variable-length calls
                                  are allowed

Shape letters: B batch, Q query tokens, S key tokens, N query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

# What computes on GPUs, which records of trials name; "" for nothing. Attempts measure no speed, and take torch's.
KERNEL = (
    "fa4" if importlib.util.find_spec(f"{__package__}.cute") and "FLASH_ATTN_STAND_IN_ATTEMPT" not in os.environ else ""
)
if KERNEL:
    from . import over_fa4

# What is not computed, with the value that leaves it out; None does so too.
_OFF: dict[str, Any] = {
    "dropout_p": 0.0,
    "softcap": 0.0,
    "alibi_slopes": None,
    "window_size": (-1, -1),
    "window_size_left": -1,
    "window_size_right": -1,
    "block_table": None,
    "zero_tensors": False,
}
_IGNORED = {"deterministic", "return_attn_probs"}


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
    **options: Any,
) -> tuple[Any, ...]:
    """(out [B, Q, N, D], lse [B, N, Q] in fp32, two values that only dropout fills); up to 2.6 q, k, v and the padded
    out stand between out and lse."""
    _check(
        q, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, window_size=window_size,
        window_size_left=window_size_left, window_size_right=window_size_right, **options,
    )  # fmt: skip
    out, lse = _forward(q, k, v, softmax_scale, causal)
    empty = torch.empty(0, device=q.device)
    return (out, q, k, v, out, lse, empty, empty) if _old_calls() else (out, lse, empty, empty)


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
    **options: Any,
) -> Any:
    """Writes dq, dk and dv; returns delta [B, N, Q], up to 2.6 behind these three; by FlashAttention-4 an empty one.
    `softmax_lse` and `out` are those of all the keys, not of this block's."""
    _check(
        q, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, window_size=window_size,
        window_size_left=window_size_left, window_size_right=window_size_right, **options,
    )  # fmt: skip
    if _on_fa4(q):
        over_fa4.backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal, (dq, dk, dv))
        delta = torch.empty(0, device=q.device)  # the kernel keeps it, and no caller here reads it
        return (dq, dk, dv, delta) if _old_calls() else delta
    found = _backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
    for into, gradient in zip((dq, dk, dv), found, strict=True):
        into.copy_(gradient)
    delta = torch.einsum("bqnd,bqnd->bnq", _wide(dout), _wide(out)).float()
    return (dq, dk, dv, delta) if _old_calls() else delta


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
    **options: Any,
) -> Any:
    """out [B, Q, N, D], differentiable; with `return_attn_probs` also the LSE, and None for the probabilities."""
    _check(q, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, window_size=window_size, **options)
    out, lse = _AttentionFunction.apply(q, k, v, softmax_scale, causal)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Any:
    """`kv` is [B, S, 2, K, D]."""
    return flash_attn_func(q, *kv.unbind(2), *arguments, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **options: Any) -> Any:
    """`qkv` is [B, Q, 3, N, D]."""
    return flash_attn_func(*qkv.unbind(2), *arguments, **options)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Tensors [tokens, heads, D], with the first tokens of the sequences in `cu_seqlens_q` and `cu_seqlens_k`."""
    if not _attempt():
        raise NotImplementedError("the stand-in for flash_attn has variable-length calls in attempts alone")
    return _each_sequence(q, k, v, *arguments, **options)


def _each_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    """Each sequence by itself: those of the attempts are one or few."""
    _check(q, dropout_p=dropout_p, **options)
    first_q, first_k = (
        [int(each) for each in bounds]
        for bounds in (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
    )
    parts = [
        flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], 0.0, softmax_scale, causal)[0]
        for a, b, c, d in zip(first_q, first_q[1:], first_k, first_k[1:], strict=False)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _flash_attn_varlen_forward(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the stand-in for flash_attn has no pass over packed sequences; install flash-attn 2")


_flash_attn_varlen_backward = _flash_attn_varlen_forward


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return flash_attn_varlen_func(q, *kv.unbind(1), *arguments, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *arguments: Any, **options: Any
) -> Tensor:
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments, **options)


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal = scale, causal
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        gradients = _backward(dout, *ctx.saved_tensors, ctx.scale, ctx.causal)
        inputs = ctx.saved_tensors[:3]
        return *(each.to(of.dtype) for each, of in zip(gradients, inputs, strict=True)), None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """out in q's dtype, lse [B, N, Q] in fp32."""
    if _on_fa4(q):
        return over_fa4.forward(q, k, v, scale, causal)
    if q.is_cuda:
        found = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return found[0], found[1]
    scores = _scores(_wide(q), _wide(_repeated(k, q)), scale, causal)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp().nan_to_num(0.0)  # a row that sees no key has lse -inf
    return torch.einsum("bnqs,bsnd->bqnd", p, _wide(_repeated(v, q))).to(q.dtype), lse.float()


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; on the CPU not yet rounded."""
    if _on_fa4(q):
        return over_fa4.backward(dout, q, k, v, out, lse, scale, causal)
    if q.is_cuda:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        found = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, state, unused,
            scale=scale,
        )  # fmt: skip
        return found[0], found[1], found[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide_q, wide_k, wide_v, wide_dout = (_wide(t) for t in (q, _repeated(k, q), _repeated(v, q), dout))
    p = (_scores(wide_q, wide_k, scale, causal) - _wide(lse)[:, :, : q.shape[1], None]).exp()
    delta = torch.einsum("bqnd,bqnd->bnq", wide_dout, _wide(out))
    ds = p * (torch.einsum("bqnd,bsnd->bnqs", wide_dout, wide_v) - delta[..., None]) * scale
    dk, dv = (torch.einsum("bnqs,bqnd->bsnd", *each) for each in ((ds, wide_q), (p, wide_dout)))
    return torch.einsum("bnqs,bsnd->bqnd", ds, wide_k), _summed(dk, k), _summed(dv, v)


def _old_calls() -> bool:
    return os.environ.get("FLASH_ATTN_STAND_IN") == "2.6"


def _attempt() -> bool:
    return os.environ.get("FLASH_ATTN_STAND_IN_ATTEMPT") == "1"


def _on_fa4(q: Tensor) -> bool:
    return bool(KERNEL) and q.device.type != "cpu"


def _check(q: Tensor, **options: Any) -> None:
    """Raises RuntimeError on a GPU without FlashAttention-4 and outside attempts, and NotImplementedError for what this
    stand-in leaves out."""
    if q.device.type != "cpu" and not KERNEL and not _attempt():
        raise RuntimeError(
            f"this flash_attn is a stand-in for CPU ranks, found q on {q.device}; install flash_attn or flash-attn-4"
        )
    for name, value in options.items():
        given = tuple(value) if isinstance(value, list) else value
        if name not in _IGNORED and not (name in _OFF and (given is None or given == _OFF[name])):
            raise NotImplementedError(
                f"the stand-in for flash_attn has no {name}, found {value!r}: it is full or causal attention alone; "
                "install flash-attn 2"
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
