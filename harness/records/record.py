"""One trial leaves one record: what was asked, where it ran, what came out, and how it ended.

A record is written aside and renamed, so that a reader never sees half a record. Derived figures (tokens per second,
MFU) are computed on reading by `harness.metrics.throughput`: a corrected formula needs no rerun.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from engine.measurement import Forecast, GpuState, Measurement, write_json
from engine.reader import from_json, read_json, to_json
from engine.settings import TrialSettings
from harness.base.errors import UsageError
from harness.records.judging import judged

SCHEMA = 1
RECORD_FILE = "record.json"

Status = Literal["ok", "wrong", "oom", "host_oom", "timeout", "hang", "failed", "node_lost", "refused", "interrupted"]
MEASURED: frozenset[str] = frozenset({"ok", "wrong"})  # of records that hold figures
# Outcomes that a method can have; the others say that something went wrong.
RESULTS: frozenset[str] = frozenset({"ok", "oom", "host_oom", "refused"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One run of a trial: every round of an experiment runs all its trials once, in a random order of its own.

    Steps of one round share processes, clocks and neighbours, so they are not independent; rounds are.
    """

    number: int  # of the round, from 1
    place: int  # of the trial in the round's order, from 1; 0 where a record from before rounds does not tell
    started_at: str  # ISO 8601, UTC
    wall_seconds: float
    step_seconds: list[float] = field(default_factory=list)  # of the slowest rank; empty where the round gave no figure
    forward_seconds: list[float] = field(default_factory=list)
    status: Status = "ok"
    reason: str = ""
    hosts: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)  # one per rank, as the measurement's; empty in records from before
    gpus_before: list[GpuState] = field(default_factory=list)  # one per rank, before the warm-up
    gpus_after: list[GpuState] = field(default_factory=list)  # and after the last measured step
    # Between nodes, by moment: before, between and after the round's steps; empty where it was not measured.
    link_gib_per_second: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Record:
    """Everything known about one finished trial.

    With several rounds, `measurement` holds all of them: their steps one after another, the largest peaks, and of the
    rest what the last round gave; errors against float64 are the largest of all rounds. `status` is ok where a round
    gave a figure, and `wrong` where the errors are beyond what exact methods give (`harness.records.judging`), which
    no round's own status says. `reason` names that, and the rounds that gave none.
    """

    trial_id: str
    experiment: str  # name of the experiment: the file's stem
    title: str
    settings: TrialSettings
    system: str  # system the method stands for
    status: Status
    reason: str = ""  # one sentence; empty only when status is ok
    measurement: Measurement | None = None
    launcher: str = ""
    hosts: list[str] = field(default_factory=list)
    gpu: str = ""  # GPU name, or "cpu"
    environment: dict[str, str] = field(default_factory=dict)  # rendered variables the workers got, secrets redacted
    command: list[str] = field(default_factory=list)
    commit: str = ""
    started_at: str = ""  # ISO 8601, UTC
    wall_seconds: float = 0.0  # launch to end of the last process, start-up included
    # Of records until 2026-11-24, when ranks could be given several trials, one after another. Start-up is then in the
    # wall time of the first alone, and the peak of host memory is the largest of all.
    ranks_turn: int = 0  # among the trials that its ranks were given, from 1; 0: it had ranks of its own
    idle_ranks: int = 0  # that waited beside its ranks, each with a GPU of its own, for a trial with more of them
    attempts: int = 1
    rounds: list[Round] = field(default_factory=list)  # empty in records from before there were rounds: one, then
    run_command: list[str] = field(default_factory=list)  # the `burst run` that made it, as typed
    # Where `settings` is as_published or tuned: settings that baselines/settings.yaml gave, those of the ones it may
    # give that the experiment gave itself, and what the method's original does and no setting says.
    settings_from_table: list[str] = field(default_factory=list)
    settings_by_hand: list[str] = field(default_factory=list)
    settings_notes: list[str] = field(default_factory=list)
    plan: Forecast | None = None  # of the planner, where it chose some of the settings
    schema: int = SCHEMA

    @property
    def step_seconds_by_round(self) -> list[list[float]]:
        """Measured steps of every round that gave some."""
        if self.rounds:
            return [one.step_seconds for one in self.rounds if one.step_seconds]
        return [self.measurement.step_seconds] if self.measurement else []

    def reason_of_rounds(self) -> str:
        """One sentence on the rounds that gave no figure, or figures unlike those of the others; empty for none."""
        if len(self.rounds) == 1:
            return self.rounds[0].reason
        return "; ".join(
            f"round {one.number}{'' if one.status == 'ok' else f' {one.status}'}: {one.reason}"
            for one in self.rounds
            if one.reason or one.status != "ok"
        )


def write_record(trial_dir: Path, record: Record) -> None:
    """Leave `record.json` in `trial_dir`, atomically."""
    trial_dir.mkdir(parents=True, exist_ok=True)
    write_json(trial_dir / RECORD_FILE, to_json(record))


class RecordPlace(NamedTuple):
    """Where a record is: a file of its own, or a line of a packed run. As text it is what errors and tables name."""

    file: Path
    line: int = 0  # from 1; 0: the file is the record

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else str(self.file)


def read_record(path: Path) -> Record:
    """Read the record in a file of its own. Raises ValueError when it is not one this version understands."""
    try:
        data = read_json(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(no_record(RecordPlace(path), error)) from error
    return record_of(data, RecordPlace(path))


def record_of(data: object, place: RecordPlace) -> Record:
    """The record in a JSON value, judged anew; errors name `place`.

    Raises ValueError when it is not a record this version understands, or one that figures cannot be derived from.
    """
    try:
        return _record_of(data)
    except ValueError as error:
        raise ValueError(no_record(place, error)) from error


def no_record(place: RecordPlace, error: ValueError) -> str:
    """The sentence that says why there is no record at a place."""
    return f"{place} is not a record of schema {SCHEMA} ({error})"


def _record_of(data: object) -> Record:
    if isinstance(data, dict) and data.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {str(data.get('schema'))[:20]}")
    record = from_json(Record, data)
    measured = record.measurement
    if record.status in MEASURED and (measured is None or not measured.step_seconds):
        raise ValueError(f"its status is {record.status}, but it holds no step times")
    if measured is not None and min(measured.step_seconds, default=1.0) <= 0:
        raise ValueError(f"measurement.step_seconds holds {min(measured.step_seconds):g}; expected seconds above 0")
    return judged(record)


@dataclass(frozen=True, slots=True)
class BadRecord:
    """What should be a record and is not; `reason` is a sentence that names its place."""

    place: RecordPlace
    reason: str


def refuse_bad(bad: Sequence[BadRecord]) -> None:
    """Raise UsageError that lists every bad record with its reason, where there is one."""
    if bad:
        some = "1 record cannot be used" if len(bad) == 1 else f"{len(bad)} records cannot be used"
        advice = "rename them, or let `burst run --resume` or `burst report` do so with --set-aside-bad"
        if any(one.place.line for one in bad):
            advice = "correct these lines, or pack the run again with `burst verify pack`"
        listed = "".join(f"\n  {one.reason}" for one in bad)
        raise UsageError(f"{some}; {advice}:{listed}")


def set_aside(bad: Sequence[BadRecord]) -> list[tuple[Path, Path]]:
    """Rename bad records, so that they are neither read nor lost; returns from where to where.

    Raises UsageError where one is a line of a packed run, which stays as it is; then nothing is renamed.
    """
    refuse_bad([one for one in bad if one.place.line])
    return [(one.place.file, _renamed(one.place.file)) for one in bad]


def _renamed(file: Path) -> Path:
    path = file.with_name(f"bad-{RECORD_FILE}")
    number = 1
    while os.path.lexists(path):
        number += 1
        path = file.with_name(f"bad-{number}-{RECORD_FILE}")
    return file.rename(path)
