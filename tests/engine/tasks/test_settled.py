"""A warm-up that ends when two steps in a row agree in time: `steps.settle`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from engine.burst import METHOD
from engine.distributed import World, arrange
from engine.measurement import Measurement, measured_part
from engine.settings import Steps, TrialSettings
from engine.shape import ModelShape
from engine.tasks.attention import AttentionTask
from engine.tasks.lm_head import HeadTask
from engine.tasks.task import Task
from engine.tasks.train import TrainTask
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=259)
SETTINGS = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=64, dtype="fp32")
TASKS: list[type[Task]] = [TrainTask, AttentionTask, HeadTask]


@pytest.mark.parametrize(
    ("steps", "seconds", "first", "settled"),
    [
        (Steps(warmup=2, measured=3), [9, 5, 1, 1, 1], 2, None),  # settle is 0
        (Steps(warmup=2, settle=3, measured=2), [1.0, 1.005, 7, 7, 7, 7, 7], 2, True),  # the warm-up itself agrees
        (Steps(warmup=2, settle=3, measured=2), [9, 5, 1.00, 1.02, 1.03, 7, 7], 5, True),
        (Steps(warmup=2, settle=3, measured=2), [9, 5, 1.00, 1.009, 7, 7, 7], 4, True),  # steps after those are no more
        (Steps(warmup=2, settle=3, measured=2), [9, 5, 3, 2, 1, 1, 1], 5, False),
        (Steps(warmup=0, settle=3, measured=1), [1, 1, 1, 1], 2, True),
        (Steps(warmup=2, warmup_seq_len=8, settle=3, measured=1), [1, 1, 9, 9, 9, 9], 4, True),  # two of full length
    ],
)
def test_measured_steps_come_after_two_that_agree_within_one_percent(
    steps: Steps, seconds: list[float], first: int, settled: bool | None
) -> None:
    assert len(seconds) == steps.total
    part, said = measured_part(steps, seconds)
    assert (part.start, part.stop) == (first, first + steps.measured)
    assert said == ({} if settled is None else {"warm_up": {"steps": first, "settled": settled}})


def run_of(kind: type[Task], settings: TrialSettings) -> tuple[list[float], dict[str, Any]]:
    """Seconds of all steps on the slowest rank, and the measurement."""
    world = arrange(settings, torch.device("cpu"))
    seconds: list[float] = []

    def on_progress(told: dict[str, Any]) -> None:
        if "seconds" in told:
            seconds.append(told["seconds"])

    found: Measurement = kind(settings, METHOD, world).run(on_progress)
    return World.slowest(world, seconds), dataclasses.asdict(found)


def runs() -> list[tuple[list[float], dict[str, Any]]]:
    steps = Steps(warmup=1, settle=4, measured=2)
    names = {TrainTask: "train", AttentionTask: "attention", HeadTask: "lm_head"}
    changes = {"world_size": 2, "cp_size": 2, "steps": steps}
    return [run_of(kind, dataclasses.replace(SETTINGS, task=names[kind], **changes)) for kind in TASKS]


def test_every_task_runs_all_steps_and_all_ranks_measure_the_same_ones() -> None:
    for found in zip(*run_on_ranks(2, runs), strict=True):
        for seconds, measured in found:
            part, said = measured_part(Steps(warmup=1, settle=4, measured=2), seconds)
            assert len(seconds) == 7
            assert measured["step_seconds"] == pytest.approx(seconds[part])
            assert len(measured["forward_seconds"]) == 2
            assert measured["extra"]["warm_up"] == said["warm_up"]
            assert len(measured["loss"]) in (0, 7)


def test_a_warm_up_that_cannot_settle_is_refused() -> None:
    with pytest.raises(ValueError, match="each step has other documents"):
        dataclasses.replace(SETTINGS, mask="documents", steps=Steps(settle=1))
    for few in ({"warmup": 0, "settle": 1}, {"warmup": 3, "settle": 1, "warmup_seq_len": 16}):
        with pytest.raises(ValueError, match=r"two are compared; give at least 2"):
            Steps(**few)
    with pytest.raises(ValueError, match=r"steps\.settle is -1; expected 0 or more"):
        Steps(settle=-1)
