"""Execute a plan: one record for each trial, results at the end, resumable at any point.

`run_experiment` opens the directory of the run; `Execution` has its rounds: which trials are due, in which order they
run, and what ends the run early.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.files.errors import counted
from engine.settings import TrialSettings
from harness.base.errors import UsageError
from harness.base.interrupts import deferred, end_requested
from harness.plan.matrix import at_length, nothing_can_run, planned_again, told_apart
from harness.records.provenance import redact, redacted_command
from harness.records.record import RESULTS, Record, Status, write_record
from harness.report.results import RunRecords, standing_twice
from harness.run.attempt import UNBOUNDED, RoundPosition, RunContext, completed, environment_of, execute, now
from harness.run.bounds import Bounds
from harness.run.directory import RunDirectory, opened_for_writing
from harness.run.progress import ProgressView
from harness.run.rounds import Order, PendingRounds, Shuffle, alone, arranged, changed_names, round_in, statuses_of
from harness.run.search import LengthSearch, group_of
from harness.run.state import resuming
from harness.spec.experiment import Search
from harness.spec.trial import Trial

NO_SEARCH = Search()
FRESHLY = random.SystemRandom().shuffle  # no seed: another order each time


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Which trials of an earlier run in the same directory are not executed again.

    Kept are those with a record, unless the trial was interrupted before it had its figures, or only the plan refused
    it (the machine may be another one now). `retry_failed` also executes again the trials, and the rounds of trials
    with figures, that did not end as a method can: wrong, failed, timeout, hang, node_lost. Trials of `again` are
    executed again however they ended; what they left stays among their attempts.
    """

    retry_failed: bool = False
    set_aside_bad: bool = False  # rename records that cannot be used and run their trials again, rather than refuse
    mix: bool = False  # beside records of another experiment, commit, GPU or driver
    again: frozenset[str] = frozenset()  # ids of trials

    def keeps(self, record: Record) -> bool:
        if record.status == "interrupted" or only_planned(record) or record.trial_id in self.again:
            return False
        return record.status in RESULTS or not self.retry_failed


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionOptions:
    """How the trials of a run are executed: none of it changes what a trial measures."""

    rounds: int = 1
    search: Search = NO_SEARCH
    bounds: Bounds = UNBOUNDED
    order: Order = "random"  # of the trials of each round
    shuffle: Shuffle = FRESHLY  # makes the random one


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """Why a run ended before all of its trials had run."""

    said: str  # in words
    flags: tuple[str, ...] = ()  # beside --resume, to go on
    early: bool = True  # by an interruption or failures; else because as many trials were run as were asked for


PLAIN = ExecutionOptions()


@deferred()  # signals end a run where its loops look: while ranks run and between trials
def run_experiment(
    experiment: str,
    trials: Sequence[Trial],
    host: RunContext,
    run_dir: Path,
    *,
    view: ProgressView,
    say: Callable[[str], None],
    options: ExecutionOptions = PLAIN,
    only: Sequence[Trial] | None = None,
    text: str = "",
    resume: Resume | None = None,
    again: Sequence[str] = (),
    records: RunRecords | None = None,
    shown: Sequence[Record] = (),
) -> int:
    """Run all trials, or `only` some of them, and leave records and results.csv in `run_dir`; returns the exit code, 0
    or 1.

    `text` is what DIR/experiment.yaml is to hold. `resume` None starts afresh: an earlier run in `run_dir` is moved
    aside. `again` is the command line that started this; the command that resumes it is made from it. `records`, of
    `run_dir` and not read yet, holds all of them afterwards. `shown` are records of other runs that plans of memory
    use. Raises UsageError, having run nothing, when no trial can run, when `run_dir` cannot be used, or when it
    holds records of another experiment, commit, GPU or driver that `resume` does not mix.
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
        for sentence in standing_twice([records]):
            say(sentence)

        started_at = now()
        changed = directory.changed_trees() if resume is not None else []

        def describe(ids: Sequence[str]) -> None:
            directory.describe(
                experiment=experiment,
                title=trials[0].title,
                trials=list(ids),
                rounds=options.rounds,
                launcher=host.launcher.name,
                commit=host.commit,
                changes=changed,
                started_at=started_at,
                command=redacted_command(again),
            )

        planned = dict.fromkeys(trial.id for trial in trials)

        def grown(ids: Sequence[str]) -> None:
            describe([*(planned | dict.fromkeys(ids))])

        run = Execution(chosen, host, directory, records, view, resume, options, grown, shown)
        run.check_hardware(say)
        if (most := run.rounds_again()) > options.rounds:
            raise UsageError(
                f"a trial of --again has {most} rounds in {run_dir}, and steps.rounds is {options.rounds}; give --set "
                f"steps.rounds={most}, so that it stays comparable"
            )
        found = run.mixed(experiment, trials, changed)
        if found and (resume is None or not resume.mix):
            raise UsageError(
                f"{run_dir} holds {'; '.join(found)}; give --out another directory, or --mix to keep both in one "
                "results.csv"
            )
        if found:
            say(f"mixed as asked: {run_dir} holds {'; '.join(found)}")
        if (unlike := run.other_variables()) is not None:
            say(unlike)
        if run.adds and host.changes and host.changes not in changed:
            changed.append(host.changes)
        describe([*planned])
        if text and (earlier := directory.keep_experiment(text)) is not None:
            say(f"the earlier experiment.yaml in {run_dir} has other contents and is now {earlier.name}")
        try:
            stopped = run.all_rounds()
        finally:
            view.end()
            # Where a file system ends the run, its own error says so, and not the one that results.csv meets then.
            ended_by = sys.exc_info()[1]
            with contextlib.suppress(*[OSError] if isinstance(ended_by, OSError) else []):
                records.write(directory.results)
    if stopped is not None:
        say(f"{stopped.said}; go on with: {resuming(again, *stopped.flags)}")
        if stopped.early:
            return 1
    if failed := run.failed():
        say(f"{failed} of {run.size} trials failed; try them again with: {resuming(again, '--retry-failed')}")
    return 1 if failed else 0


class Execution:
    """The rounds of one `burst run`."""

    def __init__(
        self,
        trials: Sequence[Trial],
        host: RunContext,
        directory: RunDirectory,
        records: RunRecords,
        view: ProgressView,
        resume: Resume | None,
        options: ExecutionOptions,
        grown: Callable[[Sequence[str]], None],
        shown: Sequence[Record] = (),
    ) -> None:
        """`grown` is called with the ids of trials that the search adds to the plan. `shown` are records of other runs;
        plans of memory use them as they use the records of this run."""
        self._trials = {trial.id: trial for trial in trials}  # forming an id takes a digest of all settings
        self._host, self._directory, self._records, self._view = host, directory, records, view
        self._resume, self._options, self._bounds, self._grown = resume, options, options.bounds, grown
        self._shown = shown
        self._pending = PendingRounds(options.rounds, retry_failed=resume is not None and resume.retry_failed)
        self._in_a_row = 0  # failures
        self._executed: set[str] = set()  # trials
        self._left_out: set[str] = set()  # trials beyond the number that the run may execute
        self._kept: dict[str, Record] = {}  # what trials have left that is not executed again, so far
        self._ended: dict[str, dict[int, Status]] = {}  # of the search: how lengths of each group ended
        self._search = LengthSearch(
            options.search,
            [trial for trial in trials if trial.unsupported_reason is None],
            lambda trial, length: at_length(trial, length, host.machine, [*shown, *records.records()]),
        )
        for trial_id in self._trials:
            self._keep(trial_id)

    def _keep(self, trial_id: str) -> bool:
        """Take over what an earlier run left of a trial, where that is not executed again."""
        record = _recorded(self._directory, self._records, trial_id) if self._resume is not None else None
        if record is None or self._resume is None or not self._resume.keeps(record):
            return False
        self._remember(record)
        return True

    def _remember(self, record: Record) -> None:
        self._kept[record.trial_id] = record
        if self._search.active and record.status != "interrupted" and not only_planned(record):
            lengths = self._ended.setdefault(group_of(record.settings), {})
            lengths[record.settings.seq_len] = record.status

    def rounds_again(self) -> int:
        """The most rounds that a trial has which is to run again, whatever it has."""
        named = frozenset() if self._resume is None else self._resume.again
        records = (record for record in self._records.records() if record.trial_id in named)
        return max((one.number for record in records for one in record.rounds), default=0)

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

    @property
    def adds(self) -> bool:
        """Whether the run executes some trial."""
        return any(
            self._kept.get(each) is None or (trial.unsupported_reason is None and self._pending.lacks(self._kept[each]))
            for each, trial in self._trials.items()
        )

    def mixed(self, experiment: str, trials: Sequence[Trial], changed: Collection[str]) -> list[str]:
        """How records that stay are unlike those that the run would add, in words; empty for none."""
        stay = [
            record
            for record in self._records.records()
            if record.trial_id in self._kept or record.trial_id not in self._trials
        ]
        planned = {trial.id for trial in trials}
        return _differences(
            stay,
            experiment,
            self._host,
            lambda record: record.trial_id in planned or self._search.has(record.settings),
            [trial.settings for trial in trials],
            adds=self.adds,
            changed=changed,
        )

    def other_variables(self) -> str | None:
        """One sentence where records that stay are of ranks with other environment variables than those of the run:
        ratios between trials of the two contain that difference. None where the run adds none."""
        names, count = set[str](), 0
        for record in self._kept.values() if self.adds else ():
            if only_planned(record) or not record.environment:
                continue
            ours = redact(environment_of(record.settings, self._host))
            if apart := changed_names(record.environment, ours):
                names |= set(apart)
                count += 1
        if not count:
            return None
        return (
            f"{counted(count, 'record')} here {'was' if count == 1 else 'were'} measured with other values of "
            f"{', '.join(sorted(names))} than this run has; set them as before if trials are to be compared"
        )

    def all_rounds(self) -> Stopped | None:
        """Run every round that is due; returns why it ended early, if it did."""
        self._grow(self._search.groups())
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

    @property
    def size(self) -> int:
        """Trials of the run, those that the search added among them."""
        return len(self._trials)

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
        return max(self._options.rounds, max(numbers, default=1))

    def _round(self, number: int, due: Mapping[str, Trial]) -> Stopped | None:
        """Run one round; returns why it ended early, if it did."""
        kept = [self._kept[each] for each in self._trials if each in self._kept] if number == 1 else []
        total, done = len(due) + len(kept), len(kept)
        if not total:
            return None
        title = self._title(number)
        self._view.begin(total, title)
        for record in kept:
            self._view.trial_ended(record, kept=True)
        # A round that was broken off goes on: its first places are taken, also by trials that are not run now.
        others = [record for record in self._records.records() if record.trial_id not in due]
        place = sum(round_in(record, number) is not None for record in others)
        order = arranged(list(due.values()), self._options.order, self._options.shuffle)
        queue = deque(self._search.ascending(order))
        while True:
            where = f"in {title} after {done} of {total} trials" if title else f"after {done} of {total} trials"
            if end_requested() or self._bounds.out_of_time:
                return self._interrupted(where)
            if not queue:
                return None
            trial = queue.popleft()
            if not self._may_execute(trial.id, trial):
                continue
            place += 1
            record = self._execute(trial, RoundPosition(round=number, place=place))
            done += 1
            if (stopped := self._take(record, number, where)) is not None:
                return stopped
            if number == 1 and self._search.active and (further := self._grow([group_of(trial.settings)])):
                queue.extend(further)
                total += len(further)
                self._view.begin(total, title, done)

    def _execute(self, trial: Trial, position: RoundPosition) -> Record:
        """Execute a trial, or record at once that it need not run."""
        self._view.trial_began(trial)
        before = self._kept.get(trial.id)
        trial = self._planned(trial, before)
        if trial.unsupported_reason is None and before is None:
            outcomes = self._ended.get(group_of(trial.settings), {})
            trial = replace(trial, unsupported_reason=self._search.needless(trial.settings, outcomes))
        if trial.unsupported_reason is None:
            self._executed.add(trial.id)
        return execute(trial, position, before, self._host, self._directory, self._view, self._bounds)

    def _planned(self, trial: Trial, before: Record | None) -> Trial:
        """The trial as it is to run now: as in its earlier rounds, or planned with what trials have shown so far."""
        if not trial.settings.planned:
            return trial
        if before is not None:
            return replace(trial, settings=before.settings, plan=before.plan)
        return planned_again(trial, self._host.machine, [*self._shown, *self._records.records()])

    def _take(self, record: Record, number: int, where: str) -> Stopped | None:
        """Keep the record that a trial has left; returns why the run ends with it, if it does."""
        self._remember(record)
        self._records.put(record)
        self._records.write(self._directory.results, at_once=False)
        latest = alone(record, number)
        self._view.trial_ended(latest)
        if latest.status == "interrupted":
            return self._interrupted(where)
        return self._too_many_failures(latest)

    def _grow(self, groups: Sequence[str]) -> list[Trial]:
        """Add the trials that the search wants next; returns those that no earlier run has left."""
        new: list[Trial] = []
        for group in groups:
            while (trial := self._search.further(group, self._ended.get(group, {}))) is not None:
                if trial.id in self._trials:
                    break  # it waits, or it cannot run
                self._trials[trial.id] = trial
                self._grown(list(self._trials))
                if not self._keep(trial.id):
                    new.append(trial)
                    break
        return new

    def _interrupted(self, where: str) -> Stopped:
        option = self._bounds.out_of_time
        return Stopped(said=f"{f'stopped by {option}' if option else 'interrupted'} {where}")

    def _too_many_failures(self, latest: Record) -> Stopped | None:
        if only_planned(latest):  # nothing was executed
            return None
        self._in_a_row = 0 if latest.status in RESULTS else self._in_a_row + 1
        if not 0 < self._bounds.failures_in_a_row <= self._in_a_row:
            return None
        failures = "1 failure" if self._in_a_row == 1 else f"{self._in_a_row} failures in a row"
        last = f"the last was {latest.trial_id} ({latest.status}: {latest.reason})"
        return Stopped(said=f"stopped after {failures}; {last}", flags=("--retry-failed",))

    def _title(self, number: int) -> str:
        """The round in words; empty where there is one only."""
        rounds = self._last_known()
        return f"round {number} of {rounds}" if rounds > 1 else ""


def only_planned(record: Record) -> bool:
    """Whether only the plan, or the search, refused the trial: nothing was executed."""
    return record.status == "refused" and not record.launcher


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


def _differences(
    records: Sequence[Record],
    experiment: str,
    host: RunContext,
    planned: Callable[[Record], bool],
    ours: Sequence[TrialSettings],
    *,
    adds: bool,
    changed: Collection[str],
) -> list[str]:
    """In which respects records that stay are unlike those that the run would add, in words; empty for none.

    `planned` says whether the experiment, whose trials are `ours`, has the trial of a record. `adds`: the run executes
    some trials; one that adds no record mixes no commits. `changed` are the digests of the changed trees from which the
    run has records so far. What one side does not know is no difference.
    """
    found: Counter[str] = Counter()
    gone = [record.settings for record in records if record.experiment == experiment and not planned(record)]
    if gone:
        apart = told_apart(gone, ours)
        found["of trials that this experiment does not have" + (f", with {apart}" if apart else "")] = len(gone)
    for record in records:
        if record.experiment != experiment:
            found[f"of experiment {record.experiment}, not {experiment}"] += 1
        if not adds or only_planned(record):
            continue
        driver = record.measurement.software.get("driver", "") if record.measurement else ""
        for what, then, today in (
            ("at commit", record.commit, host.commit),
            ("on", record.gpu, host.gpu),
            ("with driver", driver, host.machine.driver),
        ):
            if then and today and then not in today.split(" + "):
                found[f"{what} {then}, not {today}"] += 1
        if host.changes and record.commit == host.commit and set(changed) - {host.changes}:
            found[f"at commit {host.commit}, whose changes were others"] += 1
    return [f"{count} {'record' if count == 1 else 'records'} {what}" for what, count in found.items()]
