"""`burst status`: what runs and ran, seen from another shell."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from engine.measurement import PROGRESS_FILE
from harness.progress import describe, describe_step
from harness.run_directory import TRIAL_FILE, RunDirectory


class Status:
    help = "say how far a run has come, also while it runs"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("directory", type=Path, metavar="DIR", help="the directory of a run")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.launch.tail import ProgressTail
        from harness.training_status import is_training_run, training_status

        if is_training_run(arguments.directory):
            print(training_status(arguments.directory))
            return 0
        directory = RunDirectory(arguments.directory)
        facts = directory.description()
        running = directory.in_use()
        statuses: Counter[str] = Counter()
        for trial_id in facts["trials"]:
            record = directory.record(trial_id)
            trial_dir = directory.trial(trial_id)
            if record is not None:
                statuses[record.status] += 1
                print(describe(record))
            elif running and (trial_dir / TRIAL_FILE).exists():
                statuses["running"] += 1
                lines = ProgressTail(trial_dir / PROGRESS_FILE).new()
                print(f"{trial_id}  running  {describe_step(lines[-1]) if lines else 'starting'}")
            else:
                statuses["waiting"] += 1
        counts = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
        state = "runs" if running else "is not running"
        print(
            f"{facts['experiment']} {state}: {counts} of {len(facts['trials'])} trials, started {facts['started_at']}"
        )
        return 0


COMMAND = Status()
