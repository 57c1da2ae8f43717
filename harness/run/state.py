"""The state of a run, read from its directory while it runs or later: each trial, counts, and the time that is left."""

from __future__ import annotations

import csv
import io
import re
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster.files.filesystem import open_regular
from engine.measurement import PROGRESS_FILE
from harness.launch.launcher import ProgressTail
from harness.records.record import RECORD_FILE, RESULTS, BadRecord, Record, RecordPlace
from harness.records.stored import EXPERIMENT_FILE, REPORT_FILE, RESULTS_FILE
from harness.run.directory import TRIAL_FILE, RunDirectory, command_of, round_of_files
from harness.run.rounds import finished_rounds, statuses_of
from harness.spec.trial import is_named

RUNNING, WAITING, UNUSABLE = "running", "waiting", "unusable"
REPORT_SECONDS = 2.0  # by which a copy of a run may have been given the times of its files in another order
_ID = re.compile(r"(?P<task>[a-z_]+)-(?P<method>.+)-s(?P<length>\d+)-cp(?P<cp>\d+)-[0-9a-f]{8}")
# In which parts of their ids two trials are alike, the most alike first. Their numbers differ, so no keys collide.
_ALIKE = (("task", "method", "cp", "length"), ("task", "cp", "length"), ("task", "length"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialState:
    """One trial of a run: its record's status, or running, waiting, or unusable for a record that cannot be read."""

    trial_id: str
    status: str
    reason: str = ""
    failed: bool = False  # it, or a round of it, ended by a failure
    failed_round: int = 0  # the last round that did; 0: none, or the record does not tell
    rounds_done: int = 0
    rounds: int = 1  # of the experiment, or more where the trial has more
    round_seconds: list[float] = field(default_factory=list)  # wall time of each finished round
    running_round: int = 0  # 0: it does not run
    running_seconds: float = 0.0  # of that round, so far
    progress: dict[str, object] = field(default_factory=dict)  # its last line


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """One run. `seconds_left` is an estimate from the finished trials that are most like each one that is left; None
    while none has finished, 0.0 where nothing is left."""

    experiment: str
    started_at: str
    running: bool
    trials: list[TrialState]
    bad: list[BadRecord]
    seconds_left: float | None
    command: list[str]  # that started it, as typed, secrets redacted; empty for a run from before it was kept
    reported: bool  # whether results.csv has the trials as they are, and the report is no older

    @property
    def counts(self) -> dict[str, int]:
        """Trials by status, the most frequent first."""
        return dict(Counter(trial.status for trial in self.trials).most_common())

    @property
    def failed(self) -> int:
        return sum(trial.failed for trial in self.trials)

    def failures_first(self) -> list[TrialState]:
        """Trials that failed, then those that run, then all others, each in the order of the plan."""
        return sorted(self.trials, key=lambda trial: (not trial.failed, trial.status != RUNNING))

    @property
    def left(self) -> bool:
        """Whether `--resume` would execute anything."""
        return any(map(_rounds_left, self.trials))

    @property
    def further_rounds(self) -> int:
        """Rounds to come of trials that have ended well in others."""
        return sum(_rounds_left(trial) for trial in self.trials if trial.status == "ok")


def next_step(state: RunState, run_dir: Path) -> str:
    """What to do with a run that does not run, as a sentence with the command; empty where nothing is to be done."""
    if state.running:
        return ""
    typed = state.command or ["burst", "run", str(run_dir / EXPERIMENT_FILE), "--out", str(run_dir)]
    command = _for_trials(command_of(run_dir, typed), [trial.trial_id for trial in state.trials if _needs_run(trial)])
    flags = (["--retry-failed"] if state.failed > len(state.bad) else []) + (["--set-aside-bad"] if state.bad else [])
    if state.left or state.bad:
        return f"go on with: {resuming(command, *flags)}"
    if flags:
        return f"try the failed ones again with: {resuming(command, *flags)}"
    if not state.reported:
        return f"the report is not that of all records; write it with: {shlex.join(['burst', 'report', str(run_dir)])}"
    return ""


def _needs_run(trial: TrialState) -> bool:
    return bool(_rounds_left(trial)) or trial.failed


def _for_trials(command: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The command without `--only` and `--again` where these name none of the `wanted` trials: what they name has
    ended, and a command that goes on with it would run nothing."""
    kept, names, parts = list[str](), list[str](), iter(command)
    for part in parts:
        option, equals, name = _option(part)
        if option not in ("--only", "--again"):
            kept.append(part)
        else:
            names.append(name if equals else next(parts, ""))
    return list(command) if any(is_named(each, name) for each in wanted for name in names) else kept


def resuming(command: Sequence[str], *more: str) -> str:
    """The command that goes on with a run that `command` started."""
    typed, parts = [], iter(command)
    for part in parts:
        option, equals, value = _option(part)
        if option == "--stop-before":
            if not equals:
                next(parts, None)  # its time will be over
        elif option == "--again":
            typed.append(f"--only{equals}{value}")  # what ran again already is not repeated once more
        elif option not in ("--resume", "--retry-failed", "--set-aside-bad"):
            typed.append(part)
    return shlex.join([*typed, "--resume", *more])


# Options of `burst run` that are looked for in a command line, which may have abbreviated them, and words that stand
# for themselves although one of these begins with them. Other beginnings of several options are refused when typed.
_SOUGHT = ("--only", "--again", "--stop-before", "--resume", "--retry-failed", "--set-aside-bad")
_WHOLE = ("--", "--retry", "--set")


def _option(part: str) -> tuple[str, str, str]:
    """The name of the option that a word is, in full where it is one that is sought, `=` and the value behind it."""
    name, equals, value = part.partition("=")
    if name.startswith("--") and name not in _WHOLE:
        name = next((option for option in _SOUGHT if option.startswith(name)), name)
    return name, equals, value


def state_of(run_dir: Path) -> RunState:
    """The state of the run in a directory. Raises UsageError when it is none."""
    directory = RunDirectory(run_dir)
    facts = directory.description()
    running, now = directory.in_use(), time.time()
    rounds = facts.get("rounds", 1)  # absent from runs before there were rounds
    trials, bad = [], []
    for trial_id in facts["trials"]:
        try:
            record = directory.record(trial_id)
        except ValueError as error:
            bad.append(BadRecord(RecordPlace(directory.trial(trial_id) / RECORD_FILE), str(error)))
            trials.append(TrialState(trial_id=trial_id, status=UNUSABLE, reason=str(error), failed=True))
            continue
        state = _recorded(trial_id, record, rounds)
        # Only a run under way has a trial whose files are of a round that its record lacks.
        if running and (record is None or (rounds > 1 and record.status == "ok")):
            state = _running(state, directory.trial(trial_id), record, now)
        trials.append(state)
    return RunState(
        experiment=facts["experiment"],
        started_at=facts["started_at"],
        running=running,
        trials=trials,
        bad=bad,
        seconds_left=seconds_left(trials),
        command=_words(facts.get("command")),
        reported=_reported(run_dir, trials),
    )


def _words(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else []


def _reported(run_dir: Path, trials: Sequence[TrialState]) -> bool:
    """Whether results.csv has every trial of the plan with a record, as it ended, and a report was written after it."""
    recorded = {(trial.trial_id, trial.status) for trial in trials if trial.status not in (WAITING, RUNNING, UNUSABLE)}
    results, report = run_dir / RESULTS_FILE, run_dir / REPORT_FILE
    try:
        with open_regular(results, "results") as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:
            rows = {(row.get("trial_id"), row.get("status")) for row in csv.DictReader(file)}
        return recorded <= rows and report.stat().st_mtime >= results.stat().st_mtime - REPORT_SECONDS
    except (OSError, ValueError, csv.Error):
        return not recorded


def _recorded(trial_id: str, record: Record | None, rounds: int) -> TrialState:
    if record is None:
        return TrialState(trial_id=trial_id, status=WAITING, rounds=rounds)
    finished = finished_rounds(record)
    failed = [one.number for one in finished if one.status not in RESULTS]
    return TrialState(
        trial_id=trial_id,
        status=record.status,
        reason=record.reason,
        failed=bool(statuses_of(record) - RESULTS - {"interrupted"}),
        failed_round=max(failed, default=0),
        rounds_done=len(finished),
        rounds=max(rounds, len(finished)),
        round_seconds=[one.wall_seconds for one in finished],
    )


def _running(state: TrialState, trial_dir: Path, record: Record | None, now: float) -> TrialState:
    """The state with the round that runs, where one does."""
    number = round_of_files(trial_dir)
    if not number or (record is not None and number in {one.number for one in finished_rounds(record)}):
        return state
    tail = ProgressTail(trial_dir / PROGRESS_FILE)
    tail.new()
    try:
        began = (trial_dir / TRIAL_FILE).stat().st_mtime
    except OSError:  # it has just ended
        began = now
    return replace(
        state,
        status=RUNNING,
        rounds=max(state.rounds, number),
        running_round=number,
        running_seconds=max(0.0, now - began),
        progress=tail.last,
    )


def seconds_left(trials: Sequence[TrialState]) -> float | None:
    """Wall seconds of all rounds that are left; see `RunState`."""
    known = _FinishedRounds(trials)
    total = 0.0
    for trial in trials:
        left = _rounds_left(trial)
        if not left:
            continue
        each = known.round_seconds(trial)
        if each is None:
            return None
        total += max(0.0, left * each - trial.running_seconds)
    return total


def _rounds_left(trial: TrialState) -> int:
    """Rounds that the run, or one that resumes it, is still to execute."""
    if trial.status in (WAITING, RUNNING, "interrupted"):
        return max(1, trial.rounds - trial.rounds_done)
    return trial.rounds - trial.rounds_done if trial.status == "ok" else 0


class _FinishedRounds:
    """Wall seconds of the rounds of a run that have finished."""

    def __init__(self, trials: Sequence[TrialState]) -> None:
        self._seconds: dict[tuple[str, ...], list[float]] = {}  # by task, method, CP size, length, and parts of these
        self._per_token: list[float] = []
        self._all: list[float] = []
        for trial in trials:
            self._all += trial.round_seconds
            if (parts := _ID.fullmatch(trial.trial_id)) is None:
                continue
            for keys in _ALIKE:
                self._seconds.setdefault(parts.group(*keys), []).extend(trial.round_seconds)
            self._per_token += [seconds / int(parts["length"]) for seconds in trial.round_seconds]
        self._medians = {key: statistics.median(found) for key, found in self._seconds.items() if found}
        self._median_per_token = statistics.median(self._per_token) if self._per_token else None

    def round_seconds(self, trial: TrialState) -> float | None:
        """Of one round: those of its own rounds, else of the trials most like it, else in proportion to its length."""
        if trial.round_seconds:
            return statistics.fmean(trial.round_seconds)
        if parts := _ID.fullmatch(trial.trial_id):
            for keys in _ALIKE:
                if (found := self._medians.get(parts.group(*keys))) is not None:
                    return found
            if self._median_per_token is not None:
                return self._median_per_token * int(parts["length"])
        return statistics.median(self._all) if self._all else None
