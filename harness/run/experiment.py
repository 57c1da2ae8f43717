"""Execute a plan: round after round of its trials, one record each, results at the end, resumable at any point."""

from __future__ import annotations

import dataclasses
import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.base.errors import UsageError
from harness.base.interrupts import end_requested, held
from harness.plan.matrix import nothing_can_run, planned_again
from harness.records.record import RESULTS, Record, write_record
from harness.report.run_records import RunRecords
from harness.run.attempt import Host, Turn, completed, execute, now, ranks_kind
from harness.run.directory import RunDirectory, opened_for_writing
from harness.run.progress import ProgressView
from harness.run.rounds import Pending, Shuffle, alone, in_random_order, round_in, statuses_of
from harness.spec.repetition import Repetition
from harness.spec.trial import Trial

ONCE = Repetition()
FRESHLY = random.SystemRandom().shuffle  # no seed: another order each time


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Which trials of an earlier run in the same directory are not executed again.

    Kept are those with a record, unless the trial was interrupted before it had its figures, or only the plan refused
    it (the machine may be another one now). `retry_failed` also executes again the trials, and the rounds of trials
    with figures, whose end says nothing of the method: failed, timeout, hang, node_lost.
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
    repetition: Repetition = ONCE,
    only: Sequence[Trial] | None = None,
    text: str = "",
    resume: Resume | None = None,
    again: Sequence[str] = (),
    records: RunRecords | None = None,
    shuffle: Shuffle = FRESHLY,
) -> int:
    """Run all trials, or `only` some of them, and leave records and results.csv in `run_dir`; returns the exit code, 0
    or 1.

    `text` is what DIR/experiment.yaml is to hold. `resume` None starts afresh: an earlier run in `run_dir` is moved
    aside. `again` is the command line that started this; the command that resumes it is made from it. `records`, of
    `run_dir` and not read yet, holds all of them afterwards. `shuffle` makes the order of each round. Raises
    UsageError, having run nothing, when no trial can run or `run_dir` cannot be used.
    """
    chosen = trials if only is None else only
    if problem := nothing_can_run(chosen):
        raise UsageError(problem)
    with opened_for_writing(run_dir, resume=resume is not None) as (directory, moved):
        if moved is not None:
            say(f"the earlier run in {run_dir} is now {moved}")
        records = records or RunRecords(run_dir)
        # A record that cannot be used is reported now, not after hours of running.
        for bad, aside in records.read_usable(set_bad_aside=resume is not None and resume.set_aside_bad):
            say(f"{bad} cannot be used and is now {aside.name}")
        run = _Run(chosen, host, directory, records, view, repetition, resume, shuffle)
        run.check_hardware(say)
        directory.describe(
            experiment=experiment,
            title=trials[0].title,
            trials=[trial.id for trial in trials],
            rounds=repetition.rounds,
            interval=repetition.interval,
            launcher=host.launcher.name,
            commit=host.commit,
            started_at=now(),
        )
        if text and (earlier := directory.keep_experiment(text)) is not None:
            say(f"the earlier experiment.yaml in {run_dir} means another experiment and is now {earlier.name}")
        try:
            stopped = run.all_rounds()
        finally:
            view.end()
            records.write(directory.results)
    if stopped:
        say(f"interrupted {stopped}; go on with: {_resuming(again)}")
        return 1
    if failed := run.failed():
        say(f"{failed} of {len(chosen)} trials failed; try them again with: {_resuming(again, '--retry-failed')}")
    return 1 if failed else 0


class _Run:
    """The rounds of one `burst run`."""

    def __init__(
        self,
        trials: Sequence[Trial],
        host: Host,
        directory: RunDirectory,
        records: RunRecords,
        view: ProgressView,
        repetition: Repetition,
        resume: Resume | None,
        shuffle: Shuffle,
    ) -> None:
        self._trials = {trial.id: trial for trial in trials}  # forming an id takes a digest of all settings
        self._host, self._directory, self._records = host, directory, records
        self._view, self._repetition, self._resume, self._shuffle = view, repetition, resume, shuffle
        self._pending = Pending(repetition, retry_failed=resume is not None and resume.retry_failed)
        self._kept: dict[str, Record] = {}  # what trials have left that is not executed again, so far
        for trial_id in self._trials:
            record = _recorded(directory, records, trial_id) if resume is not None else None
            if record is not None and resume is not None and resume.keeps(record):
                self._kept[trial_id] = record

    def check_hardware(self, say: Callable[[str], None]) -> None:
        """Raise UsageError where rounds of one trial would be measured on different hardware; say where this machine
        cannot run the rounds that are missing."""
        cannot = 0
        for trial_id, trial in self._trials.items():
            record = self._kept.get(trial_id)
            if record is None or not self._pending.lacks(record):
                continue
            if record.gpu != self._host.gpu:
                raise UsageError(
                    f"{self._directory.trial(trial_id)} was measured on {record.gpu or 'an unknown GPU'}, and further "
                    f"rounds here would be measured on {self._host.gpu}; add them there, or give --out another "
                    "directory"
                )
            cannot += trial.unsupported_reason is not None
        if cannot:
            say(f"{cannot} trials with figures lack rounds that this machine cannot run; they are kept as they are")

    def all_rounds(self) -> str:
        """Run every round that is due; returns where the user stopped it in words, else nothing."""
        number = 1
        while True:
            due = {each: trial for each, trial in self._trials.items() if self._due(each, trial, number)}
            if number > self._last_known() and not due:
                return ""
            if stopped := self._round(number, due):
                return stopped
            number += 1

    def failed(self) -> int:
        """Trials that failed, or a round of which did."""
        return sum(not statuses_of(record) <= RESULTS for record in self._kept.values())

    def _due(self, trial_id: str, trial: Trial, number: int) -> bool:
        record = self._kept.get(trial_id)
        if record is not None and trial.unsupported_reason is not None:
            return False
        return self._pending.due(record, number)

    def _last_known(self) -> int:
        """The number of the last round that the experiment asks for, or that a trial has."""
        numbers = (one.number for record in self._kept.values() for one in record.rounds)
        return max(self._repetition.rounds, max(numbers, default=1))

    def _round(self, number: int, due: Mapping[str, Trial]) -> str:
        """Run one round; returns where the user stopped it in words, else nothing."""
        kept = [self._kept[each] for each in self._trials if each in self._kept] if number == 1 else []
        total = len(due) + len(kept)
        if not total:
            return ""
        self._view.begin(total, self._title(number))
        for record in kept:
            self._view.trial_ended(record, kept=True)
        # A round that was broken off goes on: its first places are taken, also by trials that are not run now.
        others = [record for record in self._records.records() if record.trial_id not in due]
        taken = sum(round_in(record, number) is not None for record in others)
        order = in_random_order(list(due.values()), lambda trial: ranks_kind(trial, self._host), self._shuffle)
        for index, trial in enumerate(order):
            done = f"after {len(kept) + index} of {total} trials"
            where = f"in {self._title(number)} {done}" if self._title(number) else done
            if end_requested():
                return where
            self._view.trial_began(trial)
            turn = Turn(round=number, place=taken + index + 1)
            before = self._kept.get(trial.id)
            trial = self._planned(trial, before)
            record = execute(trial, turn, before, self._host, self._directory, self._view)
            self._kept[trial.id] = record
            self._records.put(record)
            self._records.write(self._directory.results, at_once=False)
            latest = alone(record, number)
            self._view.trial_ended(latest)
            if latest.status == "interrupted":
                return where
        return ""

    def _planned(self, trial: Trial, before: Record | None) -> Trial:
        """The trial as it is to run now: as in its earlier rounds, or planned with what trials have shown so far."""
        if not trial.settings.planned:
            return trial
        if before is not None:
            return dataclasses.replace(trial, settings=before.settings, plan=before.plan)
        return planned_again(trial, self._host.machine, self._records.records())

    def _title(self, number: int) -> str:
        """The round in words; empty where there is one only."""
        rounds = self._repetition.rounds
        if number > rounds:
            return f"round {number}, for the interval"
        return f"round {number} of {rounds}" if rounds > 1 or self._repetition.interval else ""


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


def _resuming(again: Sequence[str], *more: str) -> str:
    flags = ("--resume", *more)
    return shlex.join(
        [*(part for part in again if part not in ("--resume", "--retry-failed", "--set-aside-bad")), *flags]
    )
