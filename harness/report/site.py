"""Reports of all runs below a directory as one site: a page for each run, and an index that links them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote

from engine.atomic import write_atomic
from harness.base.errors import UsageError
from harness.base.writable import make_writable
from harness.metrics.intervals import Interval
from harness.records.stored import runs_below, stored_run
from harness.report.headline import headline_of, wrong_sentences
from harness.report.html import Dots, RatioRow, ratio_dots, render_page
from harness.report.page import checked_formats, counted, days_of, distinct, named_runs, read_runs, write_report_of
from harness.report.rankings import SizeRanking
from harness.report.tables.comparison import known_baseline
from harness.report.variants import OWN_METHOD, is_subject, with_subject

INDEX_FILE = "index.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run of the index. `link` is empty where the run has no page, and `problem` says why."""

    folder: str  # of the run, below the site's root
    link: str = ""
    title: str = ""
    finding: str = ""  # the verdict of its report
    hardware: str = ""
    records: int = 0
    statuses: Sequence[tuple[str, int]] = field(default_factory=tuple)
    started: str = ""
    commit: str = ""
    problem: str = ""
    said: Sequence[str] = ()  # what was to be told while the run was read
    compared: RatioRow | None = None  # our speed over the fastest other method's, where both ran on GPUs


def write_site(
    root: Path,
    out: Path,
    formats: Iterable[str] = ("html",),
    *,
    baseline: str | None = None,
    subject: str | None = None,
    labels: Mapping[str, str] | None = None,
    set_bad_aside: bool = False,
    say: Callable[[str], None] = lambda _: None,
    so_far: Callable[[str], None] = lambda _: None,
) -> tuple[Path, list[str]]:
    """Write the report of every run below `root` to the same place below `out`, and an index of them.

    Tables of a run with trials of method `baseline` compare with it, those of a run with trials of `subject` hold that
    one against the others (by default burst), and `labels` are names shown instead of methods' own.
    `so_far` is called after each run with how many of them are written.
    Returns the index, and a sentence about every run whose records cannot be read; the index shows it as well. Raises
    UsageError when no run is there, for an unknown format or a baseline that no run has, and when `out` cannot be
    written.
    """
    runs = runs_below(root)
    if not runs:
        raise UsageError(
            f"no run below {root}; name a directory that holds runs: directories `burst run` left, or packed files"
        )
    make_writable(out)
    wanted = checked_formats({"html", *formats})
    labels = labels or {}
    if baseline is not None or subject is not None or labels:
        every = [row for run in runs for row in _rows_or_none(run)]
        known_baseline(baseline, every)
        with_subject(every, subject, labels)
    write = partial(
        _entry, root=root, out=out, formats=wanted, baseline=baseline, subject=subject, labels=labels,
        set_bad_aside=set_bad_aside,
    )  # fmt: skip
    entries = []
    for entry in _in_processes(write, runs):
        for sentence in entry.said:
            say(sentence)
        entries.append(entry)
        so_far(f"{len(entries)} of {len(runs)} runs")
    shown = sorted((entry for entry in entries if entry.problem or entry.records), key=lambda entry: entry.started,
                   reverse=True)  # fmt: skip
    shown.sort(key=lambda entry: entry.hardware in ("", "cpu"))
    plot, verdict = _overview(shown)
    text = render_page(
        "index.html.j2",
        title=f"Reports of {root.resolve().name}",
        entries=shown,
        records=sum(entry.records for entry in shown),
        runs=len(shown),
        plot=plot,
        verdict=verdict,
        sections=[],
    )
    return write_atomic(out / INDEX_FILE, text), [entry.problem for entry in entries if entry.problem]


def _in_processes(write: Callable[[Path], RunRow], runs: Sequence[Path]) -> Iterator[RunRow]:
    """The entries in the order of `runs`, written by as many processes as there are cores."""
    workers = min(len(os.sched_getaffinity(0)), len(runs))
    if workers < 2:
        yield from map(write, runs)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(write, runs)


def _rows_or_none(run: Path) -> list[dict[str, object]]:
    try:
        return read_runs([run])[1]
    except UsageError:  # said where the run's report is written
        return []


def _entry(
    run: Path,
    *,
    root: Path,
    out: Path,
    formats: frozenset[str],
    baseline: str | None,
    subject: str | None,
    labels: Mapping[str, str],
    set_bad_aside: bool,
) -> RunRow:
    """Write one run's report; returns its line of the index."""
    folder, said = stored_run(run).report_dir.relative_to(root), list[str]()
    try:
        records, rows = read_runs([run], set_bad_aside=set_bad_aside, say=said.append)
    except UsageError as error:
        return RunRow(folder=folder.as_posix(), problem=str(error))
    if not records:
        return RunRow(folder=folder.as_posix(), said=said)
    methods = {row["method"] for row in rows}
    ours = {method: label for method, label in labels.items() if method in methods}
    rows = with_subject(rows, subject if subject in methods else None, ours)
    index = "../" * len(folder.parts) + INDEX_FILE
    page = write_report_of(
        records, rows, out / folder, formats, index=index, baseline=baseline, run_dirs=named_runs([run]),
        site=out,
    )  # fmt: skip
    headline = headline_of(rows, baseline)
    wrong = wrong_sentences(rows)
    link = quote(page.relative_to(out).as_posix())
    title = distinct(record.title or record.experiment for record in records)
    return RunRow(
        folder=folder.as_posix(),
        link=link,
        title=title,
        finding=wrong[0] if wrong else headline.verdict,
        hardware=distinct(record.gpu for record in records),
        records=len(records),
        statuses=counted(record.status for record in records),
        started=days_of(records),
        commit=distinct(record.commit[:10] for record in records),
        said=said,
        compared=_against_others(headline.rankings[:1], title, link),
    )


def _against_others(first: Sequence[SizeRanking], title: str, link: str) -> RatioRow | None:
    """Our ratio at the run's largest size at which other methods ran; None on emulated nodes, which are slower than the
    host without them."""
    for ranking in first:
        subject, other = ranking.subject, ranking.other
        found = ranking.beside(other) if other else None
        own = ranking.of_methods and is_subject(subject.rows[0])
        if own and other and found and ranking.rows[0]["emulate_nodes"] == 1:
            return RatioRow(
                subject=subject.called,
                name=title,
                link=link,
                about=ranking.place,
                ratio=found.ratio,
                verdict=found.text,
                other=other.short,
            )
    return None


def _overview(entries: Sequence[RunRow]) -> tuple[Dots | None, str]:
    """Runs in which other methods ran on GPUs, in three rounds or more, as one dot plot, and what it shows in words."""
    every = [entry.compared for entry in entries if entry.compared]
    sure = [one for one in every if isinstance(one.ratio.spread, Interval)]
    left = len(every) - len(sure)
    note = f"{left} more runs had fewer than three rounds, and so no interval; they are below." if left else ""
    counts = [sum(one.verdict.startswith(word) for one in sure) for word in ("faster", "slower", "not")]
    subject = every[0].subject if every else OWN_METHOD
    verdict = (
        f"{subject} is faster than the fastest other method in {counts[0]} of {len(sure)} runs with an interval, "
        f"slower in {counts[1]}, not distinguishable in {counts[2]}."
    )
    return ratio_dots(sure, note), verdict
