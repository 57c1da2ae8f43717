"""A profiler that fails on one rank: the figures are there before and after, and every rank goes on with the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

from engine import worker
from engine.burst import METHOD
from engine.distributed import arrange
from engine.measurement import Measurement, read_measurement, unfinished, write_measurement
from engine.profile import capture
from engine.settings import Steps, TrialSettings
from engine.shape import ModelShape
from engine.worker import PhaseTimer
from tests.ranks import run_on_ranks
from tests.slow import slow

SHAPE = ModelShape(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=259)


def fail(*_: Any, **__: Any) -> NoReturn:
    raise OSError("as planned\nand more of it")


class StartFails(capture.profile):
    start = fail


class StopFails(capture.profile):
    def stop(self) -> None:
        super().stop()
        fail()


class ExportFails(capture.profile):
    export_chrome_trace = fail


TROUBLE = {
    "start": ("profile", StartFails),
    "stop": ("profile", StopFails),
    "export": ("profile", ExportFails),
    "parse": ("breakdown_of", fail),
    "write": ("write_atomic", fail),
}


Case = tuple[str, int, int]  # what fails, on which rank, and how many steps are measured
CASES: list[Case] = [
    ("start", 1, 1),
    ("stop", 1, 2),
    ("export", 1, 1),
    ("parse", 1, 2),
    ("parse", 0, 1),
    ("write", 0, 2),
]


def measured_with_failing_profilers(
    folder: str, cases: list[Case]
) -> list[tuple[list[Any], Measurement, list[object]]]:
    """By case: profiles as rank 0 wrote them, its measurement in the end, what all ranks still say to each other."""
    found = []
    for where, failing, measured in cases:
        settings = TrialSettings(
            task="train", method="burst", model=SHAPE, seq_len=64, cp_size=2, dtype="fp32",
            steps=Steps(warmup=1, measured=measured),
        )  # fmt: skip
        world, written = arrange(settings, torch.device("cpu")), []

        def write(trial_dir: Path, measurement: Measurement, written: list[Any] = written) -> None:
            written.append(measurement.extra["profile"])
            write_measurement(trial_dir, measurement)

        directory = Path(folder, f"{where}{failing}{measured}")
        directory.mkdir(exist_ok=True)
        name, replacement = TROUBLE[where]
        used = replacement if world.rank == failing else getattr(capture, name)
        with mock.patch.object(capture, name, used), mock.patch.object(worker, "write_measurement", write):
            profiler = capture.StepProfiler(directory, world, capture.step_to_trace(settings))
            task = worker.TASKS[settings.task](settings, METHOD, world)
            worker.measure(task, profiler, directory, world.rank, PhaseTimer(shown=False))
        found.append((written, read_measurement(directory), world.gather(world.rank)))
    return found


@pytest.mark.parametrize(
    "cases", [CASES, *slow([(where, rank, 3 - steps) for where, rank, steps in CASES])], ids=["", "other steps"]
)
def test_a_profiler_error_on_one_rank_loses_only_the_trace(tmp_path: Path, cases: list[Case]) -> None:
    first, second = run_on_ranks(2, measured_with_failing_profilers, str(tmp_path), cases)
    for case, (written, figures, all_ranks), (nothing, _, _) in zip(cases, first, second, strict=True):
        _, failing, measured = case
        of = "measured_step" if measured == 1 else "extra_step"
        reason = f"rank {failing} has no trace of its step: OSError: as planned"
        # Before the trace, after it, and after the check of the trial.
        assert written == [unfinished(of), *[{"of": of, "reason": reason}] * 2], case  # type: ignore[arg-type]
        assert nothing == []
        assert all_ranks == [0, 1]
        assert figures.extra["profile"] == written[-1]
        assert (len(figures.step_seconds), len(figures.loss)) == (measured, 1 + measured)


def step_fails(directory: str) -> bool:
    settings = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=64)
    profiler = capture.StepProfiler(Path(directory), arrange(settings, torch.device("cpu")), "measured_step")
    with pytest.raises(KeyError), profiler.trace():
        raise KeyError("of the step")
    return torch.autograd._profiler_enabled()


def test_an_error_in_the_traced_step_itself_is_raised_and_the_profiler_stopped(tmp_path: Path) -> None:
    assert run_on_ranks(1, step_fails, str(tmp_path)) == [False]
