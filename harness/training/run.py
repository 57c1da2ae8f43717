"""One start of a training run: its directory, its ranks and their outcome."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from engine.atomic import write_atomic
from engine.measurement import write_json
from engine.plain_json import read_json
from engine.settings import Checkpoint, TrialSettings
from engine.training.config import Order, TrainingConfig
from engine.training.files import ORDER_FILE, OUTCOME_FILE, RUN_FILE, attempt_directory, checkpoints_directory
from engine.training.manifest import checkpoints, step_of
from engine.training.preflight import check_resume, check_start
from harness.base.errors import UsageError
from harness.launch.environment import render
from harness.launch.launcher import Job, Launcher, Outcome
from harness.launch.ports import port_was_taken
from harness.machine.this_machine import Machine
from harness.metrics.flops import work_of
from harness.metrics.hardware import hardware_for
from harness.plan.matrix import unsupported_reason
from harness.run.directory import next_attempt, opened_for_writing
from harness.spec.methods import method_module
from harness.training.planning import planned_for

OnProgress = Callable[[dict[str, object]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The machine, launcher and directory of one start."""

    machine: Machine
    launcher: Launcher
    run_dir: Path
    resume: bool
    commit: str
    again: Sequence[str]  # the command line that started this


def train(config: TrainingConfig, start: Start, on_progress: OnProgress, say: Callable[[str], None]) -> int:
    """Train, and write all files to `run_dir`; returns the exit code: 0 when all steps are done, else 1.

    Raises UsageError, having started and written nothing, when the run is impossible here, or does not fit its data,
    weights or checkpoints, or its directory cannot be used; also when the ranks refuse it.
    KeyboardInterrupt is re-raised once the ranks have ended.
    """
    settings, forecast = planned_for(config.settings, start.machine, start.run_dir if start.resume else None)
    config = replace(config, settings=settings)
    if reason := unsupported_reason(config.settings, start.machine):
        raise UsageError(f"this run cannot start: {reason}")
    if forecast is not None:
        say(f"checkpoint auto: {forecast.words}")
    order = replace(order_of(config, start.machine, resume=start.resume), plan=forecast)
    with _refusing():
        facts = check_start(order)
    with opened_for_writing(start.run_dir, resume=start.resume, marker=RUN_FILE) as (_, moved):
        if moved is not None:
            say(f"the earlier run in {start.run_dir} is now {moved}")
        if start.resume:
            with _refusing():
                check_resume(config, facts, start.run_dir)
        run_file = start.run_dir / RUN_FILE
        earlier = run_file.read_text(encoding="utf-8") if start.resume else None
        write_json(
            run_file,
            {
                "config": asdict(config),
                "commit": start.commit,
                "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )
        outcome, attempt = _attempt(order, start, on_progress)
        if outcome.status == "failed" and port_was_taken(outcome.reason):
            outcome, attempt = _attempt(order, start, on_progress)
        if outcome.status == "refused" and earlier is not None:
            write_atomic(run_file, earlier)  # the run stays as it was
    if outcome.status == "refused":
        raise UsageError(f"this run cannot start: {outcome.reason}")
    if outcome.status != "ok":
        step = _saved_step(start.run_dir)
        say(f"training ended ({outcome.status}): {outcome.reason}; see {os.path.relpath(attempt)}")
        say(f"the state after step {step} is saved, go on with: {_resuming(start)}" if step is not None
            else "no checkpoint was written; start again")  # fmt: skip
        return 1
    left = read_json(attempt / OUTCOME_FILE)
    if not left["finished"]:
        say(interruption(start))
        return 1
    return 0


def interruption(start: Start) -> str:
    """The sentence for the user who stopped a run."""
    step = _saved_step(start.run_dir)
    if step is None:
        return "stopped before a checkpoint was written; start again"
    return f"stopped; the state after step {step} is saved, go on with: {_resuming(start)}"


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """A ValueError within the block refuses the run."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"this run cannot start: {error}") from error


def _attempt(order: Order, start: Start, on_progress: OnProgress) -> tuple[Outcome, Path]:
    number = next_attempt(attempt_directory(start.run_dir, 1).parent)
    attempt = attempt_directory(start.run_dir, number).absolute()
    attempt.mkdir(parents=True)
    write_json(attempt / ORDER_FILE, asdict(order))
    return start.launcher.run(_job(order.config, attempt, start), on_progress), attempt


def order_of(config: TrainingConfig, machine: Machine, *, resume: bool) -> Order:
    """The order for the ranks, with the FLOPs of a step by the project's formula and the peak FLOP/s for MFU."""
    settings = config.settings
    hardware = hardware_for(machine.gpu_name) if machine.device == "cuda" and settings.dtype == "bf16" else None
    return Order(
        config=config,
        method=method_module(settings.method),
        resume=resume,
        # MFU counts no recomputation, and the model's own FLOPs are the same without it.
        model_flops_per_step=work_of(replace(settings, checkpoint=Checkpoint(every=0))).model,
        peak_tflops=hardware.peak_bf16_tflops if hardware else None,
    )


def _job(config: TrainingConfig, attempt: Path, start: Start) -> Job:
    settings: TrialSettings = config.settings
    environment = render(
        settings,
        device=start.machine.device,
        cores=start.machine.cores,
        host_ranks=settings.world_size,
        user=os.environ,
    )
    return Job(
        trial_id=start.run_dir.name,
        trial_dir=attempt,
        command=[sys.executable, "-m", "engine.training.worker", str(attempt)],
        ranks=settings.world_size,
        environment=environment,
        deadline_seconds=float("inf"),
        grace_seconds=config.save.grace_seconds,
        emulate_nodes=settings.emulate_nodes,
    )


def _saved_step(run_dir: Path) -> int | None:
    """The step of the newest checkpoint."""
    return next((step_of(path) for path in checkpoints(checkpoints_directory(run_dir))), None)


def _resuming(start: Start) -> str:
    return shlex.join([*(part for part in start.again if part != "--resume"), "--resume"])
