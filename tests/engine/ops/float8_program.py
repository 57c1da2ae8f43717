"""Hold the Triton kernels of float8 against their reference implementation: `python -m tests.engine.ops.float8_program
[cpu|cuda]`.

A program of its own because Triton reads TRITON_INTERPRET, which runs kernels on the CPU, when it is first imported.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.ops import float8_triton
from engine.ops.float8 import GRADIENTS, SMALLEST, VALUES, cast_by_torch

# One row, tokens that no 16 divides, more than one tile in each direction, more than one program of the largest value.
SHAPES = ((1, 16), (37, 48), (128, 128), (300, 272))
LAYOUTS = ((True, True), (True, False), (False, True))


def values_of(shape: tuple[int, int], device: str) -> Tensor:
    """Over 40 octaves, so that subnormal numbers and zeros are among the results."""
    generator = torch.Generator().manual_seed(shape[0])
    spread = torch.exp2(-40 * torch.rand(shape, generator=generator))
    found = (torch.randn(shape, generator=generator) * spread).bfloat16()
    found[0, 0] = 5.28125  # the largest; then no value of bf16 is halfway between two numbers of the formats
    return found.to(device)


def same(found: Tensor, expected: Tensor, dtype: torch.dtype, exact: bool) -> bool:
    """Bit for bit on a GPU. Triton's interpreter loses the carry of a mantissa that rounds up to the next power of two,
    and rounds subnormal numbers otherwise."""
    if found.shape != expected.shape or found.dtype != dtype:
        return False
    found, expected = found.float(), expected.float()
    if exact:
        return torch.equal(found, expected)
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    near = (found == expected) | (2 * found == expected) | ((found - expected).abs() <= 2 * eps * tiny)
    return bool(near.all()) and (found != expected).sum().item() < 4 + 0.1 * found.numel()


def cast_faults(device: str) -> Iterator[str]:
    for dtype, shape, (rows, columns) in itertools.product((VALUES, GRADIENTS), SHAPES, LAYOUTS):
        matrix = values_of(shape, device)
        for name, given in (("whole", matrix), ("strided", matrix.T.contiguous().T)):
            found = float8_triton.cast(given, dtype, rows=rows, columns=columns)
            expected = cast_by_torch(given, dtype, rows=True, columns=True)
            case = f"{dtype} {shape} {name}, rows {rows}, columns {columns}"
            if not math.isclose(found[2].item(), expected[2].item(), rel_tol=1e-6):
                yield f"{case}: unit {found[2].item()}, expected {expected[2].item()}"
            for asked, own, other in zip((rows, columns), found[:2], expected[:2], strict=True):
                if asked and not same(own, other, dtype, exact=device == "cuda"):
                    yield f"{case}: other numbers"


def edge_faults(device: str) -> Iterator[str]:
    """Zeros, numbers too small for a scale, and what is no number."""
    zeros = torch.zeros(32, 48, dtype=torch.bfloat16, device=device)
    for dtype, fill in itertools.product((VALUES, GRADIENTS), (0.0, SMALLEST / 4)):
        numbers, transposed, unit = float8_triton.cast(zeros + fill, dtype, rows=True, columns=True)
        if not (0 < unit.item() < 1e-20 and numbers.float().isfinite().all() and transposed.float().isfinite().all()):
            yield f"{dtype} of {fill}: unit {unit.item()}, numbers up to {numbers.float().abs().max().item()}"
    for dtype, fill in itertools.product((VALUES, GRADIENTS), (math.nan, -math.nan, math.inf, -math.inf)):
        matrix = zeros + 1
        matrix[3, 5] = fill
        numbers, transposed, unit = float8_triton.cast(matrix, dtype, rows=True, columns=True)
        sums = (numbers.float().sum(), transposed.float().sum())
        if unit.isfinite() or any((each * unit).isfinite() for each in sums):
            yield f"{dtype} with {fill}: unit {unit.item()}, and products that are finite"


def faults(device: str) -> list[str]:
    """One line for each case in which the kernels differ from torch's operations."""
    return [*cast_faults(device), *edge_faults(device)]


if __name__ == "__main__":
    lines = faults(sys.argv[1])
    print("\n".join(lines) or "no fault")
    sys.exit(bool(lines))
