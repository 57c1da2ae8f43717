"""The whole verification of one run, or of all runs below a directory, beside a reference where one is given."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from harness.base.errors import UsageError
from harness.metrics.intervals import median_ratio
from harness.metrics.throughput import GIB
from harness.records.judging import ERROR
from harness.records.provenance import HOME, private_in
from harness.records.record import BadRecord, Record, RecordPlace
from harness.records.stated import PROVENANCE_FILE
from harness.records.stored import RESULTS_FILE, RUN_FILE, StoredRun, run_named, runs_below, stored_run
from harness.report.results import Row, RunRecords
from harness.verify.finding import Failure, Gap, RowComparison, RunVerification
from harness.verify.products import read_results, report_failures, results_failures
from harness.verify.provenance import CommitHistory, provenance_findings, unused_statements
from harness.verify.schema import is_of_our_engine, schema_failures
from harness.verify.unpacking import SUMS_FILE, sums_failures


def verify(
    place: Path,
    history: CommitHistory,
    reference: Path | None = None,
    tolerance: float = 0.05,
    *,
    so_far: Callable[[str], None] = lambda _: None,
) -> list[RunVerification]:
    """A verdict on each run below a directory, or on the run that `place` is; each beside the run of the same name in
    `reference`. `so_far` is called with how many runs are verified. Raises UsageError where no record is there, or what
    provenance states cannot be read.
    """
    verdicts = []
    runs = runs_below(place) or [place]
    for path in runs:
        run = stored_run(path)
        name = "" if path == place else run.report_dir.relative_to(place).as_posix()
        verdict, records = verify_run(run, name or run.name, history)
        if reference is not None:
            others = _records(run_named(reference, name) if name else reference)
            verdict.compared = _compared(records, others, tolerance)
            verdict.partnerless = _partnerless(records, others)
        verdicts.append(verdict)
        so_far(f"{len(verdicts)} of {len(runs)} runs")
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
        failures.append(Failure(RESULTS_FILE, RESULTS_FILE, str(error), "a table"))
    read = RunRecords(run.path, _run_name(published))
    for bad in read.read():
        failures.append(Failure(_shown(bad.place), "schema", bad.reason, "a record"))

    records: dict[str, Record] = {}
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
        verdict.float64_unchecked += _lacks_errors(record)
        for finding in provenance_findings(record, one.content.decode(), stated, history):
            if isinstance(finding, Failure):
                failures.append(finding)
            else:
                verdict.stated.append(finding)
    if not verdict.records:
        raise UsageError(
            f"{run.path} holds no record; name a directory that `burst run` left (trials/*/record.json), a packed run "
            "(.jsonl), or an archive"
        )
    lacking = _lacking(run, trials, failures)
    failures += unused_statements(stated, list(records), lacking)
    for trial in lacking:
        says = stated.reason(trial, "trials")
        if says is not None:
            verdict.stated.append(Gap(trial, "trials", says))
        else:
            expected = f"one for every trial of the plan, or a reason about trials in {PROVENANCE_FILE}"
            failures.append(Failure(trial[:200], "schema", "no record", expected))
    failures += _private_texts(run, any("paths" in one.about for one in stated.reasons))
    _products(run, read.rows(), published, verdict)
    if os.path.lexists(run.path / SUMS_FILE):
        failures += sums_failures(run.path)
        verdict.files += 1
    if history.absent:
        verdict.unchecked.append(f"whether commits are in the history: {history.absent}")
    return verdict, records


def _lacks_errors(record: Record) -> bool:
    """Whether our engine gave figures that were not compared with float64. No failure: a check may be left out, with
    its reason in the record, and the first records are older than the check."""
    measured = record.measurement
    if record.status != "ok" or measured is None or not is_of_our_engine(measured):
        return False
    return not measured.extra.get(ERROR)


def _shown(place: RecordPlace) -> str:
    """A place without the path of the run."""
    return f"{place.file.name}:{place.line}" if place.line else f"trials/{place.file.parent.name}"


def _products(
    run: StoredRun, rows: list[Row], published: list[dict[str, str]] | None, verdict: RunVerification
) -> None:
    """What a report made of the records. Of a packed run there may be none."""
    archive = os.path.lexists(run.path / SUMS_FILE)  # whoever reads it is not to change it
    by = "`burst verify pack`" if archive else f"`burst report {run.path}`"
    if published is not None:
        verdict.failures += results_failures(published, rows, by)
        verdict.files += 1
    elif run.report_dir == run.path:
        verdict.failures.append(Failure(RESULTS_FILE, RESULTS_FILE, "no such file", f"what {by} writes"))
    if not rows:
        return
    try:
        count, failures = report_failures(run.report_dir, rows, by)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Records that hold something else than ours do, where any value may stand: tables cannot be made of them.
        found = f"records of which no report can be made ({type(error).__name__}: {error})"
        verdict.failures.append(Failure("trials", "tables", found, "records of ours"))
        return
    verdict.files += count
    verdict.failures += failures


def _run_name(published: list[dict[str, str]] | None) -> str:
    """The name that results.csv gives its run: a folder may have been renamed since. Empty: the folder's own."""
    names = {line.get("run", "") for line in published or ()}
    return names.pop() if len(names) == 1 else ""


def _lacking(run: StoredRun, trials: set[str], failures: list[Failure]) -> list[str]:
    """Trials of the plan that left no record; a plan that cannot be read is one of the `failures`."""
    try:
        return [trial for trial in run.planned() or () if trial not in trials]
    except ValueError:
        failures.append(Failure(RUN_FILE, "schema", "no list of trials", "the plan of a run"))
        return []


def _private_texts(run: StoredRun, home_is_stated: bool) -> list[Failure]:
    failures = []
    for name, text in run.texts():
        for kind in ["no readable file"] if text is None else private_in(text):
            if kind != HOME or not home_is_stated:
                failures.append(Failure(name, "secrets", kind, "none"))
    return failures


def _records(path: Path) -> dict[str, Record]:
    """The usable records of a reference run; none where there is no such run."""
    run = RunRecords(path)
    run.read()
    return {record.trial_id: record for record in run.records()}


def _compared(records: Mapping[str, Record], reference: Mapping[str, Record], tolerance: float) -> list[RowComparison]:
    """Every row that both runs have, by trial id: status, GPU, step time, peak memory and loss.

    A time passes unless its ratio, with the whole interval where both have rounds, lies outside 1 +- `tolerance`.
    """
    both = [trial_id for trial_id in records if trial_id in reference]
    return [one for trial_id in both for one in _row(records[trial_id], reference[trial_id], tolerance)]


def _partnerless(records: Mapping[str, Record], reference: Mapping[str, Record]) -> list[str]:
    """Rows that only one of the runs has, as sentences."""
    return [
        *(f"{trial_id}: not in the reference" for trial_id in records if trial_id not in reference),
        *(f"{trial_id}: only in the reference" for trial_id in reference if trial_id not in records),
    ]


def _row(record: Record, reference: Record, tolerance: float) -> Iterator[RowComparison]:
    def line(quantity: str, found: str, other: str, passed: bool, note: str = "") -> RowComparison:
        return RowComparison(
            trial_id=record.trial_id, quantity=quantity, found=found, reference=other, passed=passed, note=note
        )

    if record.status != reference.status or record.gpu != reference.gpu:
        yield line(
            "status and GPU",
            f"{record.status} on {record.gpu or 'an unknown device'}",
            f"{reference.status} on {reference.gpu or 'an unknown device'}",
            False,
        )
        return
    ours, theirs = record.measurement, reference.measurement
    if record.status != "ok" or ours is None or theirs is None:  # the same reasoned end, such as out of memory
        yield line("status", record.status, reference.status, True)
        return
    ratio = median_ratio(record.step_seconds_by_round, reference.step_seconds_by_round, paired=False)
    low, high = (ratio.interval.low, ratio.interval.high) if ratio.interval else (ratio.value, ratio.value)
    interval = f", 95% interval {low:.3f} to {high:.3f}" if ratio.interval else ", no interval: fewer than three rounds"
    yield line(
        "step time",
        f"{_median(record):.6g} s",
        f"{_median(reference):.6g} s",
        low <= 1 + tolerance and high >= 1 - tolerance,
        f"ratio {ratio.value:.3f}{interval}, tolerance {tolerance:.1%}",
    )
    for quantity, unit, found, other in (
        ("peak memory", " GiB", _peak(ours.peak_allocated_bytes), _peak(theirs.peak_allocated_bytes)),
        ("loss", "", _last(ours.loss), _last(theirs.loss)),
    ):
        if found is None or other is None:
            continue
        note = f"ratio {found / other:.3f}, tolerance {tolerance:.1%}" if other else ""
        passed = abs(found - other) <= tolerance * abs(other)
        yield line(quantity, f"{found:.6g}{unit}", f"{other:.6g}{unit}", passed, note)


def _median(record: Record) -> float:
    return statistics.median(value for part in record.step_seconds_by_round for value in part)


def _peak(ranks: list[int]) -> float | None:
    return max(ranks) / GIB if ranks else None


def _last(values: list[float]) -> float | None:
    return values[-1] if values else None
