"""The whole verification of one run, and of all runs below a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from engine.plain_json import parse_json, read_json, read_regular
from harness.base.errors import UsageError
from harness.records.record import Record, record_files
from harness.records.stated import PROVENANCE_FILE, stated_in
from harness.report.run_records import RunRecords
from harness.report.site import runs_below
from harness.verify.finding import Failure, Verdict
from harness.verify.formulas import COLUMNS, Figure, figures_of
from harness.verify.history import History
from harness.verify.private import HOME, private_in
from harness.verify.products import (
    RESULTS_FILE,
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

RUN_FILE = "run.json"
_TEXTS = (RUN_FILE, "experiment.yaml", PROVENANCE_FILE)


def verify(directory: Path, history: History, reference: Path | None = None, tolerance: float = 0.05) -> list[Verdict]:
    """A verdict on each run below `directory`, or on it alone where it is one; each beside the run of the same place
    in `reference`. Raises UsageError where no record is there, or provenance.yaml cannot be read.
    """
    runs = runs_below(directory) or [directory]
    verdicts = []
    for run in runs:
        place = run.relative_to(directory)
        name = run.name if run == directory else place.as_posix()
        verdict, records = verify_run(run, name or directory.resolve().name, history)
        if reference is not None:
            others = _records(reference / place)
            verdict.compared = compared(records, others, tolerance)
            verdict.partnerless = partnerless(records, others)
        verdicts.append(verdict)
    if reference is not None and not any(verdict.compared for verdict in verdicts):
        raise UsageError(
            f"{reference} holds no record of a trial that {directory} holds; name a run of the same trials"
        )
    return verdicts


def verify_run(run_dir: Path, name: str, history: History) -> tuple[Verdict, dict[str, Record]]:
    """The verdict on one run, and its records by trial id. Raises UsageError where it holds no record."""
    files = record_files(run_dir)
    if not files:
        raise UsageError(
            f"{run_dir} holds no record (trials/*/record.json); name a directory that `burst run` left, or an archive"
        )
    stated = stated_in(run_dir)
    verdict = Verdict(run=name, records=len(files))
    failures = verdict.failures
    try:
        published = read_results(run_dir)
    except ValueError as error:
        published = []
        failures.append(Failure(place=RESULTS_FILE, check=RESULTS_FILE, found=str(error), expected="a table"))
    run = RunRecords(run_dir, _run_name(published))
    for bad in run.read():
        failures.append(
            Failure(place=f"trials/{bad.path.parent.name}", check="schema", found=bad.reason, expected="a record")
        )

    records: dict[str, Record] = {}
    figures: dict[str, Mapping[str, Figure]] = {}
    for path in files:
        record = run.get(path.parent.name)
        if record is None:
            continue
        records[record.trial_id] = record
        content = read_regular(path)
        failures += schema_failures(path, record, parse_json(content))
        for finding in provenance_findings(record, content.decode(), stated, history):
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
    failures += unused_statements(stated, list(records))
    failures += _run_file(run_dir, {path.parent.name for path in files})
    failures += _private_texts(run_dir, any("paths" in one.about for one in stated.reasons))
    _products(run_dir, run, published, figures, verdict)
    if os.path.lexists(run_dir / SUMS_FILE):
        failures += sums_failures(run_dir)
        verdict.files += 1
    if history.absent:
        verdict.unchecked.append(f"whether commits are in the history: {history.absent}")
    return verdict, records


def _products(
    run_dir: Path,
    run: RunRecords,
    published: list[dict[str, str]] | None,
    figures: Mapping[str, Mapping[str, Figure]],
    verdict: Verdict,
) -> None:
    """What a report made of the records."""
    rows = run.rows()
    packed = os.path.lexists(run_dir / SUMS_FILE)  # an archive's: whoever reads it is not to change it
    by = "`burst archive`" if packed else f"`burst report {run_dir}`"
    if published is None:
        lacking = Failure(place=RESULTS_FILE, check=RESULTS_FILE, found="no such file", expected=f"what {by} writes")
        verdict.failures.append(lacking)
    else:
        verdict.failures += [*results_failures(published, rows, by), *figures_failures(published, figures)]
        verdict.files += 1
    if not rows:
        return
    for compare in (table_failures, figure_failures):
        try:
            count, failures = compare(run_dir, rows, by)
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


def _run_file(run_dir: Path, trials: set[str]) -> list[Failure]:
    """Trials of run.json that left no record."""
    if not os.path.lexists(run_dir / RUN_FILE):
        return []
    try:
        planned = read_json(run_dir / RUN_FILE)["trials"]
        lacking = [str(trial) for trial in planned if trial not in trials]
    except (OSError, ValueError, KeyError, TypeError):
        return [Failure(place=RUN_FILE, check="schema", found="no list of trials", expected="the plan of a run")]
    return [
        Failure(place=trial[:200], check="schema", found="no record", expected=f"one for every trial of {RUN_FILE}")
        for trial in lacking
    ]


def _private_texts(run_dir: Path, home_is_stated: bool) -> list[Failure]:
    failures = []
    for name in _TEXTS:
        if not os.path.lexists(run_dir / name):
            continue
        try:
            kinds = private_in(read_regular(run_dir / name).decode(errors="replace"))
        except (OSError, ValueError) as error:
            kinds = [f"no readable file ({error})"]
        for kind in kinds:
            if kind != HOME or not home_is_stated:
                failures.append(Failure(place=name, check="secrets", found=kind, expected="none"))
    return failures


def _records(run_dir: Path) -> dict[str, Record]:
    """The usable records of a reference run; none where it has no such folder."""
    run = RunRecords(run_dir)
    run.read()
    return {record.trial_id: record for record in run.records()}
