"""Products in float8: no further from float64 than the two formats round, whatever the values and the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.tiled_mlp import add_mlp_in
from engine.layers.tiled_projection import project_in
from engine.measurement import relative_error
from engine.models.decoder import MLP, Attention, add_whole_mlp, project_whole
from engine.models.matrices import Linear
from engine.ops.copies import Copies
from engine.ops.float8 import GRADIENTS, SMALLEST, VALUES, Float8Products, gpu_unsupported_reason
from engine.ops.norm import RMSNorm
from engine.rope import rotary_tables
from engine.shape import ModelShape
from tests.engine.interpreter import in_the_interpreter, interpret

FLOAT8 = Float8Products()
# The root of the mean square of an error that is evenly spread up to half a step of the mantissa: 3 bits, and 2.
ROUNDED = {VALUES: 2**-4 / math.sqrt(3), GRADIENTS: 2**-3 / math.sqrt(3)}
OF_VALUES = math.hypot(ROUNDED[VALUES], ROUNDED[VALUES])  # of a product of two matrices, whose errors are independent
OF_GRADIENTS = math.hypot(ROUNDED[VALUES], ROUNDED[GRADIENTS])
BF16 = 2**-9  # and of the result
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def normal(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16().to(device)


def products_of(x_TI: Tensor, matrix_OI: Tensor, dout_TO: Tensor) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Of every product what float8 gives, what float64 does, and the error that is allowed."""
    x, matrix = FLOAT8.operand(x_TI, columns=True), FLOAT8.operand(matrix_OI, columns=True)
    dout = FLOAT8.operand(dout_TO, columns=True, gradient=True)
    exact_x, exact_matrix, exact_dout = x_TI.double(), matrix_OI.double(), dout_TO.double()
    added = normal(*matrix_OI.shape, seed=9, device=x_TI.device.type).float()
    total = added.clone()
    dx_TI = FLOAT8.input_gradient(dout, matrix)
    FLOAT8.add_weight_gradient(total, dout, x)
    return {
        "output": (FLOAT8.output(x, matrix), exact_x @ exact_matrix.T, OF_VALUES + BF16),
        "input": (dx_TI, exact_dout @ exact_matrix, OF_GRADIENTS + BF16),
        "input, added": (
            FLOAT8.input_gradient(dout, matrix, dx_TI.clone()),
            2 * exact_dout @ exact_matrix,
            OF_GRADIENTS + BF16,
        ),
        "matrix": (FLOAT8.weight_gradient(dout, x, torch.float32), exact_dout.T @ exact_x, OF_GRADIENTS),
        "sum": (total - added, exact_dout.T @ exact_x, OF_GRADIENTS + 1e-3),
    }


def check_products(device: str) -> None:
    for tokens in (1, 37, 256):  # whatever 16 divides
        for scale in (1.0, 2.0**-60, 2.0**60):
            x_TI, matrix_OI = normal(tokens, 64, device=device) * scale, normal(96, 64, seed=1, device=device)
            found = products_of(x_TI, matrix_OI, normal(tokens, 96, seed=2, device=device) / scale)
            for name, (own, exact, allowed) in found.items():
                assert relative_error(own, exact) <= allowed, (name, tokens, scale)
                assert relative_error(own, exact) > allowed / 4, "not formed in float8"
                assert own.dtype == (torch.float32 if name in ("matrix", "sum") else torch.bfloat16)


def test_products_are_as_near_to_float64_as_their_formats_round() -> None:
    check_products("cpu")


@pytest.mark.gpu
@needs_gpu
def test_products_are_as_near_to_float64_on_a_gpu() -> None:
    if (reason := gpu_unsupported_reason()) is not None:
        pytest.skip(reason)
    check_products("cuda")


@in_the_interpreter
def test_the_kernels_equal_torch_in_tritons_interpreter() -> None:
    done = interpret("ops.float8_program")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@needs_gpu
def test_the_kernels_equal_torch_on_a_gpu() -> None:
    from tests.engine.ops.float8_program import faults

    assert faults("cuda") == []


@pytest.mark.parametrize("fill", [0.0, SMALLEST / 4])
def test_zeros_and_what_is_too_small_for_a_scale_stay_finite(fill: float) -> None:
    zeros_TI = torch.full((20, 64), fill, dtype=torch.bfloat16)
    for own, exact, _ in products_of(zeros_TI, normal(96, 64), normal(20, 96)).values():
        if exact.abs().max() < 1e-20:
            assert own.abs().max() < 1e-20


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_makes_every_product_nan(fill: float) -> None:
    x_TI = normal(20, 64)
    x_TI[3, 5] = fill
    found = products_of(x_TI, normal(96, 64), normal(20, 96))
    assert all(found[name][0].isnan().all() for name in ("output", "matrix", "sum"))


def in_float8(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, Linear):
            part.products = FLOAT8


def layer_parts(
    in_numbers: Callable[[nn.Module], None], tiles: int, copied: bool, dtype: torch.dtype, gated: bool = True
) -> list[Tensor]:
    """Outputs of the projections and of the MLP of a small layer, then all gradients. `tiles` 0: by torch's graph."""
    shape = ModelShape(
        name="small", layers=1, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=61, qk_norm=True, gated=gated
    )
    torch.manual_seed(0)
    norm, attention, mlp = RMSNorm(64, eps=1e-5), Attention(shape), MLP(shape)
    parts = nn.ModuleList([norm, attention, mlp]).to(torch.bfloat16).to(dtype)  # values that bf16 has
    in_numbers(parts)
    if copied:
        parts.float()
        kept = Copies([*parts.parameters()], torch.bfloat16)
        kept.refresh()
    x_BLE = normal(2, 19, 64, seed=1).to(dtype).requires_grad_()
    rotary = rotary_tables(torch.arange(19), 16, 1e4, torch.float32 if dtype == torch.bfloat16 else dtype)
    project = project_whole if not tiles else project_in(tiles, recomputed=False)
    add_mlp = add_whole_mlp if not tiles else add_mlp_in(tiles, 0.5)
    *qkv, x_again_BLE = project(norm, attention, x_BLE, rotary)
    outs = [*qkv, attention.output(qkv[0].flatten(-2)), add_mlp(norm, mlp, x_again_BLE)]
    leaves = [x_BLE, *(each for each in parts.parameters())]
    weights = [normal(*out.shape, seed=seed).to(dtype) for seed, out in enumerate(outs)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, weights)]


@pytest.mark.parametrize("copied", [False, True], ids=["gathered", "copied"])
@pytest.mark.parametrize(("tiles", "gated"), [(0, True), (1, True), (3, True), (3, False)])
def test_the_parts_of_a_layer_and_their_gradients_are_as_near(tiles: int, gated: bool, copied: bool) -> None:
    truth = layer_parts(lambda _: None, 0, False, torch.float64, gated)
    plain = layer_parts(lambda _: None, tiles, copied, torch.bfloat16, gated)
    found = layer_parts(in_float8, tiles, copied, torch.bfloat16, gated)
    for place, (own, other, exact) in enumerate(zip(found, plain, truth, strict=True)):
        assert own.dtype == other.dtype
        # Gradients pass three products in a row at most: down, up and gate, each with two operands that were rounded.
        assert relative_error(own, exact) <= relative_error(other, exact) + math.sqrt(3) * OF_GRADIENTS, place
    assert max(relative_error(own, exact) for own, exact in zip(found, truth, strict=True)) > OF_VALUES / 2


def test_tiles_of_all_tokens_form_the_same_bits_as_the_whole() -> None:
    """So a recomputation in one of the two ways repeats the other."""
    whole, tiled = (layer_parts(in_float8, tiles, False, torch.bfloat16)[:5] for tiles in (0, 1))
    for own, other in zip(whole[:4], tiled[:4], strict=True):
        assert torch.equal(own, other)


def test_biases_and_frozen_inputs_pass_by_float8() -> None:
    linear = Linear(64, 32, bias=True).bfloat16()
    linear.products = FLOAT8
    x = normal(3, 5, 64)
    out = linear(x)
    out.sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((32,), 15.0, dtype=torch.bfloat16))
    exact = F.linear(x.double(), linear.weight.double(), linear.bias.double())
    assert relative_error(out, exact) <= OF_VALUES + BF16
