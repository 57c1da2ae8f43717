"""The whole verification of one run, and of all runs below a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from harness.base.errors import UsageError
from harness.records.record import BadRecord, Record, RecordPlace
from harness.records.stored import RUN_FILE, StoredRun, run_named, runs_below, stored_run
from harness.report.results import Row
from harness.report.run_records import RunRecords
from harness.verify.finding import Failure, RunVerification
from harness.verify.formulas import COLUMNS, Figure, figures_of
from harness.verify.history import CommitHistory
from harness.verify.private import HOME, private_in
from harness.verify.products import (
    RESULTS_FILE,
    as_line,
    figure_failures,
    figures_failures,
    read_results,
    results_failures,
    table_failures,
)
from harness.verify.provenance import provenance_findings, unused_statements
from harness.verify.reference import compared, partnerless
from harness.verify.schema import schema_failures
from harness.verify.sums import SUMS_FILE, sums_failures


def verify(
    place: Path, history: CommitHistory, reference: Path | None = None, tolerance: float = 0.05
) -> list[RunVerification]:
    """A verdict on each run below a directory, or on the run that `place` is; each beside the run of the same name in
    `reference`. Raises UsageError where no record is there, or what provenance states cannot be read.
    """
    verdicts = []
    for path in runs_below(place) or [place]:
        run = stored_run(path)
        name = "" if path == place else run.report_dir.relative_to(place).as_posix()
        verdict, records = verify_run(run, name or run.name, history)
        if reference is not None:
            others = _records(run_named(reference, name) if name else reference)
            verdict.compared = compared(records, others, tolerance)
            verdict.partnerless = partnerless(records, others)
        verdicts.append(verdict)
    if reference is not None and not any(verdict.compared for verdict in verdicts):
        raise UsageError(f"{reference} holds no record of a trial that {place} holds; name a run of the same trials")
    return verdicts


def verify_run(run: StoredRun, name: str, history: CommitHistory) -> tuple[RunVerification, dict[str, Record]]:
    """The verdict on one run, and its records by trial id. Raises UsageError where it holds no record."""
    stated = run.stated()
    verdict = RunVerification(run=name)
    failures = verdict.failures
    try:
        published = read_results(run.report_dir)
    except ValueError as error:
        published = []
        failures.append(Failure(place=RESULTS_FILE, check=RESULTS_FILE, found=str(error), expected="a table"))
    read = RunRecords(run.path, _run_name(published))
    for bad in read.read():
        failures.append(Failure(place=_shown(bad.place), check="schema", found=bad.reason, expected="a record"))

    records: dict[str, Record] = {}
    figures: dict[str, Mapping[str, Figure]] = {}
    trials: set[str] = set()
    for one in run.records():
        verdict.records += 1
        if isinstance(one, BadRecord):
            continue
        trials.add(one.trial)
        record = read.get(one.trial)
        if record is None:
            continue
        records[record.trial_id] = record
        failures += schema_failures(one.trial, record)
        for finding in provenance_findings(record, one.content.decode(), stated, history):
            if isinstance(finding, Failure):
                failures.append(finding)
            else:
                verdict.stated.append(finding)
        try:
            figures[record.trial_id] = figures_of(record)
        except (ValueError, ArithmeticError) as error:
            failures.append(
                Failure(place=record.trial_id, check="figures", found=str(error), expected=", ".join(COLUMNS[:3]))
            )
    if not verdict.records:
        raise UsageError(
            f"{run.path} holds no record; name a directory that `burst run` left (trials/*/record.json), a packed run "
            "(.jsonl), or an archive"
        )
    failures += unused_statements(stated, list(records))
    failures += _planned(run, trials)
    failures += _private_texts(run, any("paths" in one.about for one in stated.reasons))
    _products(run, read.rows(), published, figures, verdict)
    if os.path.lexists(run.path / SUMS_FILE):
        failures += sums_failures(run.path)
        verdict.files += 1
    if history.absent:
        verdict.unchecked.append(f"whether commits are in the history: {history.absent}")
    return verdict, records


def _shown(place: RecordPlace) -> str:
    """A place without the path of the run."""
    return f"{place.file.name}:{place.line}" if place.line else f"trials/{place.file.parent.name}"


def _products(
    run: StoredRun,
    rows: list[Row],
    published: list[dict[str, str]] | None,
    figures: Mapping[str, Mapping[str, Figure]],
    verdict: RunVerification,
) -> None:
    """What a report made of the records, and the figures of their rows. Of a packed run there may be no report; then
    the rows are those that one would have."""
    archive = os.path.lexists(run.path / SUMS_FILE)  # whoever reads it is not to change it
    by = "`burst archive`" if archive else f"`burst report {run.path}`"
    if published is not None:
        verdict.failures += [*results_failures(published, rows, by), *figures_failures(published, figures)]
        verdict.files += 1
    elif run.report_dir == run.path:
        lacking = Failure(place=RESULTS_FILE, check=RESULTS_FILE, found="no such file", expected=f"what {by} writes")
        verdict.failures.append(lacking)
    else:
        verdict.failures += figures_failures([as_line(row) for row in rows], figures)
    if not rows:
        return
    for compare in (table_failures, figure_failures):
        try:
            count, failures = compare(run.report_dir, rows, by)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Records that hold something else than ours do, where any value may stand: tables cannot be made of them.
            found = f"records of which no report can be made ({type(error).__name__}: {error})"
            verdict.failures.append(Failure(place="trials", check="tables", found=found, expected="records of ours"))
            continue
        verdict.files += count
        verdict.failures += failures


def _run_name(published: list[dict[str, str]] | None) -> str:
    """The name that results.csv gives its run: a folder may have been renamed since. Empty: the folder's own."""
    names = {line.get("run", "") for line in published or ()}
    return names.pop() if len(names) == 1 else ""


def _planned(run: StoredRun, trials: set[str]) -> list[Failure]:
    """Trials of the plan that left no record."""
    try:
        lacking = [trial for trial in run.planned() or () if trial not in trials]
    except ValueError:
        return [Failure(place=RUN_FILE, check="schema", found="no list of trials", expected="the plan of a run")]
    return [
        Failure(place=trial[:200], check="schema", found="no record", expected="one for every trial of the plan")
        for trial in lacking
    ]


def _private_texts(run: StoredRun, home_is_stated: bool) -> list[Failure]:
    failures = []
    for name, text in run.texts():
        for kind in ["no readable file"] if text is None else private_in(text):
            if kind != HOME or not home_is_stated:
                failures.append(Failure(place=name, check="secrets", found=kind, expected="none"))
    return failures


def _records(path: Path) -> dict[str, Record]:
    """The usable records of a reference run; none where there is no such run."""
    run = RunRecords(path)
    run.read()
    return {record.trial_id: record for record in run.records()}
