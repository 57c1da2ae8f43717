"""Within a step the host reads nothing from the device: it would wait for all work before, and the device for it."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.utils import _to_kwargs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.burst import METHOD
from engine.distributed import arrange
from engine.optimizer import clip_and_step
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from engine.tasks.train import TrainTask
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=259)
SETTINGS = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=64, dtype="bf16")
LEVERS = (
    {},
    {"checkpoint": Checkpoint(every=0)},
    {"checkpoint": Checkpoint(every=2, tail=0.5), "mlp_tiles": 3, "projection_tiles": 2},
    {"gradient_accumulation": 2},
    {"lm_head_fusion": False},
)
# Operations whose result is a number of Python, or whose size depends on values.
READINGS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2")


class NoReading(TorchDispatchMode):
    """Refuses every operation that hands values of a tensor to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in READINGS, f"{name} reads a tensor on the host"
        return func(*args, **(kwargs or {}))


def test_the_guard_finds_a_reading() -> None:
    with NoReading(), pytest.raises(AssertionError, match="_local_scalar_dense reads a tensor on the host"):
        torch.ones(()).item()


def step_without_reading(settings: TrialSettings) -> float:
    task = TrainTask(settings, METHOD, arrange(settings, torch.device("cpu")))
    task.step(0)  # what is made once may be looked at
    with NoReading():
        total: Tensor = task.gradients(1)
        clip_and_step(task.model, task.optimizer)
    task.optimizer.zero_grad()
    return total.item()


@pytest.mark.parametrize("levers", LEVERS, ids=str)
def test_no_number_is_read_between_the_batch_and_the_update(levers: dict[str, object]) -> None:
    settings = dataclasses.replace(SETTINGS, **levers)
    [loss] = run_on_ranks(1, step_without_reading, settings)
    assert 3 < loss < 8


def moved_by_fsdp(settings: TrialSettings) -> list[tuple[int, bool]]:
    """Of every forward of a step: how many tensors FSDP2's root would copy to a GPU before it, one by one and waiting
    for each, as the root does with whatever is not there yet; and whether the labels are on the host in the head."""
    task = TrainTask(settings, METHOD, arrange(settings, torch.device("cpu")))
    moved: list[int] = []
    at_the_head: list[bool] = []

    def as_on_a_gpu(state, module, args, kwargs):
        if module is task.model:
            on_gpu = tree_leaves(_to_kwargs(args, kwargs, torch.device("meta"), False))
            moved.append(sum(isinstance(leaf, Tensor) for leaf in on_gpu))
        return real(state, module, args, kwargs)

    task.model.head.register_forward_pre_hook(lambda _, args: at_the_head.append(args[1].device.type == "cpu"))
    real = FSDPState._root_pre_forward
    with mock.patch.object(FSDPState, "_root_pre_forward", as_on_a_gpu):
        task.step(0)
    return list(zip(moved, at_the_head, strict=True))


def test_labels_stay_on_the_host_where_fsdp_moves_its_inputs_to_the_gpu() -> None:
    settings = dataclasses.replace(SETTINGS, optimizer_offload=True, gradient_accumulation=2)
    # Tokens and positions, which are on the GPU already.
    assert run_on_ranks(1, moved_by_fsdp, settings) == [[(2, True), (2, True)]]


def waits_on_a_gpu(settings: TrialSettings) -> float:
    device = torch.device("cuda", 0)
    task = TrainTask(settings, METHOD, arrange(settings, device))
    for index in range(3):  # kernels are compiled, host memory is locked, blocks of device memory are there
        task.step(index)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        total = task.gradients(3)
        clip_and_step(task.model, task.optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    task.optimizer.zero_grad()
    return total.item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: asks its runtime")
@pytest.mark.parametrize("levers", LEVERS, ids=str)
def test_nothing_waits_for_a_gpu_between_the_batch_and_the_update(levers: dict[str, object]) -> None:
    wide = dataclasses.replace(SHAPE, head_dim=64)
    settings = dataclasses.replace(SETTINGS, model=wide, seq_len=512, **levers)
    [loss] = run_on_ranks(1, waits_on_a_gpu, settings, backend="nccl")
    assert 3 < loss < 8
