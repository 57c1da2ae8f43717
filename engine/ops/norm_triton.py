"""RMSNorm together with the residual stream, as Triton kernels: each reads its arguments once.

Reference implementations in torch: `engine.ops.norm`. Arithmetic is fp32. A program holds one row at a time,
so that its mean needs no second pass. Backward's programs take many rows each and sum the weight's gradient in
registers: torch's own reads input and gradient a second time for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056  # of backward: 8 for each of an H200's 132 processors; as many rows of partial sums are added up after
WIDEST = 16384  # features that one program can hold


@triton.jit
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    x, branch, weight, total, normed, features, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < features
    at = row * features + column
    value = tl.load(x + at, mask=live, other=0.0).to(tl.float32) + tl.load(branch + at, mask=live, other=0.0).to(
        tl.float32
    )
    # What is normed is what is stored: the rounded sum.
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=live)
    value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / features + eps)
    w = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    tl.store(normed + at, (value * scale * w).to(normed.dtype.element_ty), mask=live)


@triton.jit
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    x, weight, dnormed, residual, dx, partial, rows, programs, features, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    within = column < features
    w = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program, rows, programs):
        at = row * features + column
        value = tl.load(x + at, mask=within, other=0.0).to(tl.float32)
        gradient = tl.load(dnormed + at, mask=within, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / features + eps)
        unit = value * scale
        weighted = gradient * w
        along = tl.sum(weighted * unit, axis=0) / features
        result = scale * (weighted - unit * along)
        dweight += gradient * unit
        if ADD:
            result += tl.load(residual + at, mask=within, other=0.0).to(tl.float32)
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=within)
    tl.store(partial + program * features + column, dweight, mask=within)


def add_norm(x_TE: Tensor, branch_TE: Tensor, weight_E: Tensor, eps: float, total_TE: Tensor) -> Tensor:
    """Writes x + branch into `total_TE`; returns its RMSNorm. All contiguous."""
    assert x_TE.is_contiguous() and branch_TE.is_contiguous() and total_TE.is_contiguous()  # noqa: PT018
    tokens, features = x_TE.shape
    normed_TE = torch.empty_like(x_TE)
    if tokens:
        _add_norm_kernel[(tokens,)](
            x_TE, branch_TE, weight_E, total_TE, normed_TE, features, eps, **row_sizes(features)
        )  # fmt: skip
    return normed_TE


def norm_gradients(
    x_TE: Tensor, weight_E: Tensor, eps: float, dnormed_TE: Tensor, residual_TE: Tensor | None, dx_TE: Tensor
) -> Tensor:
    """Writes the gradient of x, plus `residual_TE` where given, into `dx_TE`; returns that of the weight in fp32."""
    x_TE, dnormed_TE = x_TE.contiguous(), dnormed_TE.contiguous()
    residual_TE = None if residual_TE is None else residual_TE.contiguous()
    assert dx_TE.is_contiguous()
    features = x_TE.shape[-1]
    tokens = x_TE.numel() // features  # heads of tokens count as tokens
    programs = min(PROGRAMS, tokens)
    if not tokens:
        return torch.zeros(features, dtype=torch.float32, device=x_TE.device)
    partial_PE = torch.empty(programs, features, dtype=torch.float32, device=x_TE.device)
    _norm_backward_kernel[(programs,)](
        x_TE, weight_E, dnormed_TE, dnormed_TE if residual_TE is None else residual_TE, dx_TE, partial_PE,
        tokens, programs, features, eps, ADD=residual_TE is not None, **row_sizes(features),
    )  # fmt: skip
    return partial_PE.sum(0)


def row_sizes(features: int) -> dict[str, int]:
    """Elements of a program, and warps so that each thread holds at most 16 of them."""
    block = max(32, triton.next_power_of_2(features))
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
