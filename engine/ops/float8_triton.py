"""A matrix in float8 as Triton kernels: one pass over memory for its largest value, one that casts and transposes.

The reference implementation in torch, and what the result is for, are in `engine.ops.float8`. Addresses are 64 bits.
Nothing waits for the host: the largest value stays on the device, where the second kernel reads it. It is kept as the
integer of its bits: that of NaN is the greatest, that of infinity the next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops import FLOAT8_MULTIPLE
from engine.ops.float8 import SMALLEST

BLOCK, STEPS, WARPS = 2048, 8, 4  # a program's elements for the largest value: 8 times two reads of 16 bytes a thread
TILE, TILE_WARPS = 128, 8  # rows and columns of a cast tile: lines of 128 bytes are written in either order


@triton.jit
def raise_largest(largest, values):  # type: ignore[no-untyped-def]
    """From now on `largest` is no less than the absolute values of `values`, a block of one dimension."""
    bits = tl.max(values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    # Few programs find a larger one: the others only read.
    tl.atomic_max(largest, bits, mask=bits > tl.load(largest), sem="relaxed")


@triton.jit
def _largest_kernel(x, largest, elements, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    most = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        at = start + step * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < elements, other=0.0).to(tl.float32)
        most = tl.maximum(most, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    raise_largest(largest, most.to(tl.float32, bitcast=True))


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    x, largest, numbers, transposed, unit, rows, columns, padded, most, smallest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, TILE)
    program = tl.program_id(0)
    r = (program // across).to(tl.int64) * TILE + tl.arange(0, TILE)
    c = (program % across).to(tl.int64) * TILE + tl.arange(0, TILE)
    found = tl.load(largest).to(tl.float32, bitcast=True)
    found = tl.where(found < smallest, smallest, found)  # NaN stays NaN
    live = (r < rows)[:, None] & (c < columns)[None, :]
    at = r[:, None] * columns + c[None, :]
    value = tl.load(x + at, mask=live, other=0.0).to(tl.float32) * (most / found)
    value = tl.where(value > most, most, tl.where(value < -most, -most, value))
    number = value.to(numbers.dtype.element_ty)
    if ROWS:
        tl.store(numbers + at, number, mask=live)
    if COLUMNS:
        live = (c < columns)[:, None] & (r < padded)[None, :]
        tl.store(transposed + c[:, None] * padded + r[None, :], tl.trans(number), mask=live)
    if program == 0:
        tl.store(unit, found / most)


def cast(
    matrix_RC: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool, largest: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(numbers [R, C], numbers transposed and padded [C, P], unit 0-dim in fp32, `largest`). Of the first two, one that
    is not asked for is empty. `largest`: where `raise_largest` has left the largest value, if a kernel has."""
    matrix_RC = matrix_RC.contiguous()
    count, width = matrix_RC.shape
    padded = triton.cdiv(count, FLOAT8_MULTIPLE) * FLOAT8_MULTIPLE
    device = matrix_RC.device
    numbers_RC = torch.empty((count, width) if rows else (0, 0), dtype=dtype, device=device)
    transposed_CP = torch.empty((width, padded) if columns else (0, 0), dtype=dtype, device=device)
    unit = torch.empty((), dtype=torch.float32, device=device)
    if largest is None:
        largest = torch.zeros((), dtype=torch.int32, device=device)
        _largest_kernel[(triton.cdiv(matrix_RC.numel(), BLOCK * STEPS),)](
            matrix_RC, largest, matrix_RC.numel(), BLOCK=BLOCK, STEPS=STEPS, num_warps=WARPS
        )
    _cast_kernel[(triton.cdiv(count, TILE) * triton.cdiv(width, TILE),)](
        matrix_RC, largest, numbers_RC, transposed_CP, unit, count, width, padded, torch.finfo(dtype).max, SMALLEST,
        ROWS=rows, COLUMNS=columns, TILE=TILE, num_warps=TILE_WARPS,
    )  # fmt: skip
    return numbers_RC, transposed_CP, unit, largest
