"""`burst status`: the state of a run's trials, read from another shell, and the output of their ranks."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cluster.files.errors import counted, shown, shown_value
from cluster.files.filesystem import open_regular
from cluster.files.progress import Progress
from harness.base.errors import UsageError, nearest, one_of

if TYPE_CHECKING:
    from harness.run.state import RunState, TrialState


RUNS = Path("results", "runs")  # where runs lie unless --out says otherwise
LISTED = 5  # ids that one sentence names


class StatusCommand:
    help = "say what a run does or how it ended, and what to do next; without DIR of the newest run"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "directory", nargs="?", type=Path, metavar="DIR",
            help=f"a run, or a folder of runs, which stands for the one started last (default: {RUNS})",
        )  # fmt: skip
        parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
        parser.add_argument(
            "--logs", metavar="TRIAL",
            help="print what the ranks of this trial printed instead: its id in DIR, the id's beginning, or its path",
        )  # fmt: skip
        parser.add_argument("--rank", type=int, metavar="N", help="with --logs: of this rank alone")
        parser.add_argument(
            "--round", type=int, metavar="N", help="with --logs: of this round (default: the one that ran last)"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        if arguments.logs is not None:
            return _print_logs(arguments)
        if arguments.rank is not None or arguments.round is not None:
            raise UsageError("--rank and --round choose among the logs of a trial; name it with --logs TRIAL")
        return _print_state(arguments)


def _print_state(arguments: argparse.Namespace) -> int:
    """Every trial of a named run, or one sentence about the newest one; then what to do next."""
    from harness.records.record import refuse_bad
    from harness.run.state import next_step, state_of
    from harness.training.progress import is_training_run, training_next_steps, training_status

    directory = run_named(arguments.directory)
    named = directory == arguments.directory
    if is_training_run(directory):
        if arguments.json:
            raise UsageError(f"{directory} is a training run, whose metrics.jsonl is JSON; leave --json out")
        _print_lines([training_status(directory), *training_next_steps(directory)])
        return 0
    with Progress(f"reading the records of {directory}", quiet=arguments.json):
        state = state_of(directory)
    if arguments.json:
        print(json.dumps(as_json(state) | {"next": next_step(state, directory)}, indent=1))
    else:
        trials = [trial for trial in state.failures_first() if trial.status not in ("waiting", "unusable")]
        said = [*map(line_of, trials), summary_of(state)] if named else [f"{directory}: {sentence_of(state)}"]
        _print_lines([*said, *_next_steps(state, directory, named=named)])
    refuse_bad(state.bad)
    return 0


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(shown(line))


def run_named(directory: Path | None) -> Path:
    """The run that DIR names: itself, or of a folder of runs the one that was started last. Raises UsageError where
    there is none."""
    place = RUNS if directory is None else directory
    if _started_at(place) is not None:
        return place
    started = {path: at for path in place.glob("*/") if (at := _started_at(path)) is not None}
    if started:
        return max(started, key=lambda path: started[path])
    if directory is None:
        raise UsageError(f"{RUNS} holds no runs; start one with burst run EXP.yaml, or name the directory of a run")
    return directory


def _started_at(directory: Path) -> float | None:
    """When the run in a directory was started or resumed last, by the time of the file that each start writes; None
    where there is no run. The directory's own time is that of a report written later."""
    from engine.training.files import RUN_FILE as TRAINING_FILE
    from harness.records.stored import RUN_FILE

    for path in (directory / RUN_FILE, directory / TRAINING_FILE):
        if path.is_file():
            return path.stat().st_mtime
    return None


def sentence_of(state: RunState) -> str:
    """What a run is doing, or how it ended: the summary, and the trial that runs or that failed first."""
    trial = first_failure(state)
    if state.running:
        trial = next((one for one in state.trials if one.running_round), None)
    return summary_of(state) + (f"; {line_of(trial)}" if trial is not None else "")


def first_failure(state: RunState) -> TrialState | None:
    """The first trial of the plan that failed and left a record; None where none did."""
    return next((trial for trial in state.trials if trial.failed and trial.status != "unusable"), None)


def _next_steps(state: RunState, directory: Path, *, named: bool) -> list[str]:
    """What to do with a run, as sentences with a command each."""
    from harness.records.stored import REPORT_FILE
    from harness.run.state import next_step

    steps = []
    if (failure := first_failure(state)) is not None and (command := _logs_command(failure, directory)):
        steps.append(f"see what its ranks printed with: {shlex.join(command)}")
    if step := next_step(state, directory):
        steps.append(step)
    elif not named:
        report = "" if state.running else f"read {directory / REPORT_FILE}, or "
        steps.append(f"{report}look at its trials with: {shlex.join(['burst', 'status', str(directory)])}")
    return steps


def _logs_command(trial: TrialState, directory: Path) -> list[str]:
    """What prints the logs of the round in which a trial failed; empty where there are none."""
    from harness.run.directory import round_of_files

    trial_dir, other = directory / "trials" / trial.trial_id, []
    if trial.failed_round and trial.failed_round != round_of_files(trial_dir):
        trial_dir, other = trial_dir / "rounds" / str(trial.failed_round), ["--round", str(trial.failed_round)]
    return ["burst", "status", str(directory), "--logs", trial.trial_id, *other] if rank_logs(trial_dir) else []


def as_json(state: RunState) -> dict[str, object]:
    """The state as plain values; trials that failed come first."""
    end = _end(state)
    return {
        "experiment": state.experiment,
        "running": state.running,
        "started_at": state.started_at,
        "counts": state.counts,
        "failed": state.failed,
        "total": len(state.trials),
        "seconds_left": None if state.seconds_left is None else round(state.seconds_left, 1),
        "ends_at": end.isoformat(timespec="seconds") if end else None,
        "trials": [dataclasses.asdict(trial) for trial in state.failures_first()],
    }


def line_of(trial: TrialState) -> str:
    """One trial that runs or has a record, in a line."""
    from harness.run.progress import describe_step

    if trial.running_round:
        title = f"round {trial.running_round} of {trial.rounds}  " if trial.rounds > 1 else ""
        step = describe_step(trial.progress) if trial.progress else "starting"
        return f"{trial.trial_id}  running  {title}{step}  {duration(trial.running_seconds)}"
    often = f"  {trial.rounds_done} of {trial.rounds} rounds" if trial.rounds > 1 else ""
    reason = f"  {trial.reason}" if trial.reason else ""
    seconds = f"  {sum(trial.round_seconds):.1f} s" if trial.round_seconds else ""
    return f"{trial.trial_id}  {trial.status}{seconds}{reason}{often}"


def summary_of(state: RunState) -> str:
    """Counts and the time that is left, in one line."""
    counts = ", ".join(f"{count} {status}" for status, count in state.counts.items())
    left = ""
    if state.seconds_left:
        end = _end(state)
        left = f", about {duration(state.seconds_left)} left" + (f" (until {end:%Y-%m-%d %H:%M})" if end else "")
    further = f" with {counted(state.further_rounds, 'round')} to come" if state.further_rounds else ""
    does = "runs" if state.running else "stopped before its end" if state.left else "has ended"
    return (
        f"{shown_value(state.experiment)} {does}: {counts} of "
        f"{counted(len(state.trials), 'trial')}{further}, started {state.started_at}{left}"
    )


def duration(seconds: float) -> str:
    """Seconds for a reader: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _end(state: RunState) -> datetime | None:
    """When a run that runs is expected to end, by this machine's clock."""
    if not state.running or state.seconds_left is None:
        return None
    try:
        return datetime.now().astimezone() + timedelta(seconds=state.seconds_left)
    except OverflowError:
        return None


def _print_logs(arguments: argparse.Namespace) -> int:
    """What the ranks of one trial printed, rank by rank."""
    if arguments.json:
        raise UsageError("--logs prints what ranks printed, which is no JSON; leave --json out")
    trial_dir = find_trial(arguments.logs, arguments.directory or RUNS)
    if arguments.round is not None:
        trial_dir = _round_directory(trial_dir, arguments.round)
    logs = rank_logs(trial_dir)
    if not logs:
        raise UsageError(f"{trial_dir} holds no logs; the trial was refused or has not started, or it is no trial")
    if arguments.rank is not None and arguments.rank not in logs:
        raise UsageError(
            f"{trial_dir} holds no log of rank {arguments.rank}; its ranks are {', '.join(map(str, logs))}"
        )
    for path in logs.values() if arguments.rank is None else [logs[arguments.rank]]:
        with open_regular(path, "log") as raw, io.TextIOWrapper(raw, encoding="utf-8", errors="replace") as file:
            print(shown(f"==> {path} <=="), flush=True)
            if path.stat().st_size == 0:
                print("(nothing printed)")
            _print_shown(file)
    return 0


def _print_shown(file: TextIO) -> None:
    """The output of a rank, unchanged in a pipe; on a terminal without its control sequences."""
    if not sys.stdout.isatty():
        shutil.copyfileobj(file, sys.stdout)
        return
    for line in file:
        sys.stdout.write(shown(line.replace("\r", "\n").rstrip("\n") + "\n"))


def _round_directory(trial_dir: Path, number: int) -> Path:
    """Where the files of a round lie. Raises UsageError where there is no such round."""
    from harness.run.directory import ROUNDS_DIRECTORY, round_of_files

    last = round_of_files(trial_dir)
    if number == last:
        return trial_dir
    earlier = {int(path.name): path for path in (trial_dir / ROUNDS_DIRECTORY).glob("*") if path.name.isdecimal()}
    if number not in earlier:
        there = sorted(earlier.keys() | ({last} if last else set()))
        found = f"those of round {one_of(map(str, there))}" if there else "no round's"
        raise UsageError(f"{trial_dir} holds no logs of round {number}, but {found}; give --round one of them")
    return earlier[number]


def rank_logs(trial_dir: Path) -> dict[int, Path]:
    """Log files of a trial by rank, in order; empty when it has none."""
    named = ((re.fullmatch(r"rank(\d+)", path.stem), path) for path in (trial_dir / "logs").glob("rank*.log"))
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def find_trial(name: str, place: Path) -> Path:
    """The directory of a trial: `name` is a path, or the start of an id in the run or the runs at `place`. Raises
    UsageError."""
    if name and (path := Path(name)).is_dir():
        return path
    directories = sorted(
        path for pattern in ("trials/*", "*/trials/*") for path in place.glob(pattern) if path.is_dir()
    )
    found = [path for path in directories if path.name == name] or [
        path for path in directories if path.name.startswith(name)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(map(str, found[:LISTED]))
        raise UsageError(
            f"{name} means {len(found)} trials ({listed}{', ...' if found[LISTED:] else ''}); give one's path"
        )
    if not directories:
        raise UsageError(
            f"{name} is no directory and {place} holds no trials; give a trial's path, or DIR before --logs"
        )
    raise UsageError(f"no trial below {place} is called {name}; {_next_step(name, directories)}")


def _next_step(name: str, directories: list[Path]) -> str:
    """The nearest id, else all ids if they are few, else the command that lists them."""
    names = list(dict.fromkeys(path.name for path in directories))
    hint = nearest(name, names)
    if hint.startswith("did you mean") or len(names) <= LISTED:
        return hint
    return f"`burst status DIR` lists the trials of a run, such as {one_of(names[:2])}"


COMMAND = StatusCommand()
