"""A matrix in float8 as Triton kernels: one pass over memory for its largest value, one that casts and transposes.

The reference implementation in torch, and what the result is for, are in `engine.ops.float8`. Addresses are 64 bits.
Nothing waits for the host: the largest value stays on the device, where the second kernel reads it. SwiGLU's gradients
are formed in both passes, from what they follow from, and never written in bf16: 17 bytes per element in place of 23.
So are results of norms, whose first pass also leaves a factor of every row.

The first pass goes from the end of a matrix to its beginning, and the second back: what the kernel before has written
last, and what the first pass has read last, is still in the GPU's cache of some 50 MB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops import FLOAT8_MULTIPLE
from engine.ops.elementwise_triton import raise_largest, swiglu_and_gradients
from engine.ops.float8 import SMALLEST
from engine.ops.norm_triton import WIDEST as WIDEST
from engine.ops.norm_triton import row_sizes

BLOCK, STEPS, WARPS = 2048, 4, 4  # a program's elements for the largest value: 4 times two reads of 16 bytes a thread
# Rows and columns of a tile. Larger ones write longer lines in the transposed order, but few of their programs fit a
# processor at once (2 of 128 x 128, which take 128 registers a thread; 9 of these): none reads while others write.
TILE, TILE_WARPS = 64, 4
SWIGLU_WARPS = 8  # of the same tile: a thread holds six numbers for each element

# Numbers [R, C], transposed and padded [C, P], unit, and what another cast of the same matrix need not find again.
Cast = tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]


@triton.jit
def _largest_kernel(x, largest, elements, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * (BLOCK * STEPS)
    most = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        at = start + step * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < elements, other=0.0).to(tl.float32)
        most = tl.maximum(most, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    raise_largest(largest, most.to(tl.float32, bitcast=True))


@triton.jit
def _tile_of(columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows and columns of this program's tile, in 64 bits."""
    across = tl.cdiv(columns, TILE)
    r = (tl.program_id(0) // across).to(tl.int64) * TILE + tl.arange(0, TILE)
    c = (tl.program_id(0) % across).to(tl.int64) * TILE + tl.arange(0, TILE)
    return r, c


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    value, r, c, largest, numbers, transposed, unit, rows, columns, padded, most, smallest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of a matrix, with rows `r` and columns `c`, as numbers; the first tile writes the unit, too."""
    found = tl.load(largest).to(tl.float32, bitcast=True)
    found = tl.where(found < smallest, smallest, found)  # NaN stays NaN
    value = value * (most / found)
    value = tl.where(value > most, most, tl.where(value < -most, -most, value))
    number = value.to(numbers.dtype.element_ty)
    if ROWS:
        live = (r < rows)[:, None] & (c < columns)[None, :]
        tl.store(numbers + r[:, None] * columns + c[None, :], number, mask=live)
    if COLUMNS:
        live = (c < columns)[:, None] & (r < padded)[None, :]
        tl.store(transposed + c[:, None] * padded + r[None, :], tl.trans(number), mask=live)
    if tl.program_id(0) == 0:
        tl.store(unit, found / most)


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    x, largest, numbers, transposed, unit, rows, columns, padded, most, smallest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    r, c = _tile_of(columns, TILE)
    live = (r < rows)[:, None] & (c < columns)[None, :]
    value = tl.load(x + r[:, None] * columns + c[None, :], mask=live, other=0.0).to(tl.float32)
    _write(value, r, c, largest, numbers, transposed, unit, rows, columns, padded, most, smallest, ROWS, COLUMNS)


@triton.jit
def _swiglu_largest_kernel(  # type: ignore[no-untyped-def]
    dhidden, gate, up, of_hidden, of_dgate, of_dup, elements, BLOCK: tl.constexpr
):  # fmt: skip
    at = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < elements
    d = tl.load(dhidden + at, mask=live, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=live, other=0.0).to(tl.float32)
    h, dg, du = swiglu_and_gradients(d, g, u)
    raise_largest(of_hidden, h.to(gate.dtype.element_ty))
    raise_largest(of_dgate, dg.to(gate.dtype.element_ty))
    raise_largest(of_dup, du.to(gate.dtype.element_ty))


@triton.jit
def _swiglu_cast_kernel(  # type: ignore[no-untyped-def]
    dhidden, gate, up, of_hidden, of_dgate, of_dup,
    hidden_transposed, hidden_unit, dgate, dgate_transposed, dgate_unit, dup, dup_transposed, dup_unit,
    rows, columns, padded, most, most_gradient, smallest, TILE: tl.constexpr,
):  # fmt: skip
    r, c = _tile_of(columns, TILE)
    live = (r < rows)[:, None] & (c < columns)[None, :]
    at = r[:, None] * columns + c[None, :]
    d = tl.load(dhidden + at, mask=live, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=live, other=0.0).to(tl.float32)
    h, dg, du = swiglu_and_gradients(d, g, u)
    # Rounded to the dtype of their tensors first, as where these are written.
    h = h.to(gate.dtype.element_ty).to(tl.float32)
    dg = dg.to(gate.dtype.element_ty).to(tl.float32)
    du = du.to(gate.dtype.element_ty).to(tl.float32)
    _write(
        h, r, c, of_hidden, hidden_transposed, hidden_transposed, hidden_unit, rows, columns, padded, most, smallest,
        False, True,
    )  # fmt: skip
    _write(
        dg, r, c, of_dgate, dgate, dgate_transposed, dgate_unit, rows, columns, padded, most_gradient, smallest,
        True, True,
    )  # fmt: skip
    _write(
        du, r, c, of_dup, dup, dup_transposed, dup_unit, rows, columns, padded, most_gradient, smallest, True, True
    )  # fmt: skip


@triton.jit
def _norm_largest_kernel(  # type: ignore[no-untyped-def]
    x, branch, weight, total, scales, largest, features, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < features
    at = row * features + column
    value = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(branch + at, mask=live, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=live)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / features + eps)
    tl.store(scales + row, scale)
    w = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    raise_largest(largest, (value * scale * w).to(x.dtype.element_ty))


@triton.jit
def _norm_cast_kernel(  # type: ignore[no-untyped-def]
    x, weight, scales, largest, numbers, transposed, unit, rows, columns, padded, most, smallest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    r, c = _tile_of(columns, TILE)
    live = (r < rows)[:, None] & (c < columns)[None, :]
    value = tl.load(x + r[:, None] * columns + c[None, :], mask=live, other=0.0).to(tl.float32)
    scale = tl.load(scales + r, mask=r < rows, other=0.0)
    w = tl.load(weight + c, mask=c < columns, other=0.0).to(tl.float32)
    value = (value * scale[:, None] * w[None, :]).to(x.dtype.element_ty).to(tl.float32)
    _write(value, r, c, largest, numbers, transposed, unit, rows, columns, padded, most, smallest, ROWS, COLUMNS)


def cast(matrix_RC: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool, known: tuple[Tensor, ...] = ()) -> Cast:
    """Of the first two results, one that is not asked for is empty. `known`: where `raise_largest` has left the largest
    value, if a kernel has."""
    matrix_RC = matrix_RC.contiguous()
    numbers_RC, transposed_CP, unit = _empty(matrix_RC, dtype, rows=rows, columns=columns)
    if known:
        [largest] = known
    else:
        [largest] = torch.zeros(1, dtype=torch.int32, device=matrix_RC.device)
        _largest_kernel[(triton.cdiv(matrix_RC.numel(), BLOCK * STEPS),)](
            matrix_RC, largest, matrix_RC.numel(), BLOCK=BLOCK, STEPS=STEPS, num_warps=WARPS
        )
    _cast_kernel[_tiles(matrix_RC)](
        matrix_RC, largest, numbers_RC, transposed_CP, unit, *matrix_RC.shape, _padded(matrix_RC),
        torch.finfo(dtype).max, SMALLEST, ROWS=rows, COLUMNS=columns, TILE=TILE, num_warps=TILE_WARPS,
    )  # fmt: skip
    return numbers_RC, transposed_CP, unit, (largest,)


def norm(
    x_TE: Tensor,
    weight_E: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    rows: bool = True,
    columns: bool = False,
    known: tuple[Tensor, ...] = (),
    added: tuple[Tensor, Tensor] | None = None,
) -> Cast:
    """RMSNorm of x, cast; with `added`, (branch, total), that of their sum, which is written into the contiguous total.
    `known`: the largest value, and the rows' factors, of an earlier call."""
    x_TE, (tokens, features) = x_TE.contiguous(), x_TE.shape
    numbers_TE, transposed_EP, unit = _empty(x_TE, dtype, rows=rows, columns=columns)
    branch_TE, total_TE = (None, x_TE) if added is None else (added[0].contiguous(), added[1])
    if not known:
        [largest] = torch.zeros(1, dtype=torch.int32, device=x_TE.device)
        scales_T = torch.empty(tokens, dtype=torch.float32, device=x_TE.device)
        _norm_largest_kernel[(tokens,)](
            x_TE, branch_TE, weight_E, total_TE, scales_T, largest, features, eps,
            ADD=added is not None, **row_sizes(features),
        )  # fmt: skip
        known = largest, scales_T
    largest, scales_T = known
    _norm_cast_kernel[_tiles(x_TE)](
        total_TE, weight_E, scales_T, largest, numbers_TE, transposed_EP, unit, tokens, features, _padded(x_TE),
        torch.finfo(dtype).max, SMALLEST, ROWS=rows, COLUMNS=columns, TILE=TILE, num_warps=TILE_WARPS,
    )  # fmt: skip
    return numbers_TE, transposed_EP, unit, known


def swiglu_again(
    dhidden_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, values: torch.dtype, gradients: torch.dtype
) -> tuple[Cast, Cast, Cast]:
    """(hidden by columns alone, dgate, dup) of `engine.ops.elementwise.swiglu_again`, cast; the arguments stay."""
    dhidden_TF, gate_TF, up_TF = dhidden_TF.contiguous(), gate_TF.contiguous(), up_TF.contiguous()
    hidden = _empty(gate_TF, values, rows=False, columns=True)
    dgate, dup = (_empty(gate_TF, gradients, rows=True, columns=True) for _ in range(2))
    largest = [*torch.zeros(3, dtype=torch.int32, device=gate_TF.device)]
    _swiglu_largest_kernel[(triton.cdiv(gate_TF.numel(), BLOCK),)](
        dhidden_TF, gate_TF, up_TF, *largest, gate_TF.numel(), BLOCK=BLOCK, num_warps=WARPS
    )
    _swiglu_cast_kernel[_tiles(gate_TF)](
        dhidden_TF, gate_TF, up_TF, *largest, *hidden[1:], *dgate, *dup, *gate_TF.shape, _padded(gate_TF),
        torch.finfo(values).max, torch.finfo(gradients).max, SMALLEST, TILE=TILE, num_warps=SWIGLU_WARPS,
    )  # fmt: skip
    return (*hidden, ()), (*dgate, ()), (*dup, ())


def _empty(matrix_RC: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    (count, width), device = matrix_RC.shape, matrix_RC.device
    return (
        torch.empty((count, width) if rows else (0, 0), dtype=dtype, device=device),
        torch.empty((width, _padded(matrix_RC)) if columns else (0, 0), dtype=dtype, device=device),
        torch.empty((), dtype=torch.float32, device=device),
    )


def _padded(matrix_RC: Tensor) -> int:
    return triton.cdiv(matrix_RC.shape[0], FLOAT8_MULTIPLE) * FLOAT8_MULTIPLE


def _tiles(matrix_RC: Tensor) -> tuple[int]:
    return (triton.cdiv(matrix_RC.shape[0], TILE) * triton.cdiv(matrix_RC.shape[1], TILE),)
