"""Execute a plan: one trial after another, one record each, results and report at the end, resumable at any point."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from engine.measurement import write_json
from engine.method import Method
from engine.settings import TrialSettings, to_json
from harness.base.errors import UsageError
from harness.base.interrupts import asked_to_end, held, released
from harness.launch import Job, Launcher, Outcome
from harness.launch.environment import render
from harness.launch.ports import port_was_taken
from harness.machine.this_machine import Machine
from harness.plan.matrix import nothing_can_run
from harness.records.provenance import commit, portable_command, redact
from harness.records.record import RESULTS, Record, write_record
from harness.report.run_records import RunRecords
from harness.run.directory import TRIAL_FILE, RunDirectory, opened_for_writing
from harness.run.measured import completed, measured
from harness.run.progress import ProgressView
from harness.spec.methods import method_module, method_named
from harness.spec.trial import Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Which trials of an earlier run in the same directory are not executed again.

    Kept are those with a record, unless the trial was interrupted before it had its figures, or only the plan refused
    it (the machine may be another one now). `retry_failed` also executes again what says nothing about the method:
    failed, timeout, hang, node_lost.
    """

    retry_failed: bool = False
    set_aside_bad: bool = False  # rename records that cannot be used and run their trials again, rather than refuse

    def keeps(self, record: Record) -> bool:
        if record.status == "interrupted" or (record.status == "refused" and not record.launcher):
            return False
        return record.status in RESULTS or not self.retry_failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Where a run takes place and how it is started: all that its trials share."""

    machine: Machine
    launcher: Launcher
    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))
    commit: str = dataclasses.field(default_factory=commit)


@held()  # signals end a run while ranks are at work and between trials; bookkeeping they wait for
def run_experiment(
    experiment: str,
    trials: Sequence[Trial],
    host: Host,
    run_dir: Path,
    *,
    view: ProgressView,
    say: Callable[[str], None],
    resume: Resume | None = None,
    again: Sequence[str] = (),
    records: RunRecords | None = None,
) -> int:
    """Run all trials and leave records and results.csv in `run_dir`; returns the exit code, 0 or 1.

    `resume` None starts afresh: an earlier run in `run_dir` is moved aside. `again` is the command line that started
    this, from which the one that resumes it is told. `records`, of `run_dir` and not read yet, holds all of them
    afterwards. Raises UsageError, having changed nothing, when no trial can run
    or `run_dir` cannot be used.
    """
    if problem := nothing_can_run(trials):
        raise UsageError(problem)
    with opened_for_writing(run_dir, resume=resume is not None) as (directory, moved):
        if moved is not None:
            say(f"the earlier run in {run_dir} is now {moved}")
        directory.describe(
            experiment=experiment,
            title=trials[0].title,
            trials=[trial.id for trial in trials],
            launcher=host.launcher.name,
            commit=host.commit,
            started_at=_now(),
        )
        records = records or RunRecords(run_dir)
        # A record that cannot be used is better named now than after hours of running.
        for bad, aside in records.read_usable(set_bad_aside=resume is not None and resume.set_aside_bad):
            say(f"{bad} cannot be used and is now {aside.name}")
        statuses: list[str] = []
        view.begin(len(trials))
        try:
            for trial in trials:
                if asked_to_end():
                    statuses.append("interrupted")
                    break
                record = _recorded(directory, records, trial.id) if resume is not None else None
                kept = record is not None and resume is not None and resume.keeps(record)
                if record is None or not kept:
                    view.trial_began(trial)
                    record = _execute(trial, host, directory, view)
                    records.put(record)
                    records.write(directory.results, at_once=False)
                view.trial_ended(record, kept=kept)
                statuses.append(record.status)
                if record.status == "interrupted":
                    break
        finally:
            view.end()
            records.write(directory.results)
    _say_how_to_go_on(statuses, len(trials), again, say)
    return 0 if all(status in RESULTS for status in statuses) else 1


def _recorded(directory: RunDirectory, records: RunRecords, trial_id: str) -> Record | None:
    """The record that an earlier run left of a trial, completed where the user stopped it with its figures on disk."""
    before = records.get(trial_id)
    if before is None:
        return None
    record = completed(before, directory.trial(trial_id))
    if record != before:
        write_record(directory.trial(trial_id), record)
        records.put(record)
    return record


def _execute(trial: Trial, host: Host, directory: RunDirectory, view: ProgressView) -> Record:
    """One trial, tried a second time where only a port it needed had gone to another process: that says nothing about
    the method, and the next attempt gets another port."""
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
        started_at=_now(),
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
    """Of the settings, those that a process cannot take on and give up again: cuBLAS reads its own only once."""
    return f"deterministic {settings.deterministic}"


def _say_how_to_go_on(statuses: Sequence[str], total: int, again: Sequence[str], say: Callable[[str], None]) -> None:
    """The next command, when there is a reason to give one."""
    if "interrupted" in statuses:
        done = sum(status != "interrupted" for status in statuses)
        say(f"interrupted after {done} of {total} trials; go on with: {_resuming(again)}")
    elif failed := sum(status not in RESULTS for status in statuses):
        say(f"{failed} of {total} trials failed; try them again with: {_resuming(again, '--retry-failed')}")


def _resuming(again: Sequence[str], *more: str) -> str:
    flags = ("--resume", *more)
    return shlex.join(
        [*(part for part in again if part not in ("--resume", "--retry-failed", "--set-aside-bad")), *flags]
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
