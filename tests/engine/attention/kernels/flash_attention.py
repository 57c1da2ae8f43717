"""The calls of FlashAttention with cumulative lengths, in float64 on a CPU: what kernels are given is checked as the
libraries check it, and computed as they document it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.attention.kernels import fa2, fa4

FORWARD, BACKWARD = (
    getattr(torch.ops.aten, name).default._schema for name in ("_flash_attention_forward", "_flash_attention_backward")
)


class Library:
    """Notes the cumulative lengths of queries that it was given."""

    def __init__(self) -> None:
        self.bounds: list[Tensor] = []

    def attend(self, q, k, v, bounds_q, bounds_k, longest_q, longest_k, scale, left=None, right=None):
        """(out [tokens, heads, D], lse [heads, tokens]), differentiable; a window is counted from the ends."""
        self.bounds.append(bounds_q)
        assert q.ndim == k.ndim == v.ndim == 3
        assert bounds_q.dtype == bounds_k.dtype == torch.int32
        ends_q, ends_k = bounds_q.tolist(), bounds_k.tolist()
        assert (ends_q[0], ends_q[-1], ends_k[0], ends_k[-1]) == (0, len(q), 0, len(k))
        outs, lses = [], []
        for start, stop, k_start, k_stop in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
            rows, columns = stop - start, k_stop - k_start
            assert 0 < rows <= longest_q
            assert 0 < columns <= longest_k
            group = q.shape[1] // k.shape[1]
            keys, values = (each[k_start:k_stop].repeat_interleave(group, dim=1) for each in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[start:stop], keys) * scale
            offset = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
            seen = torch.ones_like(offset, dtype=torch.bool)
            seen &= offset >= -left if left is not None else seen
            seen &= offset <= right if right is not None else seen
            scores = scores.masked_fill(~seen, -torch.inf)
            lses.append(scores.logsumexp(-1))
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        return torch.cat(outs), torch.cat(lses, dim=1)

    def gradients(self, q, k, v, dout, lse, delta, *lengths: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Those with the final lse [heads, tokens] and delta = rowsum(dO * O) of whole rows."""
        inputs = tuple(each.detach().requires_grad_() for each in (q, k, v))
        out, part_lse = self.attend(*inputs, *lengths)
        weight = (part_lse.detach() - lse).exp().T.unsqueeze(-1)
        scaled = dout * weight
        dlse = (scaled * out.detach()).sum(-1).T - weight.squeeze(-1).T * delta
        dq, dk, dv = torch.autograd.grad((out, part_lse), inputs, (scaled, dlse))
        return dq, dk, dv


def flash_attention(monkeypatch) -> Library:
    """Kernels fa2 and fa4 with this library in place of their own."""
    library = Library()

    def bound(schema, *arguments, **named) -> SimpleNamespace:
        names = [argument.name for argument in schema.arguments]
        return SimpleNamespace(**dict(zip(names, arguments, strict=False)), **named)

    def forward(*arguments, **named):
        a = bound(FORWARD, *arguments, **named)
        lengths = a.cum_seq_q, a.cum_seq_k, a.max_q, a.max_k, a.scale, None, 0 if a.is_causal else None
        assert a.max_q > 1, "the kernel for decoding has another LSE"
        assert not a.return_debug_mask
        return (*library.attend(a.query, a.key, a.value, *lengths), None, None, None)

    def backward(*arguments, **named):
        a = bound(BACKWARD, *arguments, **named)
        lengths = a.cum_seq_q, a.cum_seq_k, a.max_q, a.max_k, a.scale, None, 0 if a.is_causal else None
        delta = (a.grad_out * a.out).sum(-1).T
        assert a.logsumexp.is_contiguous()
        return library.gradients(a.query, a.key, a.value, a.grad_out, a.logsumexp, delta, *lengths)

    def lengths_of(q, scale, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window: dict[str, Any]):
        assert set(window) <= {"causal", "window_size_left", "window_size_right"}
        right = 0 if window.get("causal") else window.get("window_size_right")
        return cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, window.get("window_size_left"), right

    def split(named: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        lengths = {name: each for name, each in named.items() if name.startswith(("cu_", "max_"))}
        return lengths, {name: each for name, each in named.items() if name not in lengths}

    def fa4_forward(q, k, v, *, softmax_scale, return_lse, softcap, **named):
        assert return_lse
        assert softcap is None
        lengths, window = split(named)
        return (*library.attend(q, k, v, *lengths_of(q, softmax_scale, **lengths, window=window)), None, None, None)

    def fa4_backward(q, k, v, out, dout, lse, *, softmax_scale, deterministic, dlse=None, **named):
        lengths, window = split(named)
        assert out.shape == dout.shape == q.shape
        assert lse.shape == (q.shape[1], len(q))
        assert lse.is_contiguous()
        delta = (dout * out).sum(-1).T - (0 if dlse is None else dlse)
        return library.gradients(q, k, v, dout, lse, delta, *lengths_of(q, softmax_scale, **lengths, window=window))

    monkeypatch.setattr(fa2, "_packed_forward", forward)
    monkeypatch.setattr(fa2, "_packed_backward", backward)
    interface = SimpleNamespace(_flash_attn_fwd=fa4_forward, _flash_attn_bwd=fa4_backward)
    monkeypatch.setattr(fa4, "library", lambda: interface)
    monkeypatch.setattr(fa4, "_zeros", {})
    return library
