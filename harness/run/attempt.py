"""One attempt at a trial, from its directory to its record; also of a trial that ended after it had measured."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.measurement import Measurement, read_measurement, write_json
from engine.method import Method
from engine.profile.timeline import breakdown_of
from engine.profile.unfinished import PROFILE, TRACE_FILE, cut_off
from engine.settings import TrialSettings, to_json
from harness.base.interrupts import released
from harness.launch.environment import render
from harness.launch.launcher import Job, Launcher, Outcome
from harness.launch.ports import port_was_taken
from harness.machine.this_machine import Machine
from harness.records.provenance import commit, portable_command, redact
from harness.records.record import Record, write_record
from harness.run.directory import TRIAL_FILE, RunDirectory
from harness.run.progress import ProgressView
from harness.spec.methods import method_module, method_named
from harness.spec.trial import Trial

_UNREADABLE = (OSError, ValueError, KeyError, TypeError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The machine, launcher, environment and commit that all trials of a run share."""

    machine: Machine
    launcher: Launcher
    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))
    commit: str = dataclasses.field(default_factory=commit)


def execute(trial: Trial, host: Host, directory: RunDirectory, view: ProgressView) -> Record:
    """Execute one trial, a second time where another process had taken its port: the cause is not the method, and the
    next attempt gets another port."""
    record = _attempt(trial, host, directory, view)
    if record.status == "failed" and port_was_taken(record.reason):
        record = _attempt(trial, host, directory, view)
    return record


def _attempt(trial: Trial, host: Host, directory: RunDirectory, view: ProgressView) -> Record:
    """One attempt at a trial, from its directory to its record. Ctrl-C ends it as `interrupted`."""
    method = method_named(trial.settings.method)
    trial_dir = directory.trial(trial.id).absolute()
    attempt = directory.begin_attempt(trial.id)
    record = Record(
        trial_id=trial.id,
        experiment=trial.experiment,
        title=trial.title,
        settings=trial.settings,
        system=method.system,
        status="refused",
        reason=trial.unsupported_reason or "",
        gpu=host.machine.gpu_name or "cpu",
        commit=host.commit,
        started_at=now(),
        attempts=attempt,
    )
    if trial.unsupported_reason is None:
        job = _job(trial, method, trial_dir, host)
        write_json(
            trial_dir / TRIAL_FILE,
            {"settings": to_json(trial.settings), "method": method_module(trial.settings.method)}
            | ({"profile": True} if trial.profile else {}),
        )
        try:
            with released():
                outcome = host.launcher.run(job, view.step)
        except KeyboardInterrupt:
            elapsed = datetime.now(UTC) - datetime.fromisoformat(record.started_at)
            outcome = Outcome(
                status="interrupted",
                reason="stopped by the user; --resume runs it again",
                wall_seconds=elapsed.total_seconds(),
                hosts=[host.machine.hostname],
            )
        outcome, measurement = measured(outcome, method, trial_dir)
        record = dataclasses.replace(
            record,
            status=outcome.status,
            reason=outcome.reason,
            measurement=measurement,
            launcher=host.launcher.name,
            hosts=outcome.hosts,
            environment=redact(job.environment),
            command=portable_command(job.command, trial_dir),
            wall_seconds=round(outcome.wall_seconds, 3),
            ranks_turn=outcome.turn,
        )
    write_record(trial_dir, record)
    return record


def _job(trial: Trial, method: Method, trial_dir: Path, host: Host) -> Job:
    settings = trial.settings
    environment = render(
        settings,
        device=host.machine.device,
        cores=host.machine.cores,
        host_ranks=settings.world_size // (host.machine.nodes_for(settings.world_size) or 1),
        user=host.environment,
    )
    return Job(
        trial_id=trial.id,
        trial_dir=trial_dir,
        command=method.command(trial_dir),
        ranks=settings.world_size,
        environment=environment,
        deadline_seconds=trial.deadline_seconds,
        emulate_nodes=settings.emulate_nodes,
        share=_for_good(settings) if trial.share_ranks else None,
    )


def _for_good(settings: TrialSettings) -> str:
    """The settings that a process cannot change: cuBLAS reads its own only once."""
    return f"deterministic {settings.deterministic}"


def measured(outcome: Outcome, method: Method, trial_dir: Path) -> tuple[Outcome, Measurement | None]:
    """The outcome as it is recorded, and the figures where it is ok.

    A trial without a measurement has failed, even when all ranks exited with 0. One whose measurement was on disk
    before its trace failed is ok, with a reason. `trial_dir` holds the files of this attempt alone.
    """
    if outcome.status != "ok":
        return _before_the_trace(outcome, trial_dir)
    try:
        return outcome, method.read(trial_dir)
    except _UNREADABLE as error:
        reason = f"all ranks ended well, but no measurement could be read ({error}); see logs/rank0.log"
        return dataclasses.replace(outcome, status="failed", reason=reason), None


def completed(record: Record, trial_dir: Path) -> Record:
    """The record of a trial that the user stopped: ok where its figures were on disk by then, else unchanged."""
    how = f"{record.status}: {record.reason.partition(';')[0]}"
    found = _left_before_the_trace(trial_dir, how) if record.status == "interrupted" else None
    if found is None:
        return record
    return dataclasses.replace(record, status="ok", reason=f"measured, and then {how}", measurement=found)


def _before_the_trace(outcome: Outcome, trial_dir: Path) -> tuple[Outcome, Measurement | None]:
    """For a trial that did not end well: the measurement that the engine's worker wrote before its trace.

    None where the user stopped the run, which ends with that trial; see `completed`.
    """
    how = f"{outcome.status}: {outcome.reason}"
    found = None if outcome.status == "interrupted" else _left_before_the_trace(trial_dir, how)
    if found is None:
        return outcome, None
    return dataclasses.replace(outcome, status="ok", reason=f"measured, and then {how}"), found


def _left_before_the_trace(trial_dir: Path, how: str) -> Measurement | None:
    """Figures of a trial that ended during its trace as `how` says, and what rank 0's trace holds."""
    try:
        found = read_measurement(trial_dir)
    except _UNREADABLE:
        return None
    if PROFILE not in found.extra:  # without a trace the measurement is the last step, so the fault is another one
        return None
    profile = cut_off(found.extra[PROFILE], how)
    found.extra[PROFILE] = profile | (_of_rank_0(trial_dir) if "span_seconds" not in profile else {})
    return found


def _of_rank_0(trial_dir: Path) -> dict[str, Any]:
    """The breakdown of rank 0's trace, written before the ranks compared theirs; empty where there is none."""
    try:
        events = json.loads(gzip.decompress((trial_dir / TRACE_FILE).read_bytes()))["traceEvents"]
        breakdown = breakdown_of(events)
    except (*_UNREADABLE, EOFError, zlib.error):
        return {}
    return {"on": breakdown.on, "rank": 0, "span_seconds": breakdown.span_seconds, "seconds": dict(breakdown.seconds)}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
