"""Execute a plan: round after round of its trials, one record each, results at the end, resumable at any point."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.base.errors import UsageError
from harness.base.interrupts import deferred
from harness.plan.matrix import nothing_can_run
from harness.records.provenance import redacted_command
from harness.records.record import Record
from harness.report.results import RunRecords
from harness.run.attempt import RunContext, now
from harness.run.directory import opened_for_writing
from harness.run.execution import Execution, ExecutionOptions, Resume
from harness.run.progress import ProgressView
from harness.run.state import resuming
from harness.spec.trial import Trial

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
        found = run.mixed(experiment, planned, changed)
        if found and (resume is None or not resume.mix):
            raise UsageError(
                f"{run_dir} holds {'; '.join(found)}; give --out another directory, or --mix to keep both in one "
                "results.csv"
            )
        if found:
            say(f"mixed as asked: {run_dir} holds {'; '.join(found)}")
        if run.adds and host.changes and host.changes not in changed:
            changed.append(host.changes)
        describe([*planned])
        if text and (earlier := directory.keep_experiment(text)) is not None:
            say(f"the earlier experiment.yaml in {run_dir} means another experiment and is now {earlier.name}")
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
