"""Updates that run while the next forward computes: each is done before anything reads what it writes.

On a CPU every pass runs when it is launched. Here none does before it is waited for, so whatever does not wait reads
parameters of the step before.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import engine.memory.moments
from engine.burst import METHOD
from engine.combinations import combination_unsupported_reason
from engine.distributed import arrange
from engine.memory.moments import PiecewiseAdamW, _Pass, _Piece
from engine.memory.offload import local_shard
from engine.optimizer import clip_and_step
from engine.settings import Checkpoint, Steps, TrialSettings, parts_hosted
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
    "gradients too": dataclasses.replace(SETTINGS, gradient_offload=True),
    "a part of the gradients": dataclasses.replace(SETTINGS, gradient_offload=True, optimizer_offload=0.4),
    "gradients of tied matrices": dataclasses.replace(
        SETTINGS, gradient_offload=True, model=dataclasses.replace(SHAPE, tied=True)
    ),
    "gradients of two ranks": dataclasses.replace(
        SETTINGS, gradient_offload=True, cp_size=2, world_size=2, dtype="bf16", checkpoint=Checkpoint(every=2)
    ),
    "two nodes": dataclasses.replace(SETTINGS, world_size=2, sharding="hybrid", emulate_nodes=2),
    "gradients after a warm-up step of another length": dataclasses.replace(
        SETTINGS,
        gradient_offload=True,
        checkpoint=Checkpoint(every=0, host_layers=2),
        steps=Steps(warmup=1, measured=STEPS - 1, warmup_seq_len=32),
    ),
}
Waiting = tuple[nn.Module, list[nn.Module], PiecewiseAdamW]
_real = PiecewiseAdamW._pass_through
_kept: list[_Pass] = []  # so that no memory is reused


class Runs:
    """An event of a pass that runs when it is waited for."""

    def __init__(self, passes: Iterator[_Pass]) -> None:
        self._passes = passes

    def synchronize(self) -> None:
        next(self._passes)


def late(optimizer: PiecewiseAdamW, pieces: deque[_Piece], device: torch.device) -> Iterator[_Pass]:
    """The same passes, of which none runs before it is waited for."""
    held = {stage: list(some) for stage, some in itertools.groupby(pieces, lambda piece: piece.stage)}
    passes = _real(optimizer, pieces, device)
    for stage in list(held):
        yield _Pass(stage=stage, over=Runs(passes), pieces=held.pop(stage), buffers=[])


def trained(settings: TrialSettings, *, is_late: bool) -> dict[str, Tensor]:
    """Losses and norms of some steps, then parameters and moments by name, as state dicts give them."""
    engine.memory.moments.PIECE_ELEMENTS = PIECE
    with mock.patch.object(PiecewiseAdamW, "_pass_through", late if is_late else _real):
        task = TrainTask(settings, METHOD, arrange(settings, torch.device("cpu")))
        steps = []
        for index in range(STEPS):
            if index == settings.steps.warmup:
                task._before_full_length()
            steps.append(task.step(index))
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
    found = trained(settings, is_late=True)
    expected = trained(dataclasses.replace(settings, gradient_offload=False), is_late=False)
    assert found.keys() == expected.keys()
    return len(found), [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_updates_that_are_waited_for_at_once_bit_for_bit(case: str) -> None:
    settings = CASES[case]
    for compared, names in run_on_ranks(settings.world_size, differing, settings):
        assert compared > 20
        assert not names


def without_waiting(settings: TrialSettings, less: int) -> bool:
    """Whether steps differ when a part waits for fewer parts than itself and the next."""
    expected, real = trained(settings, is_late=False), PiecewiseAdamW.wait

    def wait(self: PiecewiseAdamW, stage: int | None = None) -> None:
        real(self, stage if not stage else stage - less)

    with mock.patch.object(PiecewiseAdamW, "wait", wait):
        found = trained(settings, is_late=True)
    return any(not torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize(("ranks", "less", "differ"), [(1, 0, False), (1, 2, True), (2, 0, False), (2, 1, True)])
def test_a_part_that_waits_for_less_is_found(ranks: int, less: int, differ: bool) -> None:
    """FSDP2 gathers the next part of several ranks ahead, and nothing of one."""
    settings = dataclasses.replace(SETTINGS, cp_size=ranks, world_size=ranks)
    assert run_on_ranks(ranks, without_waiting, settings, less) == [differ] * ranks


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


@pytest.mark.parametrize(("offload", "layers"), [(0.1, 1), (0.5, 2)])
def test_gradients_whose_updates_are_over_do_not_wait_with_others(offload: float, layers: int) -> None:
    """Vectors have moments in host memory before matrices do, and FSDP2 gives the gradients of a layer one tensor."""
    [(found, hosted)] = run_on_ranks(1, held_after_a_step, dataclasses.replace(SETTINGS, optimizer_offload=offload))
    assert hosted == layers == len(parts_hosted(SETTINGS, offload)[0])
    assert found <= layers


def held_after_a_step(settings: TrialSettings) -> tuple[int, int]:
    """Layers whose tensor of gradients lives when a step has ended, and those with a matrix in host memory."""
    task = TrainTask(settings, METHOD, arrange(settings, torch.device("cpu")))
    step, held = task.optimizer.step, list[weakref.ref[torch.UntypedStorage]]()

    def watched() -> None:
        for block in task.model.blocks:
            held.append(weakref.ref(local_shard(block.attention.q.weight.grad).untyped_storage()))
        step()

    with mock.patch.object(task.optimizer, "step", watched), mock.patch.object(PiecewiseAdamW, "_pass_through", late):
        task.step(0)
    blocks = [
        [each in task.optimizer._offloaded for each in block.parameters() if each.ndim > 1]
        for block in task.model.blocks
    ]
    return sum(each() is not None for each in held), sum(map(any, blocks))


REFUSED = {
    "task is attention, which has no optimizer": {"task": "attention"},
    "optimizer_offload is false, and they are updated with": {"optimizer_offload": False},
    "optimizer_states is 8bit, whose updates are waited for": {
        "optimizer_states": "8bit",
        "model": dataclasses.replace(SHAPE, hidden=256, ffn=512, head_dim=64),
    },
    "gradient_accumulation is 2, which adds to them": {"gradient_accumulation": 2},
    "tp_size is 2, whose ranks add to them": {"tp_size": 2, "cp_size": 1, "world_size": 2},
    "sharding is hybrid, whose sums over nodes hold them": {"sharding": "hybrid", "world_size": 2, "emulate_nodes": 2},
}


@pytest.mark.parametrize("words", REFUSED)
def test_gradients_go_to_the_host_only_with_what_their_updates_need(words: str) -> None:
    trial = dataclasses.replace(SETTINGS, gradient_offload=True, **REFUSED[words])
    reason = combination_unsupported_reason(trial) or ""
    assert reason.startswith(f"gradient_offload is true, and {words}")
    assert reason.endswith("; leave gradient_offload out")
    assert combination_unsupported_reason(dataclasses.replace(SETTINGS, gradient_offload=True)) is None


def test_a_second_backward_before_the_step_is_refused() -> None:
    model, parts = layers()
    optimizer = adamw_of(model)
    optimizer.update_in_forward(model, parts)
    optimizer.take_gradients()
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="take a step after each backward, or leave gradient_offload out"):
        model(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()


def test_taken_gradients_and_their_norm_are_those_of_backward_and_two_parts_at_most_stay() -> None:
    model, parts = layers()
    model(torch.ones(1, 4)).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    norm = torch.nn.utils.get_total_norm(expected)
    model.zero_grad()
    optimizer = adamw_of(model)
    optimizer.update_in_forward(model, parts)
    optimizer.take_gradients()
    stay: list[int] = []
    leaving = optimizer.taken._leaving
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: stay.append(len({one[0] for one in leaving})))
    model(torch.ones(1, 4)).square().sum().backward()
    assert max(stay) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close([optimizer.gradient_of(each) for each in model.parameters()], expected, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.taken.norm(model.parameters()), norm, rtol=0, atol=0)


def test_moments_in_8_bits_are_updated_at_once() -> None:
    model, parts = layers()
    optimizer = PiecewiseAdamW(model.parameters(), lr=0.1, fused=True, eight_bit=[parts[0].weight])
    optimizer.update_in_forward(model, parts)
    assert not optimizer._stages


def slow(optimizer: PiecewiseAdamW, pieces: deque[_Piece], device: torch.device) -> Iterator[_Pass]:
    """The same passes, each some milliseconds later: without waits a forward is done before."""
    passes = _real(optimizer, pieces, device)
    while True:
        with torch.cuda.stream(optimizer._streams_of(device)[0]):
            torch.cuda._sleep(20_000_000)
        if (launched := next(passes, None)) is None:
            return
        yield launched


def launch_alone(optimizer: PiecewiseAdamW, stage: int | None = None) -> None:
    """`PiecewiseAdamW.wait` that waits for nothing. On a CPU, where passes run when they are launched, that is no
    difference."""
    optimizer._launch(None if stage is None else stage + engine.memory.moments.AHEAD)
    while optimizer._running and (stage is None or optimizer._running[0].stage <= stage):
        _kept.append(optimizer._running.popleft())


def on_a_gpu(settings: TrialSettings, waits: bool, passes: object) -> list[Tensor]:
    """Parameters after steps whose updates nothing else waits for."""
    with (
        mock.patch.object(PiecewiseAdamW, "_pass_through", passes),
        mock.patch.object(PiecewiseAdamW, "wait", PiecewiseAdamW.wait if waits else launch_alone),
    ):
        task = TrainTask(settings, METHOD, arrange(settings, torch.device("cuda", 0)))
        for index in range(STEPS):
            task.gradients(index)
            clip_and_step(task.model, task.optimizer, norm=task.gradient_norm())
            task.optimizer.zero_grad()
        task.optimizer.join()
        return [_whole(parameter.detach()).cpu() for parameter in task.model.parameters()]


def late_on_a_gpu(settings: TrialSettings) -> tuple[bool, bool, bool]:
    """Whether parameters are the same with late updates, with late gradients too, and without waits."""
    expected = on_a_gpu(settings, True, _real)
    with_gradients = dataclasses.replace(settings, gradient_offload=True)
    found = (
        on_a_gpu(settings, True, slow), on_a_gpu(with_gradients, True, slow), on_a_gpu(settings, False, slow)
    )  # fmt: skip
    same = [all(map(torch.equal, each, expected)) for each in found]
    return same[0], same[1], same[2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: updates run beside a forward there")
def test_on_a_gpu_late_updates_are_waited_for() -> None:
    wide = dataclasses.replace(SHAPE, layers=8, hidden=256, ffn=512, head_dim=64)
    settings = dataclasses.replace(SETTINGS, model=wide, seq_len=256, dtype="bf16", deterministic=True)
    assert run_on_ranks(1, late_on_a_gpu, settings, backend="nccl") == [(True, True, False)]


def runs_on(settings: TrialSettings) -> list[bool]:
    """After each of some steps, whether its update still runs: the clock of a step does not wait for it, but for that
    of the last step."""
    with mock.patch.object(PiecewiseAdamW, "_pass_through", slow):
        task = TrainTask(settings, METHOD, arrange(settings, torch.device("cuda", 0)))
        found = []
        for index in range(STEPS - 1):
            task.step(index)
            found.append(not task.optimizer._running[-1].over.query())
        over: list[torch.cuda.Event] = []
        join = task.optimizer.join

        def joined() -> None:
            task.optimizer._launch(None)
            over.append(task.optimizer._running[-1].over)
            join()

        task.optimizer.join = joined
        task.step(STEPS - 1, with_update=True)
        return [*found, not over[0].query()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: updates run beside a forward there")
def test_on_a_gpu_an_update_runs_on_into_the_next_step() -> None:
    wide = dataclasses.replace(SHAPE, layers=8, hidden=256, ffn=512, head_dim=64)
    settings = dataclasses.replace(SETTINGS, model=wide, seq_len=256, dtype="bf16")
    [[_, *found]] = run_on_ranks(1, runs_on, settings, backend="nccl")  # in the first step the GPU loads its kernels
    assert found == [True] * (STEPS - 2) + [False]
