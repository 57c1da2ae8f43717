"""SwiGLU's product and RoPE on a CPU: the reference implementations, bit for bit equal to autograd of the plain
formulas."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.autograd import kernels_for
from engine.ops.elementwise import KERNELS, rotate, swiglu, swiglu_again
from engine.rope import rotary_tables

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_and_its_gradients_are_those_of_the_plain_formula_bit_for_bit(dtype: torch.dtype) -> None:
    gate, up, dhidden = (3 * normal(5, 37, seed=seed, dtype=dtype) for seed in range(3))
    inputs = (gate.requires_grad_(), up.requires_grad_())
    expected = [plain(*inputs), *torch.autograd.grad(plain(*inputs), inputs, dhidden)]
    found = [swiglu(*inputs), *torch.autograd.grad(swiglu(*inputs), inputs, dhidden)]
    with torch.no_grad():
        again = swiglu_again(dhidden.clone(), gate.clone(), up.clone())
    for result in (found, again):
        assert [torch.equal(*pair) for pair in zip(result, expected, strict=True)] == [True] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_a_rotation_turns_back(dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    rotary = rotary_tables(torch.arange(70_000, 70_009), 12, 10000.0, wide)
    x = normal(2, 9, 3, 12, seed=0, dtype=dtype).requires_grad_()
    rotated = rotate(x, rotary)
    (back,) = torch.autograd.grad(rotated, x, rotated.detach())
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(back, x.detach(), rtol=tolerance, atol=tolerance)
    assert not torch.allclose(rotated, x, atol=0.1)


@pytest.mark.parametrize("layout", ["heads first", "every other entry"])
def test_a_rotation_reads_any_strides(layout: str) -> None:
    rotary = rotary_tables(torch.arange(5), 8, 100.0, torch.float32)
    x = normal(2, 5, 3, 8, seed=0, dtype=torch.float32)
    laid = x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every other entry":
        laid = x.repeat_interleave(2, -1)[..., ::2]
    assert not laid.is_contiguous()
    assert torch.equal(rotate(laid, rotary), rotate(x, rotary))


def test_second_derivatives_are_those_of_the_formulas() -> None:
    gate, up = (normal(2, 3, seed=seed, dtype=torch.float64).requires_grad_() for seed in range(2))
    assert torch.autograd.gradgradcheck(swiglu, (gate, up))
    rotary = rotary_tables(torch.arange(3), 4, 100.0, torch.float64)
    x = normal(1, 3, 2, 4, seed=0, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, rotary), x)


def test_no_kernel_takes_tensors_of_a_cpu_or_of_float64() -> None:
    assert [kernels_for(torch.empty(1, dtype=dtype), KERNELS) for dtype in DTYPES] == [None] * 3
    assert kernels_for(types.SimpleNamespace(is_cuda=True, dtype=torch.float64), KERNELS) is None
