"""One attempt at a trial, from its directory to its record; also of a trial that ended after it had measured."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cluster.files.errors import quantity, shown
from engine.measurement import (
    CHECK_UNFINISHED,
    PROFILE,
    TRACE_FILE,
    UNCHECKED,
    Measurement,
    cut_off,
    read_measurement,
    write_json,
)
from engine.method import Method
from engine.profile.breakdown import Breakdown, breakdown_of
from engine.reader import read_regular
from engine.settings import TrialSettings, to_json
from harness.launch.environment import render
from harness.launch.launcher import SET, Job, Launcher, Limit, Outcome, Passed, tells_start
from harness.launch.ports import port_was_taken
from harness.machine.this_machine import Machine
from harness.plan.predict import step_seconds
from harness.records.judging import judged
from harness.records.provenance import commit, portable_command, redact
from harness.records.record import Record, write_record
from harness.run.bounds import INFRASTRUCTURE, Bounds
from harness.run.directory import TRIAL_FILE, RunDirectory, round_of_files
from harness.run.progress import ProgressView
from harness.run.rounds import alone, finished_rounds, round_of, with_round
from harness.spec.methods import method_module, method_named
from harness.spec.trial import Trial

UNBOUNDED = Bounds()
# Limits in seconds, where the user sets none.
TRIAL_SECONDS = 1200.0
START_SECONDS = 600.0
SHORTEST_HANG = 300.0  # compilation takes minutes
# Where a step's time is predicted, so many times it and a margin, if that is more: predictions err, other programs use
# the machine, and the first step compiles.
PREDICTED_TIMES = 4.0
PREDICTED_MARGIN = 60.0
STEPS_BEYOND = 2  # after the measured ones: for the trace, and to compare with an exact computation
MAX_TRACE_BYTES = 1 << 30  # of a packed trace
_UNREADABLE = (OSError, ValueError, KeyError, TypeError)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """The machine, launcher, environment and commit that all trials of a run share."""

    machine: Machine
    launcher: Launcher
    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))
    commit: str = dataclasses.field(default_factory=commit)
    changes: str = ""  # digest of how the code differs from the commit; see `harness.records.provenance`
    run_command: Sequence[str] = ()  # the `burst run` as typed, secrets redacted

    @property
    def gpu(self) -> str:
        """GPU name as records have it, or "cpu"."""
        return self.machine.gpu_name or "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPosition:
    """A trial's place in a run: the round, and its place in the round's order, both from 1."""

    round: int
    place: int


def execute(
    trial: Trial,
    position: RoundPosition,
    before: Record | None,
    host: RunContext,
    directory: RunDirectory,
    view: ProgressView,
    bounds: Bounds = UNBOUNDED,
) -> Record:
    """Execute one trial, and leave its record with this round and those of `before`, whose figures are kept. `before`
    None: the record has this round alone.

    The trial is repeated once where another process had taken its port: the cause is not the method, and the next
    attempt gets another port. It is repeated as often as `bounds` allow where the host was lost or the ranks hung, then
    on other hosts if there are some.
    """
    ports, retries, avoid = 1, bounds.retries, dict[str, None]()
    while True:
        record = _attempt(trial, position, before, host, directory, view, bounds, tuple(avoid))
        latest = alone(record, position.round)
        before = before and record
        if latest.status == "failed" and port_was_taken(latest.reason) and ports:
            ports -= 1
        elif latest.status in INFRASTRUCTURE and retries:
            retries -= 1
            avoid |= dict.fromkeys(latest.hosts)
            number = f"{bounds.retries - retries} of {bounds.retries}"
            view.note(shown(f"{trial.id}  {latest.status}, runs again ({number})  {latest.reason}"))
        else:
            return record


def _attempt(
    trial: Trial,
    position: RoundPosition,
    before: Record | None,
    host: RunContext,
    directory: RunDirectory,
    view: ProgressView,
    bounds: Bounds,
    avoid: tuple[str, ...],
) -> Record:
    """One attempt at a round of a trial, from its directory to its record. Ctrl-C ends it as `interrupted`."""
    method = method_named(trial.settings.method)
    trial_dir = directory.trial(trial.id).absolute()
    if before is None:
        attempt = directory.begin_attempt(trial.id)
    else:
        finished = [one.number for one in finished_rounds(before)]
        attempt = directory.begin_round(trial.id, position.round, finished)
    record = Record(
        trial_id=trial.id,
        experiment=trial.experiment,
        title=trial.title,
        settings=trial.settings,
        system=method.system,
        status="refused",
        reason=trial.unsupported_reason or "",
        gpu=host.gpu,
        commit=host.commit,
        started_at=now(),
        attempts=attempt,
        run_command=list(host.run_command),
        settings_from_table=list(trial.table.filled),
        settings_by_hand=list(trial.table.by_hand),
        settings_notes=list(trial.table.notes),
        plan=trial.plan,
    )
    if trial.unsupported_reason is None:
        job = dataclasses.replace(job_of(trial, trial_dir, host), avoid=avoid)
        write_json(
            trial_dir / TRIAL_FILE,
            {
                "settings": to_json(trial.settings),
                "method": method_module(trial.settings.method),
                "round": position.round,
            }
            | ({"profile": True} if trial.profile else {}),
        )
        began = time.monotonic()  # the clock of the day may be set back meanwhile
        try:
            outcome = host.launcher.run(job, view.step)
        except KeyboardInterrupt:
            left = _left_measured(trial_dir, "interrupted")  # what `completed` will take
            kept = "runs it again" if left is None else "keeps its figures, which were not checked"
            outcome = Outcome(
                status="interrupted",
                reason=f"stopped by {bounds.out_of_time or 'the user'}; --resume {kept}",
                wall_seconds=time.monotonic() - began,
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
        )
        record.rounds.append(round_of(record, number=position.round, place=position.place))
        record = judged(record)
    if before is not None:
        record = with_round(before, record)
    write_record(trial_dir, record)
    return record


def job_of(trial: Trial, trial_dir: Path, host: RunContext) -> Job:
    """The trial as a launcher executes it on this host."""
    settings = trial.settings
    command = method_named(settings.method).command(trial_dir)
    own = tells_start(command)  # a foreign program tells nothing before its first step
    limits = limits_of(trial, host.machine)
    trial_seconds, start_seconds, hang_seconds = (limits[name].seconds for name in ("trial", "start", "hang"))
    return Job(
        trial_id=trial.id,
        trial_dir=trial_dir,
        command=command,
        ranks=settings.world_size,
        environment=environment_of(settings, host),
        deadline_seconds=trial_seconds + (0.0 if own else start_seconds),
        start_seconds=start_seconds if own else None,
        # Traces are written and read after the last step, and that may take long.
        hang_seconds=None if trial.profile else hang_seconds,
        limits_from={name: limit.origin for name, limit in limits.items()},
        emulate_nodes=settings.emulate_nodes,
    )


def environment_of(settings: TrialSettings, host: RunContext) -> dict[str, str]:
    """The variables that each rank of a trial gets on this host."""
    return render(
        settings,
        device=host.machine.device,
        cores=host.machine.cores,
        host_ranks=settings.world_size // (host.machine.nodes_for(settings.world_size) or 1),
        user=host.environment,
    )


def limits_of(trial: Trial, machine: Machine) -> dict[Limit, Passed]:
    """The limits of a trial on this machine: as the user set them, else several times what its steps are predicted to
    take, and no less than the defaults."""
    found: dict[Limit, Passed] = {}

    def add(limit: Limit, given: float, default: float, steps: int = 0, words: str = "") -> None:
        predicted = 0.0 if step is None else PREDICTED_TIMES * steps * step + PREDICTED_MARGIN
        origin = f"{PREDICTED_TIMES:g} times the {quantity(step or 0.0)} s predicted for {words}"
        if given or predicted <= default:
            origin = SET if given else "the default"
        found[limit] = Passed(limit=limit, seconds=given or max(default, predicted), origin=origin)

    step = step_seconds(trial.settings, machine)
    steps = trial.settings.steps.total + STEPS_BEYOND
    add("start", trial.start_seconds, START_SECONDS)
    add("trial", trial.deadline_seconds, TRIAL_SECONDS, steps, f"each of {steps} steps")
    add("hang", trial.hang_seconds, max(SHORTEST_HANG, (trial.deadline_seconds or TRIAL_SECONDS) / 2), 1, "a step")
    return found


def measured(outcome: Outcome, method: Method, trial_dir: Path) -> tuple[Outcome, Measurement | None]:
    """The outcome as it is recorded, and the figures where it is ok.

    A trial without a measurement has failed, even when all ranks exited with 0. One whose measurement was on disk
    before its check or its trace failed is ok, with a reason. `trial_dir` holds the files of this attempt alone.
    """
    if outcome.status != "ok":
        return _after_measuring(outcome, trial_dir)
    try:
        return outcome, method.read(trial_dir)
    except _UNREADABLE as error:
        reason = f"all ranks ended well, but no measurement could be read ({error}); see logs/rank0.log"
        return dataclasses.replace(outcome, status="failed", reason=reason), None


def completed(record: Record, trial_dir: Path) -> Record:
    """The record of a trial that the user stopped: ok where its figures were on disk by then, else unchanged.

    The same for a later round, where the trial had figures from others.
    """
    stopped = next((one for one in record.rounds if one.status == "interrupted"), None)
    if record.status != "interrupted" and (stopped is None or round_of_files(trial_dir) != stopped.number):
        return record
    how = f"interrupted: {(stopped or record).reason.partition(';')[0]}"
    found = _left_measured(trial_dir, how)
    if found is None:
        return record
    latest = dataclasses.replace(
        record, status="ok", reason=f"measured, and then {how}", measurement=found, rounds=[]
    )  # fmt: skip
    if stopped is None:  # from before there were rounds
        return judged(latest)
    latest = dataclasses.replace(latest, started_at=stopped.started_at, wall_seconds=stopped.wall_seconds)
    latest.rounds.append(round_of(latest, number=stopped.number, place=stopped.place))
    return judged(latest) if record.status == "interrupted" else with_round(record, latest)


def _after_measuring(outcome: Outcome, trial_dir: Path) -> tuple[Outcome, Measurement | None]:
    """For a trial that did not end well: the measurement that the engine's worker wrote before its check and trace.

    None where the user stopped the run, which ends with that trial; see `completed`.
    """
    how = f"{outcome.status}: {outcome.reason}"
    found = None if outcome.status == "interrupted" else _left_measured(trial_dir, how)
    if found is None:
        return outcome, None
    return dataclasses.replace(outcome, status="ok", reason=f"measured, and then {how}"), found


def _left_measured(trial_dir: Path, how: str) -> Measurement | None:
    """Figures of a trial that ended during its check or its trace as `how` says, and what rank 0's trace holds."""
    try:
        found = read_measurement(trial_dir)
    except _UNREADABLE:
        return None
    if found.extra.get(UNCHECKED) == CHECK_UNFINISHED:
        found.extra[UNCHECKED] = how
    elif PROFILE not in found.extra:  # after the check nothing is left to be done, so the fault is another one
        return None
    if PROFILE not in found.extra:
        return found
    profile = cut_off(found.extra[PROFILE], how)
    if "span_seconds" not in profile and (breakdown := _of_rank_0(trial_dir)):
        profile |= {
            "on": breakdown.on,
            "rank": 0,
            "span_seconds": breakdown.span_seconds,
            "seconds": {str(name): seconds for name, seconds in breakdown.seconds.items()},
        }
    found.extra[PROFILE] = profile
    return found


def _of_rank_0(trial_dir: Path) -> Breakdown | None:
    """The breakdown of rank 0's trace, written before the ranks compared theirs; None where there is none."""
    try:
        events = json.loads(gzip.decompress(read_regular(trial_dir / TRACE_FILE, MAX_TRACE_BYTES)))["traceEvents"]
        return breakdown_of(events)
    except (*_UNREADABLE, EOFError, zlib.error):
        return None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
