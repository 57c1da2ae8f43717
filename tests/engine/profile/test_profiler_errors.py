"""A profiler that fails on one rank: the figures are there before and after, and every rank goes on with the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from engine import worker
from engine.burst import METHOD
from engine.distributed import arrange
from engine.measurement import Measurement, read_measurement, unfinished, write_measurement
from engine.profile import capture
from engine.settings import ModelShape, Steps, TrialSettings
from engine.worker import PhaseTimer
from tests.ranks import run_on_ranks
from tests.slow import combinations

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


def measured_with_a_failing_profiler(
    directory: str, settings: TrialSettings, where: str, failing: int
) -> tuple[list[Any], Measurement, list[object]]:
    """(profiles as rank 0 wrote them, its measurement in the end, what all ranks still say to each other)."""
    world = arrange(settings, torch.device("cpu"))
    if world.rank == failing:
        name, replacement = TROUBLE[where]
        setattr(capture, name, replacement)
    written: list[Any] = []

    def write(trial_dir: Path, measurement: Measurement) -> None:
        written.append(measurement.extra["profile"])
        write_measurement(trial_dir, measurement)

    worker.write_measurement = write  # type: ignore[assignment]
    profiler = capture.StepProfiler(Path(directory), world, capture.step_to_trace(settings))
    task = worker.TASKS[settings.task](settings, METHOD, world)
    worker.measure(task, profiler, Path(directory), world.rank, PhaseTimer(shown=False))
    return written, read_measurement(Path(directory)), world.gather(world.rank)


@combinations(
    {
        "where, failing": [("start", 1), ("stop", 1), ("export", 1), ("parse", 1), ("parse", 0), ("write", 0)],
        "measured": [1, 2],
    }
)
def test_a_profiler_error_on_one_rank_loses_only_the_trace(
    tmp_path: Path, where: str, failing: int, measured: int
) -> None:
    settings = TrialSettings(
        task="train", method="burst", model=SHAPE, seq_len=64, cp_size=2, dtype="fp32",
        steps=Steps(warmup=1, measured=measured),
    )  # fmt: skip
    [(written, figures, all_ranks), (nothing, _, _)] = run_on_ranks(
        2, measured_with_a_failing_profiler, str(tmp_path), settings, where, failing
    )
    of = "measured_step" if measured == 1 else "extra_step"
    reason = f"rank {failing} has no trace of its step: OSError: as planned"
    # Before the trace, after it, and after the check of the trial.
    assert written == [unfinished(of), *[{"of": of, "reason": reason}] * 2]  # type: ignore[arg-type]
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
