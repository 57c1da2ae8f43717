"""Execute a plan: one trial after another, one record each, results and report at the end, resumable at any point."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.base.errors import UsageError
from harness.base.interrupts import end_requested, held
from harness.plan.matrix import nothing_can_run
from harness.records.record import RESULTS, Record, write_record
from harness.report.run_records import RunRecords
from harness.run.attempt import Host, completed, execute, now
from harness.run.directory import RunDirectory, opened_for_writing
from harness.run.progress import ProgressView
from harness.spec.trial import Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Which trials of an earlier run in the same directory are not executed again.

    Kept are those with a record, unless the trial was interrupted before it had its figures, or only the plan refused
    it (the machine may be another one now). `retry_failed` also executes again the trials whose end says nothing of the
    method: failed, timeout, hang, node_lost.
    """

    retry_failed: bool = False
    set_aside_bad: bool = False  # rename records that cannot be used and run their trials again, rather than refuse

    def keeps(self, record: Record) -> bool:
        if record.status == "interrupted" or (record.status == "refused" and not record.launcher):
            return False
        return record.status in RESULTS or not self.retry_failed


@held()  # signals end a run while ranks run and between trials; they wait while files are written
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
    this; the command that resumes it is made from it. `records`, of `run_dir` and not read yet, holds all of them
    afterwards. Raises UsageError, having changed nothing, when no trial can run or `run_dir` cannot be used.
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
            started_at=now(),
        )
        records = records or RunRecords(run_dir)
        # A record that cannot be used is reported now, not after hours of running.
        for bad, aside in records.read_usable(set_bad_aside=resume is not None and resume.set_aside_bad):
            say(f"{bad} cannot be used and is now {aside.name}")
        statuses: list[str] = []
        view.begin(len(trials))
        try:
            for trial in trials:
                if end_requested():
                    statuses.append("interrupted")
                    break
                record = _recorded(directory, records, trial.id) if resume is not None else None
                kept = record is not None and resume is not None and resume.keeps(record)
                if record is None or not kept:
                    view.trial_began(trial)
                    record = execute(trial, host, directory, view)
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
