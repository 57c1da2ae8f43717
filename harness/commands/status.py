"""`burst status`: the state of a run's trials, read from another shell."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from cluster.files.errors import shown, shown_value
from engine.measurement import PROGRESS_FILE
from harness.records.record import RECORD_FILE, BadRecord, refuse_bad
from harness.run.directory import TRIAL_FILE, RunDirectory
from harness.run.progress import describe, describe_step


class Status:
    help = "print the progress of a run, also while it runs"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("directory", type=Path, metavar="DIR", help="the directory of a run")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.launch.supervisor import ProgressTail
        from harness.training.progress import is_training_run, training_status

        if is_training_run(arguments.directory):
            print(shown(training_status(arguments.directory)))
            return 0
        directory = RunDirectory(arguments.directory)
        facts = directory.description()
        running = directory.in_use()
        statuses: Counter[str] = Counter()
        bad: list[BadRecord] = []
        for trial_id in facts["trials"]:
            trial_dir = directory.trial(trial_id)
            try:
                record = directory.record(trial_id)
            except ValueError as error:
                bad.append(BadRecord(trial_dir / RECORD_FILE, str(error)))
                statuses["unusable"] += 1
                continue
            if record is not None:
                statuses[record.status] += 1
                print(shown(describe(record)))
            elif running and (trial_dir / TRIAL_FILE).exists():
                statuses["running"] += 1
                lines = ProgressTail(trial_dir / PROGRESS_FILE).new()
                print(shown(f"{trial_id}  running  {describe_step(lines[-1]) if lines else 'starting'}"))
            else:
                statuses["waiting"] += 1
        counts = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
        state = "runs" if running else "is not running"
        total = f"{counts} of {len(facts['trials'])} trials"
        print(shown(f"{shown_value(facts['experiment'])} {state}: {total}, started {facts['started_at']}"))
        refuse_bad(bad)
        return 0


COMMAND = Status()
