"""Row-wise passes of attention as Triton kernels, one pass over memory each.

Their reference implementations in torch are in `engine.attention.accumulate.accumulators` and
`engine.attention.kernels.stand_in`. Tensors are [B, tokens, heads, D] with unit stride in D; rows are tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # tokens per program: 16 x 128 values keep a program's registers low and its reads wide
AT_ONCE = 4  # parts one kernel reads


@triton.jit
def _box(base, batch, head, row, column, stride_b, stride_l, stride_n):  # type: ignore[no-untyped-def]
    return base + batch * stride_b + head * stride_n + row[:, None] * stride_l + column[None, :]


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    out, out_b, out_l, out_n, lse, lse_b, lse_n, lse_l,
    p0, p0_b, p0_l, p0_n, s0, s0_b, s0_n, s0_l,
    p1, p1_b, p1_l, p1_n, s1, s1_b, s1_n, s1_l,
    p2, p2_b, p2_l, p2_n, s2, s2_b, s2_n, s2_l,
    p3, p3_b, p3_l, p3_n, s3, s3_b, s3_n, s3_l,
    tokens, head_dim,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    live = row < tokens
    box = live[:, None] & (column < head_dim)[None, :]
    none = -float("inf")
    l0 = tl.load(s0 + batch * s0_b + head * s0_n + row * s0_l, mask=live, other=none)
    top = l0
    if PARTS > 1:
        l1 = tl.load(s1 + batch * s1_b + head * s1_n + row * s1_l, mask=live, other=none)
        top = tl.maximum(top, l1)
    if PARTS > 2:
        l2 = tl.load(s2 + batch * s2_b + head * s2_n + row * s2_l, mask=live, other=none)
        top = tl.maximum(top, l2)
    if PARTS > 3:
        l3 = tl.load(s3 + batch * s3_b + head * s3_n + row * s3_l, mask=live, other=none)
        top = tl.maximum(top, l3)
    top = tl.where(top == none, 0.0, top)  # rows that see no key: all weights become 0
    weight = tl.exp(l0 - top)
    total = weight
    result = weight[:, None] * tl.load(_box(p0, batch, head, row, column, p0_b, p0_l, p0_n), mask=box, other=0.0)
    if PARTS > 1:
        weight = tl.exp(l1 - top)
        total += weight
        result += weight[:, None] * tl.load(_box(p1, batch, head, row, column, p1_b, p1_l, p1_n), mask=box, other=0.0)
    if PARTS > 2:
        weight = tl.exp(l2 - top)
        total += weight
        result += weight[:, None] * tl.load(_box(p2, batch, head, row, column, p2_b, p2_l, p2_n), mask=box, other=0.0)
    if PARTS > 3:
        weight = tl.exp(l3 - top)
        total += weight
        result += weight[:, None] * tl.load(_box(p3, batch, head, row, column, p3_b, p3_l, p3_n), mask=box, other=0.0)
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(_box(out, batch, head, row, column, out_b, out_l, out_n), result, mask=box)
    # The result may be in a part's memory, and every warp reads the same LSEs: none is overwritten before all are read.
    tl.debug_barrier()
    tl.store(lse + batch * lse_b + head * lse_n + row * lse_l, top + tl.log(total), mask=live)


@triton.jit
def _add_kernel(  # type: ignore[no-untyped-def]
    out, out_b, out_l, out_n,
    p0, p0_b, p0_l, p0_n, p1, p1_b, p1_l, p1_n, p2, p2_b, p2_l, p2_n, p3, p3_b, p3_l, p3_n,
    tokens, head_dim,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    box = (row < tokens)[:, None] & (column < head_dim)[None, :]
    total = tl.load(_box(p0, batch, head, row, column, p0_b, p0_l, p0_n), mask=box, other=0.0).to(tl.float32)
    if PARTS > 1:
        total += tl.load(_box(p1, batch, head, row, column, p1_b, p1_l, p1_n), mask=box, other=0.0).to(tl.float32)
    if PARTS > 2:
        total += tl.load(_box(p2, batch, head, row, column, p2_b, p2_l, p2_n), mask=box, other=0.0).to(tl.float32)
    if PARTS > 3:
        total += tl.load(_box(p3, batch, head, row, column, p3_b, p3_l, p3_n), mask=box, other=0.0).to(tl.float32)
    tl.store(_box(out, batch, head, row, column, out_b, out_l, out_n), total, mask=box)


@triton.jit
def _row_dot_kernel(  # type: ignore[no-untyped-def]
    left, left_b, left_l, left_n, right, right_b, right_l, right_n, delta, delta_b, delta_n,
    tokens, head_dim,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    live = row < tokens
    box = live[:, None] & (column < head_dim)[None, :]
    left_value = tl.load(_box(left, batch, head, row, column, left_b, left_l, left_n), mask=box, other=0.0)
    right_value = tl.load(_box(right, batch, head, row, column, right_b, right_l, right_n), mask=box, other=0.0)
    product = left_value.to(tl.float32) * right_value.to(tl.float32)
    tl.store(delta + batch * delta_b + head * delta_n + row, tl.sum(product, axis=1), mask=live)


@triton.jit
def _stand_in_kernel(  # type: ignore[no-untyped-def]
    dout, dout_b, dout_l, dout_n, delta, delta_b, delta_n, delta_l, out, out_b, out_l, out_n,
    tokens, head_dim,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    live = row < tokens
    box = live[:, None] & (column < head_dim)[None, :]
    gradient = tl.load(_box(dout, batch, head, row, column, dout_b, dout_l, dout_n), mask=box, other=0.0).to(tl.float32)
    row_sum = tl.load(delta + batch * delta_b + head * delta_n + row * delta_l, mask=live, other=0.0)
    largest = tl.max(tl.abs(gradient), axis=1)
    safe = tl.where(largest > 0, largest, 1.0)
    unit = gradient / safe[:, None]
    factor = row_sum / safe / tl.maximum(tl.sum(unit * unit, axis=1), 1.0)
    tl.store(_box(out, batch, head, row, column, out_b, out_l, out_n), unit * factor[:, None], mask=box)


def _unit_stride(tensor_BLND: Tensor) -> Tensor:
    return tensor_BLND if tensor_BLND.stride(-1) == 1 else tensor_BLND.contiguous()


def _rows(tensor_BLND: Tensor) -> tuple[Tensor | int, ...]:
    """A tensor and its strides, as the kernels take them."""
    tensor_BLND = _unit_stride(tensor_BLND)
    return (tensor_BLND, *tensor_BLND.stride()[:3])


def _grid(tensor_BLND: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    batch, tokens, heads, head_dim = tensor_BLND.shape
    return (triton.cdiv(tokens, ROWS), heads, batch), {"ROWS": ROWS, "WIDTH": triton.next_power_of_2(head_dim)}


def merge_parts(parts: list[tuple[Tensor, Tensor]], out_BLND: Tensor, lse_BNL: Tensor) -> None:
    """`engine.attention.accumulate.accumulators.merge_parts` for CUDA tensors with fp32 LSEs and at most four parts."""
    assert 1 <= len(parts) <= AT_ONCE
    assert out_BLND.stride(-1) == 1
    filled = [*parts, *[parts[0]] * (AT_ONCE - len(parts))]
    grid, blocks = _grid(out_BLND)
    _merge_kernel[grid](
        *_rows(out_BLND), lse_BNL, *lse_BNL.stride(),
        *(argument for part, lse in filled for argument in (*_rows(part), lse, *lse.stride())),
        out_BLND.shape[1], out_BLND.shape[3], PARTS=len(parts), **blocks,
    )  # fmt: skip


def add_parts(parts: list[Tensor], into: Tensor) -> None:
    """`engine.attention.accumulate.accumulators.add_parts` for CUDA tensors and at most four parts."""
    assert 1 <= len(parts) <= AT_ONCE
    assert into.stride(-1) == 1
    filled = [*parts, *[parts[0]] * (AT_ONCE - len(parts))]
    grid, blocks = _grid(into)
    _add_kernel[grid](
        *_rows(into), *(argument for part in filled for argument in _rows(part)),
        into.shape[1], into.shape[3], PARTS=len(parts), **blocks,
    )  # fmt: skip


def row_dot(dout_BLND: Tensor, out_BLND: Tensor) -> Tensor:
    """`engine.attention.accumulate.accumulators.row_dot` for CUDA tensors."""
    batch, tokens, heads, head_dim = out_BLND.shape
    delta_BNL = torch.empty(batch, heads, tokens, dtype=torch.float32, device=out_BLND.device)
    grid, blocks = _grid(out_BLND)
    _row_dot_kernel[grid](
        *_rows(dout_BLND), *_rows(out_BLND), delta_BNL, *delta_BNL.stride()[:2], tokens, head_dim, **blocks
    )
    return delta_BNL


def output_stand_in(dout_BLND: Tensor, delta_BNL: Tensor) -> Tensor:
    """`engine.attention.kernels.stand_in.output_stand_in` for CUDA tensors."""
    out_BLND = torch.empty_like(dout_BLND)
    grid, blocks = _grid(dout_BLND)
    _stand_in_kernel[grid](
        *_rows(dout_BLND), delta_BNL, *delta_BNL.stride(), *_rows(out_BLND), dout_BLND.shape[1], dout_BLND.shape[3],
        **blocks,
    )  # fmt: skip
    return out_BLND
