"""Stands for flash_attn.flash_attn_interface of flash-attn 2.6: its functions over torch's own FlashAttention-2.

Tensors are [batch, tokens, heads, head_dim], or [tokens, heads, head_dim] with the first tokens of the sequences in
`cu_seqlens`. Dropout, ALiBi, windows, soft caps and paged keys are refused: no program here uses them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_OFF: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size": (-1, -1),
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
    "block_table": None,
    "zero_tensors": False,
}
_IGNORED = {"deterministic", "return_softmax", "return_attn_probs", "rng_state"}


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """As 2.6 returns it: out, q, k, v, out padded, lse [batch, heads, tokens] fp32, probabilities, random state."""
    _check(dropout_p=dropout_p, **options)
    out, lse = _forward(q, k, v, softmax_scale, causal)
    return out, q, k, v, out, lse, None, None


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
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Writes the gradients into dq, dk and dv, for any `out` and `softmax_lse` over the same rows."""
    _check(dropout_p=dropout_p, **options)
    found = _backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
    for into, gradient in zip((dq, dk, dv), found, strict=True):
        into.copy_(gradient)
    return dq, dk, dv, torch.empty(0, device=q.device)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    _check(dropout_p=dropout_p, **options)
    result: Tensor = _Attention.apply(q, k, v, softmax_scale, causal)
    return result


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """`kv` is [batch, tokens, 2, heads, head_dim]."""
    return flash_attn_func(q, *kv.unbind(2), *arguments, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """`qkv` is [batch, tokens, 3, heads, head_dim]."""
    return flash_attn_func(*qkv.unbind(2), *arguments, **options)


def flash_attn_varlen_func(
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
    _check(dropout_p=dropout_p, **options)
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


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Tensor:
        out, lse = _forward(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return *_backward(dout, *ctx.saved_tensors, ctx.scale, ctx.causal), None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """out as q, lse [batch, heads, tokens] fp32."""
    if q.is_cuda:
        found = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return found[0], found[1]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), *_repeated(q, k, v), 0.0, causal, scale=scale
    )
    return out.transpose(1, 2), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if q.is_cuda:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        found = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, state, unused,
            scale=scale,
        )  # fmt: skip
        return found[0], found[1], found[2]
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout.transpose(1, 2), q.transpose(1, 2), *_repeated(q, k, v), out.transpose(1, 2), lse, 0.0, causal, scale=scale
    )
    dq, dk, dv = (each.transpose(1, 2) for each in grads)
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        dk, dv = (each.unflatten(2, (k.shape[2], groups)).sum(3) for each in (dk, dv))
    return dq, dk, dv


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """k and v as [batch, query heads, tokens, head_dim], which the CPU's kernel wants."""
    groups = q.shape[2] // k.shape[2]
    return [each.repeat_interleave(groups, dim=2).transpose(1, 2) for each in (k, v)]


def _check(**options: Any) -> None:
    """Raises NotImplementedError for what this stand-in does not compute."""
    for name, value in options.items():
        if name in _IGNORED or (name in _OFF and value in (_OFF[name], None)):
            continue
        raise NotImplementedError(f"the stand-in for flash_attn has no {name}, found {value!r}; install flash-attn 2")
