"""`burst status`: the state of a run's trials, read from another shell."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from cluster.files.errors import shown, shown_value
from engine.measurement import PROGRESS_FILE
from harness.records.record import RECORD_FILE, BadRecord, refuse_bad
from harness.run.directory import RunDirectory, round_of_files
from harness.run.progress import describe, describe_step
from harness.run.rounds import rounds_of


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
        rounds = facts.get("rounds", 1)  # absent from runs before there were rounds, as is the other
        repeats = rounds > 1 or facts.get("interval", 0) > 0
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
            have = [] if record is None else [one.number for one in rounds_of(record) if one.status != "interrupted"]
            # Only a run under way has a trial whose files are of a round that its record lacks.
            may_run = running and (record is None or (repeats and record.status == "ok"))
            number = round_of_files(trial_dir) if may_run else 0
            if number and number not in have:
                statuses["running"] += 1
                lines = ProgressTail(trial_dir / PROGRESS_FILE).new()
                title = f"round {number} of {max(rounds, number)}  " if max(rounds, number) > 1 else ""
                print(shown(f"{trial_id}  running  {title}{describe_step(lines[-1]) if lines else 'starting'}"))
            elif record is not None:
                statuses[record.status] += 1
                often = f"  {len(have)} of {max(rounds, len(have))} rounds" if max(rounds, len(have)) > 1 else ""
                print(shown(describe(record) + often))
            else:
                statuses["waiting"] += 1
        counts = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
        state = "runs" if running else "is not running"
        total = f"{counts} of {len(facts['trials'])} trials"
        print(shown(f"{shown_value(facts['experiment'])} {state}: {total}, started {facts['started_at']}"))
        refuse_bad(bad)
        return 0


COMMAND = Status()
