"""`burst status`: the state of a run's trials, read from another shell."""

from __future__ import annotations

import argparse
import dataclasses
import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.files.errors import counted, shown, shown_value
from harness.base.errors import UsageError
from harness.records.record import refuse_bad

if TYPE_CHECKING:
    from harness.run.state import RunState, TrialState


class StatusCommand:
    help = "print the progress of a run, also while it runs: failures first, counts, the time that is left"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("directory", type=Path, metavar="DIR", help="the directory of a run")
        parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.run.state import next_step, state_of
        from harness.training.progress import is_training_run, training_status

        if is_training_run(arguments.directory):
            if arguments.json:
                raise UsageError(
                    f"{arguments.directory} is a training run, whose metrics.jsonl is JSON; leave --json out"
                )
            print(shown(training_status(arguments.directory)))
            return 0
        state = state_of(arguments.directory)
        if arguments.json:
            print(json.dumps(as_json(state) | {"next": next_step(state, arguments.directory)}, indent=1))
        else:
            for trial in state.failures_first():
                if trial.status not in ("waiting", "unusable"):
                    print(shown(line_of(trial)))
            print(shown(summary_of(state)))
            if step := next_step(state, arguments.directory):
                print(shown(step))
        refuse_bad(state.bad)
        return 0


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
    return f"{trial.trial_id}  {trial.status}  {sum(trial.round_seconds):.1f} s{reason}{often}"


def summary_of(state: RunState) -> str:
    """Counts and the time that is left, in one line."""
    counts = ", ".join(f"{count} {status}" for status, count in state.counts.items())
    left = ""
    if state.seconds_left:
        end = _end(state)
        left = f", about {duration(state.seconds_left)} left" + (f" (until {end:%Y-%m-%d %H:%M})" if end else "")
    return (
        f"{shown_value(state.experiment)} {'runs' if state.running else 'is not running'}: {counts} of "
        f"{counted(len(state.trials), 'trial')}, started {state.started_at}{left}"
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


COMMAND = StatusCommand()
