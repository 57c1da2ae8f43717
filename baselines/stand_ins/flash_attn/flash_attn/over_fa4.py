"""Attention of one block by FlashAttention-4 (`flash_attn.cute`), for callers of flash-attn 2, on GPUs.

FlashAttention-4 writes its LSE as flash-attn 2 does, [B, N, Q] in fp32 with natural logarithms, aligns the last query
with the last key, and takes the gradients' buffers. So a call here is one call there, without a copy, as long as the
buffers are contiguous. Importing this module imports FlashAttention-4 (seconds).

Shape letters as in `flash_attn_interface`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_attn.cute import interface


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """out [B, Q, N, D] in q's dtype, lse [B, N, Q] in fp32."""
    out, lse, *_ = interface._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: bool,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in the dtype of the inputs; in the buffers `into` where there are some."""
    given: dict[str, Any] = {}
    if into is not None and all(_takes(buffer, q) for buffer in into):
        given = dict(zip(("dq", "dk", "dv"), into, strict=True))
    found = interface._flash_attn_bwd(
        q, k, v, out, dout, lse.contiguous(), softmax_scale=scale, causal=causal, **given
    )  # fmt: skip
    if into is None:
        dq, dk, dv = found
        return dq, dk, dv
    if not given:
        for buffer, gradient in zip(into, found, strict=True):
            buffer.copy_(gradient)
    return into


def _takes(buffer: Tensor, q: Tensor) -> bool:
    """Whether the kernel can write there: its own buffers are contiguous, of q's dtype, and aligned to 16 bytes."""
    return buffer.is_contiguous() and buffer.dtype == q.dtype and buffer.data_ptr() % 16 == 0
