"""Hold the Triton kernels of SwiGLU and RoPE against float64: `python -m tests.engine.ops.elementwise_program
[cpu|cuda]`.

A program of its own because Triton reads TRITON_INTERPRET, which runs kernels on the CPU, when it is first imported.
There the choice of the kernels is forced on CPU tensors, so that what calls them is run as well.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.tiled_mlp import add_mlp_in
from engine.measurement import NOT_FINITE, relative_error
from engine.models.decoder import MLP, add_whole_mlp
from engine.ops.elementwise import rotate, rotate_into, swiglu, swiglu_again
from engine.ops.norm import add_norm, norm_gradients
from engine.optimizer import OnePassAdamW
from engine.rope import rotary_tables
from engine.shape import ModelShape

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What one rounding explains, twice over: the interpreter cuts bf16 off where a GPU rounds.
ALLOWED = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}
SHAPES = ((1,), (3, 7), (1024,), (2, 5, 333), (0, 8))  # 1024 elements are one block of the kernel
# (batch, tokens, heads, head dim): one head, odd counts, a head dim that is no power of two, more than one block
ROTATIONS = ((1, 1, 1, 2), (2, 5, 3, 6), (1, 37, 5, 96), (2, 19, 8, 128), (1, 9, 2, 80), (1, 0, 2, 8))


def normal(*shape: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator)).to(dtype).to(device)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def with_gradients(function, inputs: tuple[Tensor, ...], gradient: Tensor) -> list[Tensor]:
    """Result and gradients of all inputs."""
    inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]


def truth_of(function, inputs: tuple[Tensor, ...], gradient: Tensor) -> list[Tensor]:
    return with_gradients(function, tuple(tensor.double() for tensor in inputs), gradient.double())


def complaints(name: str, found: list[Tensor], truth: list[Tensor], dtype: torch.dtype) -> Iterator[str]:
    for index, (tensor, exact) in enumerate(zip(found, truth, strict=True)):
        wrong = relative_error(tensor, exact) if tensor.shape == exact.shape else NOT_FINITE
        if tensor.dtype != dtype or not wrong <= ALLOWED[dtype]:
            yield f"{name}, {dtype}, tensor {index}: {tensor.dtype} {tuple(tensor.shape)}, {wrong:.1e}"


def swiglu_faults(device: str) -> Iterator[str]:
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        gate, up, dhidden = (normal(*shape, seed=seed, dtype=dtype, device=device) for seed in range(3))
        truth = truth_of(plain_swiglu, (gate, up), dhidden)
        yield from complaints(f"swiglu {shape}", with_gradients(swiglu, (gate, up), dhidden), truth, dtype)
        apart = [tensor.repeat_interleave(2, -1)[..., ::2] for tensor in (gate, up)]  # without unit stride
        yield from complaints(f"swiglu {shape} apart", with_gradients(swiglu, tuple(apart), dhidden), truth, dtype)
        given = dhidden.clone(), gate.clone(), up.clone()
        yield from complaints(f"swiglu saved {shape}", list(swiglu_again(*given, saved=True)), truth, dtype)
        if not (torch.equal(given[1], gate) and torch.equal(given[2], up)):
            yield f"swiglu saved {shape}, {dtype}: gate or up has changed"
        places = {tensor.data_ptr() for tensor in (dhidden, gate, up)}
        again = swiglu_again(dhidden, gate, up)
        yield from complaints(f"swiglu again {shape}", list(again), truth, dtype)
        if {tensor.data_ptr() for tensor in again} != places:
            yield f"swiglu again {shape}, {dtype}: the results have not taken the arguments' memory"


def extreme_faults(device: str) -> Iterator[str]:
    """Gates at which the sigmoid is 0 or 1 in fp32."""
    gate = torch.tensor([-1e4, -200.0, -90.0, -30.0, 0.0, 30.0, 90.0, 200.0, 1e4], device=device)
    one = torch.ones_like(gate)
    found, truth = with_gradients(swiglu, (gate, one), one), truth_of(plain_swiglu, (gate, one), one)
    for tensor, exact in zip(found, truth, strict=True):
        if not torch.allclose(tensor.double(), exact, rtol=1e-5, atol=1e-9):
            yield f"extreme gates: {tensor.tolist()} for {exact.tolist()}"


def rotary_faults(device: str) -> Iterator[str]:
    for dtype, shape, wide in itertools.product(DTYPES, ROTATIONS, (torch.float32, torch.float64)):
        tokens, head_dim = shape[1], shape[3]
        positions = 1_000_000 + 3 * torch.arange(tokens, device=device)
        exact_angles = rotary_tables(positions, head_dim, 10000.0, torch.float64)
        angles = rotary_tables(positions, head_dim, 10000.0, wide)
        x, gradient = (normal(*shape, seed=seed, dtype=dtype, device=device) for seed in range(2))
        truth = truth_of(lambda x, angles=exact_angles: rotate(x, angles), (x,), gradient)
        layouts = {
            "contiguous": x,
            "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
            "part of a wider row": torch.cat([x, x, x], dim=-1)[..., head_dim : 2 * head_dim],
            "D without unit stride": x.repeat_interleave(2, -1)[..., ::2],
        }
        for name, layout in layouts.items():
            found = with_gradients(lambda x, angles=angles: rotate(x, angles), (layout,), gradient)
            yield from complaints(f"rotate {shape} {name}, {wide}", found, truth, dtype)
            if not found[0].is_contiguous():
                yield f"rotate {shape} {name}: the result is not contiguous"
        for inverse in (False, True):
            into = torch.empty_like(x[0])
            rotate_into(into, layouts["heads first"][0], angles, inverse=inverse)
            turned = (angles[0], -angles[1]) if inverse else angles
            part = torch.empty(tokens, shape[2] + 3, head_dim + 1, dtype=dtype, device=device)[:, 1:-2, :-1]
            rotate_into(part, layouts["heads first"][0], angles, inverse=inverse)
            for name, found in (("given memory", into), ("part of a wider tensor", part)):
                if not torch.equal(found, rotate(x[:1], turned)[0]):
                    yield f"rotate {shape} into {name}, inverse {inverse}, {wide}: not the rotation"
        spread = gradient[:, :, :1].expand(shape)  # a gradient of stride 0
        expected = truth_of(lambda x, angles=exact_angles: rotate(x, angles), (x,), spread)
        found = with_gradients(lambda x, angles=angles: rotate(x, angles), (x,), spread)
        yield from complaints(f"rotate {shape} spread, {wide}", found, expected, dtype)


def second_derivative_faults(device: str) -> Iterator[str]:
    """A gradient that is differentiated again."""
    x, y = (normal(2, 3, 2, 6, seed=seed, dtype=torch.float32, device=device) for seed in range(2))
    rotary = rotary_tables(torch.arange(3, device=device), 6, 100.0, torch.float64)

    def squared_gradients(call, *inputs: Tensor) -> list[Tensor]:
        inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
        gradients = torch.autograd.grad(call(*inputs).square().sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), inputs))

    def rotated(x: Tensor, y: Tensor) -> Tensor:
        return rotate(x, rotary) * y

    for call, plain in ((swiglu, plain_swiglu), (rotated, rotated)):
        found, truth = squared_gradients(call, x, y), squared_gradients(plain, x.double(), y.double())
        yield from (
            f"second derivative of {call.__name__}: {relative_error(tensor, exact):.1e}"
            for tensor, exact in zip(found, truth, strict=True)
            if not relative_error(tensor, exact) <= 1e-4
        )


def norm_faults(device: str) -> Iterator[str]:
    """The norm joined with the sums of the residual stream; one row, odd counts, several rows per program."""
    sizes = ((1, 2), (5, 7), (3, 700), (0, 8), *([(5000, 24), (33, 8192)] if device == "cuda" else []))
    for dtype, (tokens, features) in itertools.product(DTYPES, sizes):
        name = f"norm {tokens} x {features}"
        x, branch, dnormed, residual = (
            normal(tokens, features, seed=seed, dtype=dtype, device=device) for seed in range(4)
        )
        weight = normal(features, seed=4, dtype=dtype, device=device)
        total = torch.empty_like(x)
        normed = add_norm(x, branch, weight, 1e-5, total)
        # What is normed is the sum as it is stored.
        exact = F.rms_norm(total.double(), (features,), weight.double(), 1e-5)
        yield from complaints(f"{name}, sum and norm", [total, normed], [x.double() + branch.double(), exact], dtype)
        leaves = x.double().requires_grad_(), weight.double().requires_grad_()
        truth = torch.autograd.grad(F.rms_norm(leaves[0], (features,), leaves[1], 1e-5), leaves, dnormed.double())
        dx, dweight = norm_gradients(x, weight, 1e-5, dnormed)
        yield from complaints(f"{name}, gradients", [dx], [truth[0]], dtype)
        yield from complaints(f"{name}, gradient of the weight", [dweight], [truth[1]], torch.float32)
        into = torch.empty_like(x)
        norm_gradients(x, weight, 1e-5, dnormed, residual_TE=residual, dx_TE=into)
        yield from complaints(f"{name}, added gradients", [into], [truth[0] + residual.double()], dtype)


def adamw_faults(device: str) -> Iterator[str]:
    """Three updates of one parameter, clipped and copied, against the formulas in float64."""
    rate, (beta1, beta2), epsilon, decay = 1e-2, (0.9, 0.999), 1e-8, 0.1
    for elements, scale in itertools.product((1, 1024, 5000), (None, 0.37)):
        parameter = normal(elements, seed=0, dtype=torch.float32, device=device)
        parameter.copy_in_compute_dtype = torch.empty(elements, dtype=torch.bfloat16, device=device)
        exact, first, second = parameter.double(), 0.0, 0.0
        optimizer = OnePassAdamW(
            [parameter.requires_grad_()], lr=rate, betas=(beta1, beta2), eps=epsilon, weight_decay=decay
        )
        for step in range(1, 4):
            gradient = normal(elements, seed=step, dtype=torch.float32, device=device)
            parameter.grad = gradient.clone()
            optimizer.gradient_scale = None if scale is None else torch.tensor(scale, device=device)
            optimizer.step()
            clipped = gradient.double() * (scale or 1.0)
            first = beta1 * first + (1 - beta1) * clipped
            second = beta2 * second + (1 - beta2) * clipped**2
            exact = exact * (1 - rate * decay)
            exact = exact - rate * (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + epsilon)
        name, state = f"AdamW of {elements} elements, scale {scale}", optimizer.state[parameter]
        found = [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]
        yield from complaints(name, found, [exact, first, second], torch.float32)
        yield from complaints(f"{name}, copy", [parameter.copy_in_compute_dtype], [exact], torch.bfloat16)
        if not torch.equal(parameter.grad, gradient):
            yield f"{name}: the gradient has changed"


def tiled_mlp_faults(device: str) -> Iterator[str]:
    """The tiled MLP, whose backward forms gradients in the intermediates' memory, against the whole in float64."""
    shape = ModelShape(name="small", layers=1, hidden=16, ffn=48, heads=2, kv_heads=1, head_dim=8, vocab=61)
    results = {}
    for tiles, dtype in ((1, torch.float64), (1, torch.float32), (4, torch.float32)):
        torch.manual_seed(0)
        norm, mlp = torch.nn.RMSNorm(shape.hidden, eps=1e-5).to(device, dtype), MLP(shape).to(device, dtype)
        x = normal(2, 11, shape.hidden, seed=1, dtype=torch.float32, device=device).to(dtype).requires_grad_()
        add = add_whole_mlp if tiles == 1 else add_mlp_in(tiles)
        out = add(norm, mlp, x)
        leaves = (x, norm.weight, *mlp.parameters())
        results[tiles, dtype] = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
    for tiles in (1, 4):
        for index, exact in enumerate(results[1, torch.float64]):
            wrong = relative_error(results[tiles, torch.float32][index], exact)
            if not wrong <= 1e-5:
                yield f"MLP in {tiles} tiles, tensor {index}: {wrong:.1e}"


def faults(device: str) -> list[str]:
    """One line for each case in which a result is further from float64 than its dtype explains."""
    parts = (swiglu_faults, extreme_faults, rotary_faults, second_derivative_faults, norm_faults)
    parts += (adamw_faults, tiled_mlp_faults)
    return [line for part in parts for line in part(device)]


def force_kernels() -> None:
    """Give CPU tensors to the kernels, which the interpreter runs."""
    from engine import optimizer
    from engine.ops import elementwise, norm, norm_triton
    from engine.ops.autograd import KERNEL_DTYPES

    def kernels_for(tensor: Tensor, module: str):
        return importlib.import_module(module) if tensor.dtype in KERNEL_DTYPES else None

    norm_triton.PROGRAMS = 2  # so that a few rows are several for each
    for module in (optimizer, norm, elementwise):
        module.kernels_for = kernels_for


if __name__ == "__main__":
    if sys.argv[1] == "cpu":
        force_kernels()
    lines = faults(sys.argv[1])
    print("\n".join(lines) or "no fault")
    sys.exit(bool(lines))
