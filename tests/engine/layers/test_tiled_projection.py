"""Tiled projections: same numbers, one run's intermediates, and the input alone kept."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.checkpoint.recompute import set_activations
from engine.layers.tiled_projection import project_in
from engine.measurement import relative_errors
from engine.models.decoder import Attention, Decoder, Project, project_whole
from engine.ops.elementwise import rotate, rotate_into
from engine.ops.norm import RMSNorm
from engine.rope import rotary_tables
from engine.settings import Checkpoint
from engine.shape import ModelShape

SHAPE = ModelShape(name="small", layers=2, hidden=12, ffn=20, heads=4, kv_heads=2, head_dim=6, vocab=61)
NORMED = dataclasses.replace(SHAPE, name="normed", qk_norm=True)
SEQUENCES, TOKENS = 2, 11


def randomised(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)


def projected(
    shape: ModelShape, project: Project, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> list[Tensor]:
    """Queries, keys, values and the residual stream, then the gradients of input, norms and matrices."""
    torch.manual_seed(0)
    norm, attention = RMSNorm(shape.hidden, eps=1e-5), Attention(shape)
    randomised(norm), randomised(attention)
    norm, attention = norm.to(device, dtype), attention.to(device, dtype)
    x_BLE = torch.randn(SEQUENCES, TOKENS, shape.hidden).to(device, dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    rotary = rotary_tables(torch.arange(50, 50 + TOKENS, device=device), shape.head_dim, 100.0, wide)
    outs = project(norm, attention, x_BLE, rotary)
    sum((out * torch.randn(out.shape).to(device, dtype)).sum() for out in outs).backward()
    weights = (*norm.parameters(), *(weight for name, weight in attention.named_parameters() if "output" not in name))
    return [*(out.detach() for out in outs), x_BLE.grad, *(weight.grad for weight in weights)]


@pytest.mark.parametrize("shape", [SHAPE, NORMED], ids=lambda shape: shape.name)
@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 22, 1000])
def test_any_number_of_tiles_gives_the_outputs_and_gradients_of_the_whole(shape: ModelShape, tiles: int) -> None:
    found, expected = projected(shape, project_in(tiles)), projected(shape, project_whole)
    assert len(found) == (11 if shape.qk_norm else 9)
    assert all(tensor.abs().max() > 0.1 for tensor in expected)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def bf16_is_close_to_float64(shape: ModelShape, device: str) -> None:
    truth = projected(shape, project_whole)

    def mean_error(found: list[Tensor]) -> float:
        errors = relative_errors([tensor.cpu() for tensor in found], truth)
        return sum(errors) / len(errors)

    whole = mean_error(projected(shape, project_whole, torch.bfloat16, device))
    assert 1e-3 < whole < 1e-2
    for tiles in (3, 22):
        assert mean_error(projected(shape, project_in(tiles), torch.bfloat16, device)) < 1.25 * whole


@pytest.mark.parametrize("shape", [SHAPE, NORMED], ids=lambda shape: shape.name)
def test_tiles_in_bf16_are_as_close_to_float64_as_the_whole(shape: ModelShape) -> None:
    bf16_is_close_to_float64(shape, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: runs its kernels")
@pytest.mark.parametrize("shape", [SHAPE, NORMED], ids=lambda shape: shape.name)
def test_tiles_on_a_gpu_are_as_close_to_float64_as_the_whole(shape: ModelShape) -> None:
    bf16_is_close_to_float64(shape, "cuda")


def test_one_projection_may_go_without_a_gradient() -> None:
    torch.manual_seed(0)
    norm, attention = RMSNorm(SHAPE.hidden), Attention(SHAPE)
    x_BLE = torch.randn(1, TOKENS, SHAPE.hidden)
    rotary = rotary_tables(torch.arange(TOKENS), SHAPE.head_dim, 100.0, torch.float32)
    gradients = []
    for project in (project_in(3), project_whole):
        attention.zero_grad()
        project(norm, attention, x_BLE, rotary)[2].sum().backward()  # values alone
        gradients.append((attention.v.weight.grad.clone(), norm.weight.grad.clone()))
        norm.zero_grad()
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_into_given_memory_is_the_rotation(inverse: bool) -> None:
    torch.manual_seed(0)
    x_TND = torch.randn(5, 3, 8)
    rotary = rotary_tables(torch.arange(7, 12), 8, 100.0, torch.float32)
    out_TND = torch.empty_like(x_TND)
    rotate_into(out_TND, x_TND, rotary, inverse=inverse)
    turned = (rotary[0], -rotary[1]) if inverse else rotary
    assert torch.equal(out_TND, rotate(x_TND[None], turned)[0])


class Products(TorchDispatchMode):
    """Tokens of the widest product with the three matrices, whose result is new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.widest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = func is torch.ops.aten.mm.default and out.shape[1] == (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim
        if made and args[0].shape[1] == SHAPE.hidden:
            self.widest = max(self.widest, out.shape[0])
        return out


@pytest.mark.parametrize(("tiles", "most"), [(2, 11), (4, 6), (8, 3), (1000, 1)])
def test_a_run_is_in_one_sequence_and_no_longer_than_requested(tiles: int, most: int) -> None:
    with Products() as counted:
        projected(SHAPE, project_in(tiles))
    assert counted.widest == most  # of 22 tokens in two sequences


@pytest.mark.parametrize("shape", [SHAPE, NORMED], ids=lambda shape: shape.name)
def test_no_norm_of_a_run_is_given_more_than_it_can_address(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    most, given = 80, []
    rms_norm = F.rms_norm

    def recorded(x: Tensor, *args: Any) -> Tensor:
        given.append(x.numel())
        return rms_norm(x, *args)

    monkeypatch.setattr("engine.ops.runs.MAX_ELEMENTS", most)
    monkeypatch.setattr(F, "rms_norm", recorded)
    projected(shape, project_in(2))
    assert max(given) == 72  # six tokens of 12 features, or three of four heads of six


def test_only_the_layers_input_is_saved() -> None:
    torch.manual_seed(0)
    norm, attention = RMSNorm(SHAPE.hidden), Attention(SHAPE)
    x_BLE = torch.randn(SEQUENCES, TOKENS, SHAPE.hidden, requires_grad=True)
    rotary = rotary_tables(torch.arange(TOKENS), SHAPE.head_dim, 100.0, torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        project_in(2)(norm, attention, x_BLE, rotary)
    assert len(kept) == 7  # beside it RoPE's two tables and four weights
    assert [tensor is x_BLE for tensor in kept if tensor.shape[0] == SEQUENCES] == [True]


def model_with(tiles: int, checkpoint: Checkpoint, shape: ModelShape) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(shape).double()
    randomised(model)
    for block in model.blocks:
        block.project = project_in(tiles)
    set_activations(checkpoint, list(model.blocks))
    return model


def loss_of(model: Decoder, seed: int) -> Tensor:
    tokens = torch.randint(SHAPE.vocab, (SEQUENCES, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    return model(tokens[:, :-1], torch.arange(TOKENS), tokens[:, 1:])


@pytest.mark.parametrize(
    ("shape", "checkpoint"),
    list(
        itertools.product(
            (SHAPE, NORMED), (Checkpoint(every=0), Checkpoint(every=1), Checkpoint(every=2, offload="all"))
        )
    ),
)
def test_open_forwards_and_repeated_backwards_add_up(shape: ModelShape, checkpoint: Checkpoint) -> None:
    expected = model_with(1, Checkpoint(every=0), shape)
    for seed in (1, 1, 2):
        loss_of(expected, seed).backward()
    model = model_with(3, checkpoint, shape)
    twice, once = loss_of(model, 1), loss_of(model, 2)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, 1), twice.detach(), rtol=1e-12, atol=0)
    twice.backward(retain_graph=True)
    once.backward()
    twice.backward()
    gradients = [[parameter.grad for parameter in each.parameters()] for each in (model, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)
