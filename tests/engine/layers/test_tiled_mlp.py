"""The tiled MLP: same numbers, one run's intermediates, and never computed twice by a layer's recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.algorithms.saved import SavedOutput
from engine.attention.context import ContextParallel
from engine.burst import METHOD
from engine.checkpoint.recompute import set_activations
from engine.layers.tiled_mlp import add_mlp_in
from engine.measurement import relative_errors
from engine.models.decoder import MLP, AddMLP, Decoder, add_whole_mlp
from engine.ops import RECOMPUTE
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape

SHAPE = ModelShape(name="small", layers=2, hidden=12, ffn=20, heads=2, kv_heads=1, head_dim=6, vocab=61)
UNGATED = ModelShape(name="plain", layers=2, hidden=12, ffn=20, heads=2, kv_heads=1, head_dim=6, vocab=61, gated=False)
TOKENS = (2, 11)  # sequences x tokens; 22 tokens in all


def branch(shape: ModelShape, add_mlp: AddMLP, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Output of the residual branch, then the gradients of input, norm and matrices."""
    torch.manual_seed(0)
    norm, mlp = torch.nn.RMSNorm(shape.hidden, eps=1e-5), MLP(shape)
    torch.nn.init.normal_(norm.weight, 1.0, 0.1)
    norm, mlp = norm.to(dtype), mlp.to(dtype)
    x_BLE = torch.randn(*TOKENS, shape.hidden).to(dtype).requires_grad_()
    weight_BLE = torch.randn(*TOKENS, shape.hidden).to(dtype)
    out_BLE = add_mlp(norm, mlp, x_BLE)
    (out_BLE * weight_BLE).sum().backward()
    return [out_BLE.detach(), *(leaf.grad for leaf in (x_BLE, norm.weight, *mlp.parameters()))]


@pytest.mark.parametrize("shape", [SHAPE, UNGATED], ids=lambda shape: shape.name)
@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 22, 1000])
def test_any_number_of_tiles_gives_the_output_and_gradients_of_the_whole(shape: ModelShape, tiles: int) -> None:
    found, expected = branch(shape, add_mlp_in(tiles)), branch(shape, add_whole_mlp)
    assert len(found) == (6 if shape.gated else 5)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [SHAPE, UNGATED], ids=lambda shape: shape.name)
@pytest.mark.parametrize("saved", [0.0, 0.3, 0.97, 1.0])
@pytest.mark.parametrize("tiles", [1, 3])
def test_any_share_of_saved_products_gives_the_output_and_gradients_of_the_whole(
    shape: ModelShape, saved: float, tiles: int
) -> None:
    found, expected = branch(shape, add_mlp_in(tiles, saved)), branch(shape, add_whole_mlp)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("saved", [0.0, 0.5, 1.0])
def test_backward_repeats_the_first_products_of_the_tokens_that_are_not_saved(saved: float) -> None:
    def products(add_mlp: AddMLP) -> int:
        with Products() as counted:
            branch(SHAPE, add_mlp)
        return counted.products

    runs = 2 if saved == 0.5 else 1  # those that are saved, and the others
    assert products(add_mlp_in(1, saved)) == runs * 9 + (2 if saved < 1 else 0)  # 3 forward, 6 backward, gate and up


@pytest.mark.parametrize("saved", [0.0, 0.4, 1.0])
def test_saved_products_take_the_bytes_of_two_intermediates_and_the_input(saved: float) -> None:
    norm, mlp = torch.nn.RMSNorm(SHAPE.hidden, eps=1e-5), MLP(SHAPE)
    x_BLE = torch.randn(*TOKENS, SHAPE.hidden, requires_grad=True)
    weights = {id(weight) for weight in (norm.weight, *mlp.parameters())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in weights:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        add_mlp_in(1, saved)(norm, mlp, x_BLE)
    tokens = TOKENS[0] * TOKENS[1]
    assert sum(kept.values()) == tokens * SHAPE.hidden + round(saved * tokens) * 2 * SHAPE.ffn


@pytest.mark.parametrize("saved", [0.0, 0.4, 1.0])
def test_a_repeated_backward_of_saved_products_adds_up(saved: float) -> None:
    model, expected = model_with(1, Checkpoint(every=0)), model_with(1, Checkpoint(every=0))
    for block in model.blocks:
        block.add_mlp = add_mlp_in(1, saved)
    for _ in range(2):
        loss_of(expected).backward()
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(gradients(model), gradients(expected), rtol=1e-11, atol=1e-13)


def test_tiles_in_bf16_are_as_close_to_float64_as_the_whole() -> None:
    truth = branch(SHAPE, add_whole_mlp)

    whole = max(relative_errors(branch(SHAPE, add_whole_mlp, torch.bfloat16), truth))
    assert 1e-3 < whole < 2e-2
    assert max(relative_errors(branch(SHAPE, add_mlp_in(1, 1.0), torch.bfloat16), truth)) < 1.25 * whole
    assert max(relative_errors(branch(SHAPE, add_mlp_in(22), torch.bfloat16), truth)) < 1.25 * whole


class Products(TorchDispatchMode):
    """Counts matrix products, and the elements of the widest MLP intermediate."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.widest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        if isinstance(out, Tensor) and out.shape[-1:] == (SHAPE.ffn,) and out.shape[0] != SHAPE.hidden:
            self.widest = max(self.widest, out.numel())
        return out


class NoProducts:
    """Attention without a matrix product."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, saved: SavedOutput | None = None) -> tuple[Tensor, Tensor]:
        return q, q[..., 0].transpose(1, 2)

    def keep(self, out: Tensor, lse: Tensor, tail: float) -> SavedOutput | None:
        return None


def model_with(tiles: int, checkpoint: Checkpoint) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SHAPE).double()
    torch.nn.init.normal_(model.head.weight, std=0.1)
    settings = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=TOKENS[1], dtype="fp64")
    for block in model.blocks:
        block.attend = METHOD.attention(ContextParallel(), settings)
        block.add_mlp = add_mlp_in(tiles)
    set_activations(checkpoint, list(model.blocks))
    return model


def loss_of(model: Decoder, seed: int = 1) -> Tensor:
    tokens = torch.randint(SHAPE.vocab, (TOKENS[0], TOKENS[1] + 1), generator=torch.Generator().manual_seed(seed))
    return model(tokens[:, :-1], torch.arange(TOKENS[1]), tokens[:, 1:])


def gradients(model: Decoder) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def test_only_one_runs_intermediates_exist_at_a_time() -> None:
    with Products() as counted:
        loss_of(model_with(4, Checkpoint(every=0))).backward()
    assert counted.widest == 6 * SHAPE.ffn  # ceil(22 / 4) tokens
    with Products() as counted:
        loss_of(model_with(1, Checkpoint(every=0))).backward()
    assert counted.widest == 22 * SHAPE.ffn


def test_a_run_is_no_longer_than_the_norm_can_address(monkeypatch) -> None:
    monkeypatch.setattr("engine.ops.runs.MAX_ELEMENTS", 4 * SHAPE.hidden + 1)
    with Products() as counted:
        found = branch(SHAPE, add_mlp_in(2))
    assert counted.widest == 4 * SHAPE.ffn  # of the 11 tokens that two tiles would have
    torch.testing.assert_close(found, branch(SHAPE, add_whole_mlp), rtol=1e-12, atol=1e-13)


def test_recomputation_in_tiles_is_marked_for_the_profiler() -> None:
    norm, mlp = torch.nn.RMSNorm(SHAPE.hidden, eps=1e-5), MLP(SHAPE)
    out_BLE = add_mlp_in(2)(norm, mlp, torch.randn(*TOKENS, SHAPE.hidden, requires_grad=True))
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        out_BLE.sum().backward()
    again = [event for event in traced.events() if event.name == RECOMPUTE]
    inside = [child.name for event in again for child in event.cpu_children]
    assert inside.count("aten::linear") == 2 * 2  # gate and up of both runs
    assert inside.count("aten::rms_norm") == 2


@pytest.mark.parametrize("tail", [0.0, 1.0])
def test_a_recomputed_layer_does_not_compute_its_tiled_mlp_twice(tail: float) -> None:
    tiles = 4

    def products(checkpoint: Checkpoint) -> int:
        model = model_with(tiles, checkpoint)
        for block in model.blocks:
            block.attend = NoProducts()
        with Products() as counted:
            loss_of(model).backward()
        return counted.products

    # q, k and v, one product, and attention's output are computed again; nothing of the MLP beyond its backward.
    again = SHAPE.layers * 2
    assert products(Checkpoint(every=1, tail=tail)) - products(Checkpoint(every=0)) == again


@pytest.mark.parametrize("checkpoint", [Checkpoint(every=0), Checkpoint(tail=0.0), Checkpoint(tail=1.0)])
def test_open_forwards_and_repeated_backwards_add_up(checkpoint: Checkpoint) -> None:
    expected = model_with(1, Checkpoint(every=0))
    for seed in (1, 1, 2):
        loss_of(expected, seed).backward()
    model = model_with(3, checkpoint)
    twice, once = loss_of(model, 1), loss_of(model, 2)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, 1), twice.detach(), rtol=1e-12, atol=0)
    twice.backward(retain_graph=True)
    once.backward()
    twice.backward()
    torch.testing.assert_close(gradients(model), gradients(expected), rtol=1e-11, atol=1e-13)


def test_backward_lets_the_remembered_input_go() -> None:
    x_BLE = torch.randn(*TOKENS, SHAPE.hidden, requires_grad=True)
    kept: list[bool] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(True) or tensor, lambda tensor: tensor):
        out_BLE = add_mlp_in(2)(torch.nn.RMSNorm(SHAPE.hidden), MLP(SHAPE), x_BLE)
    assert len(kept) == 5  # the input and four weights
    loss = out_BLE.sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
