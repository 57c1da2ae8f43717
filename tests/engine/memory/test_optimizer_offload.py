"""Optimizer states in host memory: bit for bit the fused AdamW, saved and loaded like any other."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import engine.memory.moments
from engine.memory.moments import BUFFERS, MOMENTS, PiecewiseAdamW
from engine.memory.offload import host_buffer
from engine.models.decoder import Decoder
from engine.optimizer import adamw
from engine.settings import AdamWSettings, TrialSettings, hosted_fraction, places_hosted
from engine.shape import ModelShape
from tests.ranks import run_on_ranks

# Odd sizes on purpose: shards of unequal length, and pieces that end inside a parameter.
SHAPE = ModelShape(name="odd", layers=1, hidden=18, ffn=30, heads=3, kv_heads=1, head_dim=6, vocab=67)
PIECE = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.memory.moments, "PIECE_ELEMENTS", PIECE)


def model_of(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    nn.init.normal_(model.head.weight)
    return model.to(device, dtype)


def train(model: Decoder, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps on seeded gradients, at a rate of its own each; the head goes without a gradient now and then."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, parameter in model.named_parameters():
            # Drawn whole and given as the parameter is sharded, so that any number of ranks sees the same numbers.
            gradient = torch.randn(parameter.shape, dtype=torch.float64, generator=generator).to(parameter.dtype)
            gradient = gradient.to(parameter.device)
            if isinstance(parameter, DTensor):
                gradient = torch.distributed.tensor.distribute_tensor(
                    gradient, parameter.device_mesh, parameter.placements
                )
            parameter.grad = None if step % 3 == 1 and name == "head.weight" else gradient
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()


def contents(model: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every parameter and state by name, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for key, tensor in {"value": parameter.detach(), **state}.items():
            found[f"{name}.{key}"] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
    return found


def assert_identical(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "offload"), [(torch.float32, 1.0), (torch.float64, 1.0), (torch.float32, 0.4)])
def test_parameters_and_states_are_those_of_the_fused_step_bit_for_bit(dtype: torch.dtype, offload: float) -> None:
    plain, offloaded = model_of(dtype), model_of(dtype)
    expected, found = adamw(plain, 1e-2, AdamWSettings()), adamw(offloaded, 1e-2, AdamWSettings(), offload=offload)
    assert not isinstance(expected, PiecewiseAdamW)
    train(plain, expected, range(5))
    train(offloaded, found, range(5))
    assert_identical(contents(offloaded, found), contents(plain, expected))


def test_states_stay_in_host_memory_and_are_copied_through_bounded_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    optimizer = adamw(model, 1e-2, AdamWSettings(), offload=1.0)
    train(model, optimizer, range(1))
    homes = {(p, name): optimizer.state[p][name].data_ptr() for p in model.parameters() for name in MOMENTS}
    made: list[int] = []
    real = torch.empty

    def empty(*sizes: int, **options: object) -> Tensor:
        tensor = real(*sizes, **options)
        made.append(tensor.numel())
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    train(model, optimizer, range(1, 3))
    assert made == [len(MOMENTS) * PIECE * 4] * BUFFERS * 2  # bytes of two steps' buffers, and nothing else
    assert homes == {(p, name): optimizer.state[p][name].data_ptr() for p in model.parameters() for name in MOMENTS}


@pytest.mark.parametrize("offload", [0.01, 0.3, 0.6, 0.99])
def test_a_fraction_leaves_the_states_of_the_other_parameters_on_the_device(
    offload: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted: list[int] = []

    def host_like(tensor: Tensor, device: torch.device) -> Tensor:
        hosted.append(tensor.numel())
        return host_buffer(tensor.numel() * tensor.itemsize, device).view(tensor.dtype).view(tensor.shape)

    monkeypatch.setattr(engine.memory.moments, "host_like", host_like)
    model = model_of()
    optimizer = adamw(model, 1e-2, AdamWSettings(), offload=offload)
    train(model, optimizer, range(1))
    given = [parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]
    places = places_hosted(given, offload)
    assert sorted(hosted) == sorted([given[place] for place in places] * len(MOMENTS))
    elements = sum(hosted) / len(MOMENTS)
    assert abs(elements - offload * sum(given)) <= max(given) / 2
    assert hosted_fraction(
        TrialSettings(task="train", method="burst", model=SHAPE, seq_len=8), offload
    ) == elements / sum(given)


@pytest.mark.parametrize(
    ("fraction", "places"),
    [(0.0, []), (0.05, [3]), (0.2, [2, 3]), (0.3, [2, 3]), (0.45, [1, 2, 3]), (0.55, [1, 2, 3]), (0.8, [0, 1, 2, 3])],
)
def test_the_last_go_first_and_one_more_where_that_is_nearer(fraction: float, places: list[int]) -> None:
    assert sorted(places_hosted([10, 6, 3, 1], fraction)) == places


@pytest.mark.parametrize(("saves", "loads"), [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.3, 0.7), (0.7, 0.0)])
def test_states_move_between_offloaded_and_plain_optimizers(saves: float, loads: float) -> None:
    straight = model_of()
    optimizer = adamw(straight, 1e-2, AdamWSettings())
    train(straight, optimizer, range(6))

    first, second = model_of(), model_of()
    before = adamw(first, 1e-2, AdamWSettings(), offload=saves)
    train(first, before, range(3))
    after = adamw(second, 5e-1, AdamWSettings(), offload=loads)
    second.load_state_dict(first.state_dict())
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert after.param_groups[0]["lr"] == before.param_groups[0]["lr"]
    train(second, after, range(3, 6))
    assert_identical(contents(second, after), contents(straight, optimizer))


def sharded(offload: float) -> tuple[Decoder, torch.optim.Optimizer]:
    model = model_of()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model, 1e-2, AdamWSettings(), offload=offload)


def resumed_and_straight(directory: str) -> bool:
    """Train, save with torch.distributed.checkpoint, load into a new optimizer, train on: the same as in one go."""
    engine.memory.moments.PIECE_ELEMENTS = PIECE
    straight, optimizer = sharded(offload=0.0)
    train(straight, optimizer, range(4))
    expected = contents(straight, optimizer)

    first, before = sharded(offload=0.6)
    train(first, before, range(2))
    for parameter in first.parameters():
        for name in MOMENTS:
            state = before.state[parameter][name]
            assert isinstance(state, DTensor)
            assert (state.placements, state.shape) == (parameter.placements, parameter.shape)
    dcp.save(
        {"model": first.state_dict(), "optimizer": get_optimizer_state_dict(first, before)}, checkpoint_id=directory
    )

    second, after = sharded(offload=1.0)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    loaded = {"model": second.state_dict(), "optimizer": get_optimizer_state_dict(second, after)}
    dcp.load(loaded, checkpoint_id=directory)
    second.load_state_dict(loaded["model"])
    set_optimizer_state_dict(second, after, loaded["optimizer"])
    train(second, after, range(2, 4))
    assert_identical(contents(second, after), expected)
    return True


def test_a_distributed_checkpoint_holds_offloaded_states(tmp_path: Path) -> None:
    # 18 rows over four ranks: the last one's shards are shorter.
    assert all(run_on_ranks(4, resumed_and_straight, str(tmp_path)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: copies between devices overlap there")
@pytest.mark.parametrize("offload", [1.0, 0.4])
def test_on_a_gpu_states_live_in_host_memory_and_equal_the_fused_step(offload: float) -> None:
    plain, offloaded = model_of(device="cuda"), model_of(device="cuda")
    expected, found = adamw(plain, 1e-2, AdamWSettings()), adamw(offloaded, 1e-2, AdamWSettings(), offload=offload)
    train(plain, expected, range(20))
    train(offloaded, found, range(20))
    homes = {found.state[p][name].device.type for p in offloaded.parameters() for name in MOMENTS}
    assert homes == ({"cpu"} if offload == 1 else {"cpu", "cuda"})
    found.state_dict()  # waits for the last copies
    assert_identical(contents(offloaded, found), contents(plain, expected))
