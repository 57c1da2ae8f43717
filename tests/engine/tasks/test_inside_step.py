"""Progress inside a step: which layer is under way, in lines that come before the step's own, where it takes long."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.burst import METHOD
from engine.distributed import arrange
from engine.settings import Checkpoint, Steps, TrialSettings
from engine.shape import ModelShape
from engine.tasks import task as task_module
from engine.tasks.attention import AttentionTask
from engine.tasks.train import TrainTask
from tests.patience import AMPLE, wait_until
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=259)
SETTINGS = TrialSettings(
    task="train", method="burst", model=SHAPE, seq_len=64, dtype="fp32", steps=Steps(warmup=0, measured=1)
)
Place = tuple[str, int | None]


def places(lines: list[dict[str, Any]]) -> list[Place]:
    return [(line["phase"], line.get("layer")) for line in lines if "phase" in line]


class Waits:
    """A method's attention that does something before each call."""

    def __init__(self, attend: Any, before: Callable[[], object]) -> None:
        self._attend, self._before = attend, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attend, name)

    def __call__(self, *tensors: torch.Tensor, **saved: Any) -> Any:
        self._before()
        return self._attend(*tensors, **saved)


class SlowLayers:
    """Each layer of a task goes on only when the line about it has been written."""

    def __init__(self, task: TrainTask) -> None:
        self.lines: list[dict[str, Any]] = []
        self.backward = False
        for number, block in enumerate(task.model.blocks, start=1):
            block.attend = Waits(block.attend, lambda number=number: self.backward or self.wait_for("forward", number))
            block.attention_norm.register_forward_pre_hook(
                lambda *_, number=number: self.wait_for("recompute", number) if self.backward else None
            )
            block.attention_norm.weight.register_post_accumulate_grad_hook(
                lambda _, number=number: self.wait_for("backward", number)
            )

    def wait_for(self, phase: str, layer: int) -> None:
        self.backward |= (phase, layer) == ("forward", 2)  # whatever comes next
        wait_until(lambda: places(self.lines)[-1:] == [(phase, layer)], f"{phase} of layer {layer}: {self.lines}")


def layers_of_a_step(settings: TrialSettings) -> tuple[list[dict[str, Any]], bool]:
    """Lines of a step whose layers wait for them, and whether a second one has a thread that could write more."""
    task_module.REPORT_SECONDS = 0.01
    task = TrainTask(settings, METHOD, arrange(settings, torch.device("cpu")))
    slow = SlowLayers(task)
    task.run(slow.lines.append)
    task_module.REPORT_SECONDS = AMPLE
    reporters = []
    for number in (2, 3):
        slow.backward = False
        slow.wait_for = lambda *_: reporters.append((number, reporting()))  # noqa: B023 - called in its turn
        with task.inside.step(slow.lines.append, number, 3, settings.seq_len):
            task.step(number)
    counts = {number: count for number, count in reporters}
    return slow.lines, (counts[2], counts[3]) == (1, 0)


def reporting() -> int:
    """Threads that tell where a step is. Libraries start and end threads of their own at any time."""
    return sum("_report" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("checkpoint", [Checkpoint(), Checkpoint(every=0)], ids=["recomputed", "saved"])
def test_a_long_step_tells_each_layer_it_reaches_and_a_short_one_has_no_thread(checkpoint: Checkpoint) -> None:
    settings = dataclasses.replace(SETTINGS, checkpoint=checkpoint)
    [(lines, second_is_without)] = run_on_ranks(1, layers_of_a_step, settings)
    assert all((line["step"], line["of"]) == (1, 1) for line in lines)
    assert all(line["layers"] == 2 for line in lines if "layer" in line)
    back: list[Place] = [("recompute", 2), ("backward", 2), ("recompute", 1), ("backward", 1)]
    expected = [("forward", 1), ("forward", 2), *(one for one in back if checkpoint.every or one[0] == "backward")]
    told = places(lines)
    assert [place for place in expected if place in told] == expected
    order = [told.index(place) for place in expected if place[0] != "backward"]
    assert order == sorted(order)
    assert "loss" in lines[-1]  # the line of the step is the last one
    assert second_is_without


def phases_of_a_call(settings: TrialSettings) -> list[dict[str, Any]]:
    task_module.REPORT_SECONDS = 0.01
    task = AttentionTask(settings, METHOD, arrange(settings, torch.device("cpu")))
    lines: list[dict[str, Any]] = []
    expected = iter(["forward alone", "forward"])  # later calls compare with float64

    def wait_for(phase: str) -> None:
        wait_until(lambda: places(lines)[-1:] == [(phase, None)], f"{phase}: {lines}")

    task.attend = Waits(task.attend, lambda: (phase := next(expected, "")) and wait_for(phase))  # type: ignore[assignment]
    task.run(lines.append)
    return lines


def test_a_long_call_of_attention_tells_which_forward_it_is_in() -> None:
    settings = dataclasses.replace(SETTINGS, task="attention")
    [lines] = run_on_ranks(1, phases_of_a_call, settings)
    assert [phase for phase, _ in places(lines)][:2] == ["forward alone", "forward"]
    assert "seconds" in lines[-1]


def test_only_rank_0_tells() -> None:
    quiet = task_module.InsideStep(torch.device("cpu"), rank=1)
    with quiet.step(lambda _: None, 1, 1, 64):
        assert reporting() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: the host runs ahead of it")
def test_a_place_is_told_when_the_device_has_reached_it_and_nothing_waits_for_it() -> None:
    device = torch.device("cuda", 0)
    steps = task_module.InsideStep(device, rank=0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with steps.step(lambda _: None, 1, 1, 64):
            steps.mark("forward", layer=1, layers=2)
            torch.cuda._sleep(1 << 33)  # seconds
            steps.mark("forward", layer=2, layers=2)
            wait_until(lambda: steps._reached() is not None, "the first mark was not reached")
            assert steps._reached() == {"phase": "forward", "layer": 1, "layers": 2}
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            assert steps._reached() == {"phase": "forward", "layer": 2, "layers": 2}
    finally:
        torch.cuda.set_sync_debug_mode("default")
