"""Updates that run while the next forward computes: each is done before anything reads what it writes.

On a CPU every pass runs when it is launched. Here none does before it is waited for, so whatever does not wait reads
parameters of the step before.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import engine.memory.moments
from engine.burst import METHOD
from engine.distributed import arrange
from engine.memory.moments import PiecewiseAdamW, _Pass, _Piece
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from engine.tasks.train import TrainTask
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=3, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=259)
SETTINGS = TrialSettings(
    task="train", method="burst", model=SHAPE, seq_len=64, dtype="fp32", learning_rate=1e-2, optimizer_offload=True
)
STEPS, PIECE = 4, 200
CASES = {
    "all of it": SETTINGS,
    "a part": dataclasses.replace(SETTINGS, optimizer_offload=0.4),
    "embedding and head are one": dataclasses.replace(SETTINGS, model=dataclasses.replace(SHAPE, tied=True)),
    "micro-batches": dataclasses.replace(SETTINGS, gradient_accumulation=2),
    "layers again": dataclasses.replace(SETTINGS, checkpoint=Checkpoint(every=2, tail=0.5), mlp_tiles=2),
    "in bf16": dataclasses.replace(SETTINGS, dtype="bf16"),
    "two ranks": dataclasses.replace(SETTINGS, cp_size=2, world_size=2),
    "two replicas": dataclasses.replace(SETTINGS, world_size=2),
}
Waiting = tuple[nn.Module, list[nn.Module], PiecewiseAdamW]
_real = PiecewiseAdamW._pass_through


class Runs:
    """An event of a pass that runs when it is waited for."""

    def __init__(self, passes: Iterator[_Pass]) -> None:
        self._passes = passes

    def synchronize(self) -> None:
        next(self._passes)


def late(optimizer: PiecewiseAdamW, pieces: list[_Piece], device: torch.device) -> Iterator[_Pass]:
    """The same passes, of which none runs before it is waited for."""
    passes = _real(optimizer, pieces, device)
    for stage, some in itertools.groupby(pieces, lambda piece: piece.stage):
        yield _Pass(stage=stage, over=Runs(passes), pieces=list(some), buffers=[])


def trained(settings: TrialSettings, *, is_late: bool) -> dict[str, Tensor]:
    """Losses and norms of some steps, then parameters and moments by name, as state dicts give them."""
    engine.memory.moments.PIECE_ELEMENTS = PIECE
    with mock.patch.object(PiecewiseAdamW, "_pass_through", late if is_late else _real):
        task = TrainTask(settings, METHOD, arrange(settings, torch.device("cpu")))
        steps = [task.step(index) for index in range(STEPS)]
        found = {"loss": torch.tensor([step.loss for step in steps], dtype=torch.float64)}
        found["norm"] = torch.tensor([step.grad_norm for step in steps], dtype=torch.float64)
        parameters = get_model_state_dict(task.model)
        moments = get_optimizer_state_dict(task.model, task.optimizer)["state"]
    found |= {name: _whole(tensor) for name, tensor in parameters.items()}
    return found | {
        f"{name}.{part}": _whole(tensor) for name, state in moments.items() for part, tensor in state.items()
    }


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def differing(settings: TrialSettings) -> tuple[int, list[str]]:
    """How many tensors are compared, and the names of those that are not the same bit for bit."""
    found, expected = trained(settings, is_late=True), trained(settings, is_late=False)
    assert found.keys() == expected.keys()
    return len(found), [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_updates_that_are_waited_for_at_once_bit_for_bit(case: str) -> None:
    settings = CASES[case]
    for compared, names in run_on_ranks(settings.world_size, differing, settings):
        assert compared > 20
        assert not names


def without_waiting(settings: TrialSettings, stages: int | None) -> bool:
    """Whether steps differ when forwards wait for fewer stages than they need."""
    expected, real = trained(settings, is_late=False), PiecewiseAdamW.wait

    def wait(self: PiecewiseAdamW, stage: int | None = None) -> None:
        real(self, stage if stage is None or stages is None else stage - stages)

    with mock.patch.object(PiecewiseAdamW, "wait", wait):
        found = trained(settings, is_late=True)
    return any(not torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize(("stages", "differ"), [(0, False), (1, True)])
def test_a_forward_that_waits_for_one_part_less_is_found(stages: int, differ: bool) -> None:
    assert run_on_ranks(1, without_waiting, SETTINGS, stages) == [differ]


def layers() -> tuple[nn.Module, list[nn.Module]]:
    torch.manual_seed(0)
    parts = [nn.Linear(4, 4) for _ in range(3)]
    return nn.Sequential(*parts), list(parts)


def stepped(optimizer: PiecewiseAdamW, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def adamw_of(model: nn.Module) -> PiecewiseAdamW:
    return PiecewiseAdamW(model.parameters(), lr=0.1, fused=True)


@pytest.fixture
def expected() -> list[Tensor]:
    model, _ = layers()
    stepped(adamw_of(model), model)
    return values(model)


@pytest.fixture
def waiting(
    monkeypatch: pytest.MonkeyPatch, expected: list[Tensor]
) -> tuple[nn.Module, list[nn.Module], PiecewiseAdamW]:
    """A model after a step whose updates have not run."""
    monkeypatch.setattr(PiecewiseAdamW, "_pass_through", late)
    model, parts = layers()
    optimizer, before = adamw_of(model), values(model)
    optimizer.update_in_forward(model, parts)
    stepped(optimizer, model)
    assert all(torch.equal(now, then) for now, then in zip(values(model), before, strict=True))
    return model, parts, optimizer


def test_a_part_waits_for_itself_and_the_next(waiting: Waiting, expected: list[Tensor]) -> None:
    model, parts, _ = waiting
    parts[0](torch.ones(1, 4))
    done = [torch.equal(now, then) for now, then in zip(values(model), expected, strict=True)]
    assert done == [True, True, True, True, False, False]


@pytest.mark.parametrize(
    "read",
    [
        lambda model, optimizer: model.state_dict(),
        lambda model, optimizer: model.load_state_dict(model.state_dict()),
        lambda model, optimizer: optimizer.state_dict(),
        lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        lambda model, optimizer: optimizer.wait(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model(torch.ones(1, 4)),
    ],
    ids=["state_dict", "load", "states", "load states", "wait", "zeros", "forward"],
)
def test_what_reads_or_writes_parameters_waits(read, waiting: Waiting, expected: list[Tensor]) -> None:  # type: ignore[no-untyped-def]
    model, _, optimizer = waiting
    read(model, optimizer)
    torch.testing.assert_close(values(model), expected, rtol=0, atol=0)


def test_gradients_and_learning_rate_are_those_of_the_step(waiting: Waiting, expected: list[Tensor]) -> None:
    model, _, optimizer = waiting
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 1e3
    optimizer.wait()
    torch.testing.assert_close(values(model), expected, rtol=0, atol=0)


def test_gradients_are_held_until_the_forward_reaches_their_part(waiting: Waiting) -> None:
    _, parts, optimizer = waiting
    optimizer.zero_grad()
    held = []
    for part in parts:
        part(torch.ones(1, 4))
        held.append(sum(len(each.pieces) for each in optimizer._running))
    assert held == [2, 0, 0]  # of the third part a weight and a bias; none when its forward begins


def test_moments_in_8_bits_are_updated_at_once() -> None:
    model, parts = layers()
    optimizer = PiecewiseAdamW(model.parameters(), lr=0.1, fused=True, eight_bit=[parts[0].weight])
    optimizer.update_in_forward(model, parts)
    assert not optimizer._stages


def on_a_gpu(settings: TrialSettings) -> tuple[list[float], list[float]]:
    found = []
    for hooked in (True, False):
        torch.manual_seed(0)
        with mock.patch.object(
            PiecewiseAdamW, "update_in_forward", PiecewiseAdamW.update_in_forward if hooked else lambda *_: None
        ):
            task = TrainTask(settings, METHOD, arrange(settings, torch.device("cuda", 0)))
        found.append([value for index in range(8) for value in dataclasses.astuple(task.step(index))[:2]])
    return found[0], found[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: updates run beside a forward there")
def test_on_a_gpu_steps_are_those_of_updates_that_are_waited_for_at_once() -> None:
    wide = dataclasses.replace(SHAPE, layers=8, hidden=512, ffn=1024, head_dim=64)
    settings = dataclasses.replace(SETTINGS, model=wide, seq_len=512, dtype="bf16")
    [(found, expected)] = run_on_ranks(1, on_a_gpu, settings, backend="nccl")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
