"""Hold the Triton kernels of float8, and what SwiGLU's tell them, against their reference implementation: `python -m
tests.engine.ops.float8_program [cpu|cuda]`.

A program of its own because Triton reads TRITON_INTERPRET, which runs kernels on the CPU, when it is first imported.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engine.layers.tiled_mlp import add_mlp_in
from engine.measurement import relative_error
from engine.models.decoder import MLP
from engine.ops import elementwise, elementwise_triton, float8, float8_triton, norm, norm_triton
from engine.ops.float8 import GRADIENTS, SMALLEST, VALUES, Float8Products, cast_by_torch
from engine.ops.norm import RMSNorm
from engine.ops.products import Operand
from engine.shape import ModelShape

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
            expected = cast_by_torch(given, dtype)
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
        numbers, transposed, unit, _ = float8_triton.cast(zeros + fill, dtype, rows=True, columns=True)
        if not (0 < unit.item() < 1e-20 and numbers.float().isfinite().all() and transposed.float().isfinite().all()):
            yield f"{dtype} of {fill}: unit {unit.item()}, numbers up to {numbers.float().abs().max().item()}"
    for dtype, fill in itertools.product((VALUES, GRADIENTS), (math.nan, -math.nan, math.inf, -math.inf)):
        matrix = zeros + 1
        matrix[3, 5] = fill
        numbers, transposed, unit, _ = float8_triton.cast(matrix, dtype, rows=True, columns=True)
        sums = (numbers.float().sum(), transposed.float().sum())
        if unit.isfinite() or any((each * unit).isfinite() for each in sums):
            yield f"{dtype} with {fill}: unit {unit.item()}, and products that are finite"


def swiglu_faults(device: str) -> Iterator[str]:
    """SwiGLU's forward leaves the largest value of what it writes, of one program or several; its gradients as numbers
    are the casts of those in bf16."""
    for shape, fill in itertools.product(((3, 16), (5, 704), (130, 128)), (1.0, math.nan, -math.inf)):
        gate, up, dhidden = (values_of(shape, device) + at for at in range(3))
        gate[1, 2] = up[1, 2] = fill
        [largest] = torch.zeros(1, dtype=torch.int32, device=device)
        hidden = elementwise_triton.swiglu(gate, up, largest).abs().amax().float()
        if not torch.equal(largest.view(torch.float32).nan_to_num(-1), hidden.nan_to_num(-1)):
            yield f"hidden {shape} with {fill}: {largest.view(torch.float32)}, expected {hidden}"
        numbers = float8_triton.swiglu_again(dhidden, gate, up, VALUES, GRADIENTS)
        exact = elementwise_triton.swiglu_again(dhidden, gate, up, saved=True)
        for name, dtype, found, plain in zip(
            ("hidden", "dgate", "dup"), (VALUES, GRADIENTS, GRADIENTS), numbers, exact, strict=True
        ):
            expected = float8_triton.cast(plain, dtype, rows=True, columns=True)
            for place, (own, other) in enumerate(zip(found[:3], expected[:3], strict=True)):
                same = own.shape == other.shape and torch.equal(
                    own.float().nan_to_num(-1), other.float().nan_to_num(-1)
                )
                if own.numel() and not same:
                    yield f"{name} {shape} with {fill}: another result {place}"


def norm_faults(device: str) -> Iterator[str]:
    """Norms as numbers are the casts of those in bf16, of a sum as well, and a second time by columns."""
    for shape in ((1, 16), (37, 48), (130, 272)):
        x, branch = (values_of(shape, device) + 0.1 * at for at in range(2))
        weight = torch.linspace(0.5, 2, shape[1], device=device).bfloat16()
        total, stored = torch.empty_like(x), torch.empty_like(x)
        plain = {None: norm_triton.add_norm(x, torch.zeros_like(x), weight, 1e-5, stored)}
        plain["sum"] = norm_triton.add_norm(x, branch, weight, 1e-5, stored)
        for name, exact in plain.items():
            added = {} if name is None else {"added": (branch, total)}
            first = float8_triton.norm(x, weight, 1e-5, VALUES, **added)
            again = float8_triton.norm(total if added else x, weight, 1e-5, VALUES, columns=True, known=first[3])
            expected = float8_triton.cast(exact, VALUES, rows=True, columns=True)
            pairs = ((first[0], expected[0]), (again[0], expected[0]), (again[1], expected[1]), (again[2], expected[2]))
            for place, (own, other) in enumerate(pairs):
                if not torch.equal(own.float(), other.float()):
                    yield f"norm of {shape}, {name}: another result {place}"
        if not torch.equal(total, stored):
            yield f"norm of {shape}: another sum"


class Checked(Float8Products):
    """Products that note operands for which something is known that is not their own."""

    wrong = 0

    def operand(self, matrix_RC: Tensor, *, known: tuple[Tensor, ...] = (), **asked: Any) -> Operand:
        found = super().operand(matrix_RC, known=known, **asked)
        self.wrong += not torch.equal(found.unit, super().operand(matrix_RC, **asked).unit)
        return found

    def normed(self, x_TE: Tensor, *norm: Any, known: tuple[Tensor, ...] = (), **asked: Any) -> Operand:
        found = super().normed(x_TE, *norm, known=known, **asked)
        own = super().normed(x_TE, *norm, **asked)
        self.wrong += not all(map(torch.equal, (found.unit, *found.known), (own.unit, *own.known)))
        return found


def mlp(device: str, products: Float8Products) -> list[Tensor]:
    """Output and gradients of a tiled MLP in float8, some of whose products are saved."""
    shape = ModelShape(name="small", layers=1, hidden=64, ffn=96, heads=4, kv_heads=4, head_dim=16, vocab=61)
    torch.manual_seed(0)
    norm, part = RMSNorm(64, eps=1e-5), MLP(shape)
    for matrix in (part.up, part.gate, part.down):
        matrix.products = products
    norm, part = norm.to(device, torch.bfloat16), part.to(device, torch.bfloat16)
    x_BLE = torch.randn(2, 37, 64).bfloat16().to(device).requires_grad_()
    out_BLE = add_mlp_in(3, 0.5)(norm, part, x_BLE) - x_BLE
    weights = torch.randn(2, 37, 64).bfloat16().to(device)
    gradients = torch.autograd.grad(out_BLE, [x_BLE, *part.parameters()], weights)
    return [each.detach().cpu() for each in (out_BLE, *gradients)]


def mlp_faults(device: str) -> Iterator[str]:
    """A layer's part by all kernels, against the same in torch. What Triton's interpreter rounds otherwise adds up."""
    expected = mlp("cpu", Float8Products())
    if device == "cpu":
        for module in (float8, elementwise, norm):
            module.kernels_for = lambda _, name: importlib.import_module(name)
    allowed = 0.02 if device == "cuda" else 0.25
    checked = Checked()
    for place, (own, other) in enumerate(zip(mlp(device, checked), expected, strict=True)):
        if not relative_error(own, other) <= allowed:
            yield f"MLP in float8, tensor {place}: {relative_error(own, other):.2g}"
    if checked.wrong:
        yield f"MLP in float8: {checked.wrong} operands know something of another"


def faults(device: str) -> list[str]:
    """One line for each case in which the kernels differ from torch's operations."""
    return [
        *cast_faults(device),
        *edge_faults(device),
        *swiglu_faults(device),
        *norm_faults(device),
        *mlp_faults(device),
    ]


if __name__ == "__main__":
    lines = faults(sys.argv[1])
    print("\n".join(lines) or "no fault")
    sys.exit(bool(lines))
