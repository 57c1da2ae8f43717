"""The Triton kernels of SwiGLU and RoPE: against float64 and their reference implementations, in the interpreter and on
GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.tiled_mlp import add_mlp_in
from engine.measurement import relative_error
from engine.models.decoder import MLP
from engine.ops.elementwise import rotate, swiglu, swiglu_again
from engine.rope import rotary_tables
from engine.shape import ModelShape
from tests.engine.interpreter import in_the_interpreter, interpret
from tests.engine.ops.elementwise_program import faults, plain_swiglu, truth_of, with_gradients

FFN = 14336  # Llama-3-8B's MLP width
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def skip_without(gib: int) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"{free:.0f} GiB of GPU memory are free, {gib} are needed")


@in_the_interpreter
def test_the_kernels_equal_float64_in_tritons_interpreter() -> None:
    done = interpret("ops.elementwise_program")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@needs_gpu
def test_the_kernels_equal_float64_on_a_gpu() -> None:
    assert faults("cuda") == []


def all_rows_equal(tensor_TF: Tensor, row_1F: Tensor) -> bool:
    return all(torch.equal(part_TF, row_1F.expand_as(part_TF)) for part_TF in tensor_TF.split(8192))


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_swiglu_is_no_further_from_float64_than_torchs_operations(dtype: torch.dtype) -> None:
    skip_without(12)
    torch.manual_seed(0)
    gate, up, dhidden = (on_gpu(2049, FFN, dtype=dtype) for _ in range(3))
    truth = truth_of(plain_swiglu, (gate, up), dhidden)
    plain = with_gradients(plain_swiglu, (gate, up), dhidden)
    found = with_gradients(swiglu, (gate, up), dhidden)
    again = swiglu_again(dhidden, gate, up)
    assert torch.equal(found[0], again[0])
    for result in (found, again):
        for tensor, own_kind, exact in zip(result, plain, truth, strict=True):
            # fp32 leaves a few roundings of its exponential and quotient either way.
            assert relative_error(tensor, exact) <= 1.01 * relative_error(own_kind, exact) + 5e-7


@pytest.mark.gpu
@needs_gpu
def test_swiglu_reaches_elements_beyond_32_bits() -> None:
    skip_without(24)
    tokens = (1 << 31) // FFN + 1001  # over 2^31 elements; 2^32 bytes are passed as well
    torch.manual_seed(0)
    row = {name: on_gpu(1, FFN) for name in ("dhidden", "gate", "up")}
    dhidden, gate, up = (tensor.repeat(tokens, 1) for tensor in row.values())
    # All rows are alike, and 2^31 is no multiple of their length: an address that has lost a bit shows.
    assert all_rows_equal(swiglu(gate, up), swiglu(row["gate"], row["up"]))
    expected = swiglu_again(**{name: tensor.clone() for name, tensor in row.items()})
    for found, one in zip(swiglu_again(dhidden, gate, up), expected, strict=True):
        assert all_rows_equal(found, one)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_a_rotation_rounds_its_result_and_nothing_else(head_dim: int) -> None:
    skip_without(12)
    torch.manual_seed(0)
    positions = torch.arange(16384, device="cuda") * 61
    x, gradient = (on_gpu(1, 16384, 32, head_dim) for _ in range(2))
    exact_angles = rotary_tables(positions, head_dim, 500_000.0, torch.float64)
    angles = rotary_tables(positions, head_dim, 500_000.0, torch.float32)
    truth = truth_of(lambda x: rotate(x, exact_angles), (x,), gradient)
    found = with_gradients(lambda x: rotate(x, angles), (x,), gradient)
    for tensor, exact in zip(found, truth, strict=True):
        assert relative_error(tensor, exact) <= 1.01 * relative_error(exact.to(tensor.dtype), exact)


@pytest.mark.gpu
@needs_gpu
def test_a_rotation_reaches_elements_beyond_32_bits() -> None:
    skip_without(24)
    heads, head_dim = 32, 128
    tokens = (1 << 31) // (heads * head_dim) + 1001
    torch.manual_seed(0)
    angles = rotary_tables(torch.arange(tokens, device="cuda"), head_dim, 500_000.0, torch.float32)
    token = on_gpu(1, 1, heads, head_dim)
    out = rotate(token.repeat(1, tokens, 1, 1), angles)
    for first in (0, tokens // 2, tokens - 2000):
        part = slice(first, first + 1000)
        expected = rotate(token.repeat(1, 1000, 1, 1), (angles[0][part], angles[1][part]))
        assert torch.equal(out[:, part], expected)
    expected = rotate(token.repeat(1, 1000, 1, 1), (angles[0][-1000:], angles[1][-1000:]))
    assert torch.equal(out[:, -1000:], expected)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tiles", [1, 3])
def test_an_mlp_in_bf16_is_as_close_to_float64_as_torchs_operations(tiles: int) -> None:
    shape = ModelShape(name="wide", layers=1, hidden=256, ffn=768, heads=2, kv_heads=1, head_dim=128, vocab=61)

    def plain(norm: nn.RMSNorm, mlp: MLP, x_BLE: Tensor) -> Tensor:
        normed_BLE = norm(x_BLE)
        return x_BLE + mlp.down(F.silu(mlp.gate(normed_BLE)) * mlp.up(normed_BLE))

    def branch(add, dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(0)
        norm, mlp = nn.RMSNorm(shape.hidden, eps=1e-5), MLP(shape)
        x_BLE, gradient_BLE = (torch.randn(2, 501, shape.hidden).bfloat16().to("cuda", dtype) for _ in range(2))
        norm, mlp = (module.bfloat16().to("cuda", dtype) for module in (norm, mlp))
        leaves = (x_BLE.requires_grad_(), norm.weight, *mlp.parameters())
        out_BLE = add(norm, mlp, x_BLE)
        return [out_BLE.detach(), *torch.autograd.grad(out_BLE, leaves, gradient_BLE)]

    truth, own_kind = branch(plain, torch.float64), branch(plain, torch.bfloat16)
    found = branch(add_mlp_in(tiles), torch.bfloat16)
    for tensor, other, exact in zip(found, own_kind, truth, strict=True):
        assert relative_error(tensor, exact) <= 1.25 * relative_error(other, exact) + 1e-4


@pytest.mark.gpu
@needs_gpu
def test_the_backward_of_a_run_holds_three_intermediates() -> None:
    tokens, hidden, tiles = 16384, 256, 2
    shape = ModelShape(name="wide", layers=1, hidden=hidden, ffn=FFN, heads=2, kv_heads=1, head_dim=128, vocab=61)
    norm, mlp = (module.to("cuda", torch.bfloat16) for module in (nn.RMSNorm(hidden, eps=1e-5), MLP(shape)))
    x_BLE, gradient_BLE = on_gpu(1, tokens, hidden).requires_grad_(), on_gpu(1, tokens, hidden)
    for _ in range(2):  # compiled, and the matmuls' workspaces are there
        out_BLE = add_mlp_in(tiles)(norm, mlp, x_BLE)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out_BLE, [x_BLE, norm.weight, *mlp.parameters()], gradient_BLE)
    intermediate = 2 * tokens // tiles * FFN
    weights = 3 * hidden * FFN * (4 + 2)
    assert torch.cuda.max_memory_allocated() - before < 3.5 * intermediate + weights + 8 * 2 * tokens * hidden
