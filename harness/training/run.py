"""One start of a training run: its directory, its ranks, its outcome, and its end ahead of that of a Slurm job."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from engine.atomic import write_atomic
from engine.data import PYTHON_DOCS
from engine.measurement import write_json
from engine.reader import read_json
from engine.settings import Checkpoint, TrialSettings
from engine.training.config import Order, TrainingConfig
from engine.training.files import ORDER_FILE, OUTCOME_FILE, RUN_FILE, attempt_directory, checkpoints_directory
from engine.training.manifest import checkpoints
from engine.training.preflight import check_resume, check_start
from harness.base.errors import UsageError
from harness.base.interrupts import deferred
from harness.launch.environment import render
from harness.launch.launcher import Exchange, Job, Launcher, Outcome
from harness.launch.ports import port_was_taken
from harness.machine.this_machine import Machine
from harness.metrics.flops import work_of
from harness.metrics.hardware import hardware_for
from harness.plan.unsupported import unsupported_reason
from harness.records.provenance import redacted_command
from harness.run.bounds import RUN_RESERVE, StopTime, TimeReserve, ahead_of_allocation, job_end
from harness.run.directory import next_attempt, opened_for_writing, refuse_no_run
from harness.spec.methods import method_module
from harness.training.gathering import Gathering
from harness.training.planning import planned_for, settings_that_fit
from harness.training.progress import next_step

_SHARE = 0.25  # of a job's time: the most that is kept for saving


def stop_time(say: Callable[[str], None], grace_seconds: float) -> StopTime | None:
    """The time by which the run is to have ended, with `grace_seconds` and a minute for saving; None outside a job and
    in a job without a limit. Where the limit is not known, `say` is called with one sentence."""
    end = job_end(say, otherwise="with sbatch --signal=B:USR1@SECONDS the run is saved that long before it")
    return ahead_of_allocation(end, TimeReserve(seconds=grace_seconds + RUN_RESERVE.seconds, share=_SHARE))


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
    over_nodes: bool = False  # ranks run on hosts that `--nodes` names, with other working directories and storage
    exchange: Exchange | None = None  # of hosts that have directories of the run of their own
    # Started by torchrun: the line in place of `again` that starts with other sizes on the hosts that are left.
    resized: Callable[[Mapping[str, int], Machine], Sequence[str]] | None = None


def train(config: TrainingConfig, start: Start, on_progress: OnProgress, say: Callable[[str], None]) -> int:
    """Train, and write all files to `run_dir`; returns the exit code: 0 when all steps are done, else 1.

    Raises UsageError, having started and written nothing, when the run is impossible here, or does not fit its data,
    weights or checkpoints, or its directory cannot be used; also when the ranks refuse it.
    KeyboardInterrupt is re-raised once the ranks have ended.
    """
    own = start.exchange is not None  # then another host may hold the run
    if start.resume and not own:  # first: the other refusals are about a run
        refuse_no_run(start.run_dir, RUN_FILE)
    order = planned_order(config, start.machine, start.run_dir, resume=start.resume)
    if order.plan is not None:
        tried = "" if order.plan.fits else "; the run starts all the same, with the least that can be kept"
        say(f"checkpoint auto: {order.plan.words}{tried}")
    if start.over_nodes:
        order = replace(order, config=_with_absolute_paths(order.config))
    asked, config = config, order.config
    with refusing():
        facts, note = check_start(order)
    if note:
        say(note)
    run_file = start.run_dir / RUN_FILE
    resumes = start.resume and (not own or run_file.is_file())
    with opened_for_writing(start.run_dir, resume=resumes, marker=RUN_FILE) as (_, moved):
        if moved is not None:
            say(f"the earlier run in {start.run_dir} is now {moved}")
        if start.resume:
            done = refuse_checkpoints(config, facts, start.run_dir, elsewhere=start.over_nodes or own)
            if done == config.steps:
                say(f"all {config.steps} steps of {start.run_dir} are done already; raise steps to train on")
        earlier = run_file.read_text(encoding="utf-8") if resumes else None
        describe_run(start.run_dir, config, start.commit, start.again)
        outcome, attempt = _attempt(order, start, on_progress, say)
        if outcome.status == "failed" and port_was_taken(outcome.reason):
            outcome, attempt = _attempt(order, start, on_progress, say)
        if outcome.status == "refused" and earlier is not None:
            write_atomic(run_file, earlier)  # the run stays as it was
    if outcome.status == "refused":
        raise UsageError(f"this run cannot start: {outcome.reason}")
    if outcome.status != "ok":
        left = replace(start.machine, nodes=start.machine.nodes - len(outcome.lost))
        # As asked for: what was planned for all hosts need not be possible on fewer, where it is planned again.
        fewer = {} if not outcome.lost or left.nodes < 1 else (settings_that_fit(asked, left) or {})
        again = start.resized(fewer, left) if start.resized is not None and fewer else start.again
        say(
            f"training ended ({outcome.status}): {outcome.reason}; see {os.path.relpath(attempt)}; "
            + next_step(start.run_dir, again, fewer)
        )
        return 1
    if not cast(dict[str, object], read_json(attempt / OUTCOME_FILE))["finished"]:
        say(interruption(start))
        return 1
    return 0


def interruption(start: Start) -> str:
    """The sentence for the user who stopped a run."""
    return f"stopped; {next_step(start.run_dir, start.again)}"


def planned_order(config: TrainingConfig, machine: Machine, run: Path, *, resume: bool) -> Order:
    """The order for the ranks, with what the planner chose (`planned_for`). Raises UsageError when the run is
    impossible here; for one that is resumed it names the parallel sizes with which it goes on, where there are some."""
    settings, forecast = planned_for(config.settings, machine, run if resume else None)
    if reason := unsupported_reason(settings, machine):
        fitting = settings_that_fit(config, machine) if resume else None
        values = " ".join(f"--set {name}={value}" for name, value in (fitting or {}).items())
        raise UsageError(f"this run cannot start: {reason}" + (f"; here it goes on with {values}" if values else ""))
    return replace(order_of(replace(config, settings=settings), machine, resume=resume), plan=forecast)


def describe_run(run_dir: Path, config: TrainingConfig, commit: str, command: Sequence[str]) -> None:
    """Write training.json, which makes a directory that of a training run."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"config": asdict(config), "commit": commit, "started_at": started, "command": redacted_command(command)}
    write_json(run_dir / RUN_FILE, facts)


def new_attempt(run_dir: Path, order: Order) -> Path:
    """The directory of one more start, with its order."""
    number = next_attempt(attempt_directory(run_dir, 1).parent)
    attempt = attempt_directory(run_dir, number).absolute()
    attempt.mkdir(parents=True)
    write_json(attempt / ORDER_FILE, asdict(order))
    return attempt


def _with_absolute_paths(config: TrainingConfig) -> TrainingConfig:
    """For ranks with other working directories."""
    data = config.settings.data
    where = data if data == PYTHON_DOCS else str(Path(data).absolute())
    weights = str(Path(config.init_from).absolute()) if config.init_from else ""
    return replace(config, settings=replace(config.settings, data=where), init_from=weights)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """A ValueError within the block refuses the run."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"this run cannot start: {error}") from error


def refuse_checkpoints(config: TrainingConfig, facts: dict[str, object], run_dir: Path, *, elsewhere: bool) -> int:
    """The step of the checkpoint here that the run resumes from, or 0. Raises UsageError when it cannot. With
    `elsewhere`, another host may have one, so a host without any checkpoint is no error."""
    if elsewhere and not checkpoints(checkpoints_directory(run_dir)):
        return 0
    with refusing():
        return check_resume(config, facts, run_dir)


def _attempt(order: Order, start: Start, on_progress: OnProgress, say: Callable[[str], None]) -> tuple[Outcome, Path]:
    attempt = new_attempt(start.run_dir, order)
    job = _job(order.config, attempt, start)
    if start.exchange is not None:
        job = replace(job, exchange=start.exchange)
    elif start.over_nodes:
        job = replace(job, exchange=Gathering(start.run_dir.absolute(), keep=order.config.save.keep, say=say))
    with deferred():  # the launcher looks, and a second signal ends at once
        return start.launcher.run(job, on_progress), attempt


def order_of(config: TrainingConfig, machine: Machine, *, resume: bool) -> Order:
    """The order for the ranks, with the FLOPs of a step by the project's formula and the peak FLOP/s for MFU."""
    settings = config.settings
    hardware = hardware_for(machine.gpu_name) if machine.device == "cuda" and settings.dtype == "bf16" else None
    # MFU counts no recomputation, and the model's own FLOPs are the same without it.
    work = work_of(replace(settings, checkpoint=Checkpoint(every=0)))
    return Order(
        config=config,
        method=method_module(settings.method),
        resume=resume,
        model_flops_per_step=work.model,
        attention_flops_per_step=3 * work.attention if settings.packs else 0.0,
        peak_tflops=hardware.peak_bf16_tflops if hardware else None,
    )


def _job(config: TrainingConfig, attempt: Path, start: Start) -> Job:
    settings: TrialSettings = config.settings
    environment = render(
        settings,
        device=start.machine.device,
        cores=start.machine.cores,
        host_ranks=settings.world_size // (start.machine.nodes_for(settings.world_size) or 1),
        user=os.environ,
    )
    return Job(
        trial_id=start.run_dir.name,
        trial_dir=attempt,
        command=[sys.executable, "-m", "engine.training.loop", str(attempt)],
        ranks=settings.world_size,
        environment=environment,
        deadline_seconds=float("inf"),
        grace_seconds=config.save.grace_seconds,
        emulate_nodes=settings.emulate_nodes,
        again="",
    )
