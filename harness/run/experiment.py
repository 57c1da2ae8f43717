"""Execute a plan: round after round of its trials, one record each, results at the end, resumable at any point."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.base.errors import UsageError
from harness.base.interrupts import end_requested, held
from harness.plan.matrix import nothing_can_run
from harness.records.record import RESULTS, Record, write_record
from harness.report.run_records import RunRecords
from harness.run.attempt import UNBOUNDED, Host, Turn, completed, execute, now, ranks_kind
from harness.run.bounds import Bounds
from harness.run.directory import RunDirectory, opened_for_writing
from harness.run.mixing import differences, refuse_mixing
from harness.run.progress import ProgressView
from harness.run.rounds import Order, Pending, Shuffle, alone, arranged, round_in, statuses_of
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
    bounds: Bounds = UNBOUNDED,
    mix: bool = False,
    order: Order = "random",
    shuffle: Shuffle = FRESHLY,
) -> int:
    """Run all trials, or `only` some of them, and leave records and results.csv in `run_dir`; returns the exit code, 0
    or 1.

    `text` is what DIR/experiment.yaml is to hold. `resume` None starts afresh: an earlier run in `run_dir` is moved
    aside. `again` is the command line that started this; the command that resumes it is made from it. `records`, of
    `run_dir` and not read yet, holds all of them afterwards. `bounds` may end it early. `order` is that of the trials
    of each round, and `shuffle` makes the random one. Raises UsageError, having run nothing, when no trial can run,
    when `run_dir` cannot be used, or when it holds records of another experiment, commit, GPU or driver, unless they are to
    `mix`.
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
        run = _Run(chosen, host, directory, records, view, repetition, resume, shuffle, bounds, order)
        run.check_hardware(say)
        found = run.mixed(experiment, {trial.id for trial in trials})
        if not mix:
            refuse_mixing(run_dir, found)
        elif found:
            say(f"mixed as asked: {run_dir} holds {'; '.join(found)}")
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
    if stopped is not None:
        say(f"{stopped.said}; go on with: {_resuming(again, *stopped.flags)}")
        if stopped.early:
            return 1
    if failed := run.failed():
        say(f"{failed} of {len(chosen)} trials failed; try them again with: {_resuming(again, '--retry-failed')}")
    return 1 if failed else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """Why a run ended before all of its trials had run."""

    said: str  # in words
    flags: tuple[str, ...] = ()  # beside --resume, to go on
    early: bool = True  # by an interruption or failures; else because as many trials were run as were asked for


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
        bounds: Bounds,
        order: Order,
    ) -> None:
        self._trials = {trial.id: trial for trial in trials}  # forming an id takes a digest of all settings
        self._host, self._directory, self._records = host, directory, records
        self._view, self._repetition, self._resume, self._shuffle = view, repetition, resume, shuffle
        self._pending = Pending(repetition, retry_failed=resume is not None and resume.retry_failed)
        self._bounds, self._order = bounds, order
        self._in_a_row = 0  # failures
        self._executed: set[str] = set()  # trials
        self._left_out: set[str] = set()  # trials beyond the number that the run may execute
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

    def mixed(self, experiment: str, planned: Collection[str]) -> list[str]:
        """How records that stay are unlike those that the run would add; see `harness.run.mixing`."""
        stay = [
            record
            for record in self._records.records()
            if record.trial_id in self._kept or record.trial_id not in self._trials
        ]
        adds = any(
            self._kept.get(each) is None or (trial.unsupported_reason is None and self._pending.lacks(self._kept[each]))
            for each, trial in self._trials.items()
        )
        return differences(stay, experiment, self._host, lambda record: record.trial_id in planned, adds=adds)

    def all_rounds(self) -> Stopped | None:
        """Run every round that is due; returns why it ended early, if it did."""
        number = 1
        while True:
            due = {each: trial for each, trial in self._trials.items() if self._due(each, trial, number)}
            if number > self._last_known() and not due:
                return self._limited()
            if (stopped := self._round(number, due)) is not None:
                return stopped
            number += 1

    def failed(self) -> int:
        """Trials that failed, or a round of which did."""
        return sum(not statuses_of(record) <= RESULTS for record in self._kept.values())

    def _due(self, trial_id: str, trial: Trial, number: int) -> bool:
        record = self._kept.get(trial_id)
        if record is not None and trial.unsupported_reason is not None:
            return False
        return self._pending.due(record, number) and self._may_execute(trial_id, trial)

    def _may_execute(self, trial_id: str, trial: Trial) -> bool:
        """Whether the bound on executed trials leaves room for this one."""
        room = not self._bounds.trials or len(self._executed) < self._bounds.trials
        if room or trial_id in self._executed or trial.unsupported_reason is not None:
            return True
        self._left_out.add(trial_id)
        return False

    def _limited(self) -> Stopped | None:
        if not self._left_out:
            return None
        left = "1 trial is" if len(self._left_out) == 1 else f"{len(self._left_out)} trials are"
        return Stopped(said=f"stopped by --limit {self._bounds.trials}; {left} left", early=False)

    def _last_known(self) -> int:
        """The number of the last round that the experiment asks for, or that a trial has."""
        numbers = (one.number for record in self._kept.values() for one in record.rounds)
        return max(self._repetition.rounds, max(numbers, default=1))

    def _round(self, number: int, due: Mapping[str, Trial]) -> Stopped | None:
        """Run one round; returns why it ended early, if it did."""
        kept = [self._kept[each] for each in self._trials if each in self._kept] if number == 1 else []
        total = len(due) + len(kept)
        if not total:
            return None
        self._view.begin(total, self._title(number))
        for record in kept:
            self._view.trial_ended(record, kept=True)
        # A round that was broken off goes on: its first places are taken, also by trials that are not run now.
        others = [record for record in self._records.records() if record.trial_id not in due]
        taken = sum(round_in(record, number) is not None for record in others)
        order = arranged(list(due.values()), self._order, lambda trial: ranks_kind(trial, self._host), self._shuffle)
        done_before = len(kept)
        for index, trial in enumerate(order):
            if not self._may_execute(trial.id, trial):
                continue
            if trial.unsupported_reason is None:
                self._executed.add(trial.id)
            done = f"after {done_before} of {total} trials"
            done_before += 1
            where = f"in {self._title(number)} {done}" if self._title(number) else done
            if end_requested() or (self._bounds.stop is not None and self._bounds.stop.passed):
                return self._interrupted(where)
            self._view.trial_began(trial)
            turn = Turn(round=number, place=taken + index + 1)
            kept_before = self._kept.get(trial.id)
            record = execute(trial, turn, kept_before, self._host, self._directory, self._view, self._bounds)
            self._kept[trial.id] = record
            self._records.put(record)
            self._records.write(self._directory.results, at_once=False)
            latest = alone(record, number)
            self._view.trial_ended(latest)
            if latest.status == "interrupted":
                return self._interrupted(where)
            if (stopped := self._too_many_failures(latest, number)) is not None:
                return stopped
        return None

    def _interrupted(self, where: str) -> Stopped:
        why = self._bounds.why_interrupted()
        return Stopped(said=f"{'interrupted' if 'the user' in why else why} {where}")

    def _too_many_failures(self, latest: Record, number: int) -> Stopped | None:
        if latest.status == "refused" and not latest.launcher:  # nothing was executed
            return None
        self._in_a_row = 0 if latest.status in RESULTS else self._in_a_row + 1
        if not 0 < self._bounds.failures_in_a_row <= self._in_a_row:
            return None
        failures = "1 failure" if self._in_a_row == 1 else f"{self._in_a_row} failures in a row"
        last = f"the last was {latest.trial_id} ({latest.status}: {latest.reason})"
        return Stopped(said=f"stopped after {failures}; {last}", flags=("--retry-failed",))

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
    typed, parts = [], iter(again)
    for part in parts:
        if part == "--stop-before":
            next(parts, None)  # its time will be over
        elif part not in ("--resume", "--retry-failed", "--set-aside-bad") and not part.startswith("--stop-before="):
            typed.append(part)
    return shlex.join([*typed, "--resume", *more])
