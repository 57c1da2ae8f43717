"""Reports of all runs below a directory as one site: a page for each run, and an index that links them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from engine.atomic import write_atomic
from harness.base.errors import UsageError
from harness.base.writable import make_writable
from harness.records.record import Record
from harness.records.stored import runs_below, stored_run
from harness.report.headline import summary_sentences, wrong_sentences
from harness.report.html import render_page
from harness.report.page import checked_formats, days_of, distinct, named_runs, read_runs, write_report_of
from harness.report.results import Row
from harness.report.tables.comparison import known_baseline

INDEX_FILE = "index.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run of the index. `link` is empty where the run has no page, and `problem` says why."""

    folder: str  # of the run, below the site's root
    link: str = ""
    title: str = ""
    finding: str = ""  # the first sentence of its report
    hardware: str = ""
    records: int = 0
    statuses: Sequence[tuple[str, int]] = field(default_factory=tuple)
    started: str = ""
    commit: str = ""
    problem: str = ""


def write_site(
    root: Path,
    out: Path,
    formats: Iterable[str] = ("html",),
    *,
    baseline: str | None = None,
    set_bad_aside: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Path, list[str]]:
    """Write the report of every run below `root` to the same place below `out`, and an index of them.

    Tables of a run with trials of method `baseline` compare with it. Returns the index, and a sentence about every run
    whose records cannot be read; the index shows it as well. Raises UsageError when no run is there, for an unknown
    format or a baseline that no run has, and when `out` cannot be written.
    """
    runs = runs_below(root)
    if not runs:
        raise UsageError(
            f"no run below {root}; name a directory that holds runs: directories `burst run` left, or packed files"
        )
    make_writable(out)
    wanted = checked_formats({"html", *formats})
    read: dict[Path, tuple[list[Record], list[Row]] | str] = {}
    for run in runs:
        try:
            read[run] = read_runs([run], set_bad_aside=set_bad_aside, say=say)
        except UsageError as error:
            read[run] = str(error)
    known_baseline(baseline, [row for found in read.values() if not isinstance(found, str) for row in found[1]])
    entries = []
    for run, found in read.items():
        folder = stored_run(run).report_dir.relative_to(root)
        if isinstance(found, str):
            entries.append(Entry(folder=folder.as_posix(), problem=found))
        elif found[0]:
            entries.append(_entry(*found, run, folder, out, wanted, baseline))
    text = render_page(
        "index.html.j2",
        title=f"Reports of {root.resolve().name}",
        entries=entries,
        records=sum(entry.records for entry in entries),
        runs=len(entries),
    )
    return write_atomic(out / INDEX_FILE, text), [entry.problem for entry in entries if entry.problem]


def _entry(
    records: Sequence[Record],
    rows: Sequence[Row],
    run: Path,
    folder: Path,
    out: Path,
    formats: frozenset[str],
    baseline: str | None,
) -> Entry:
    """Write one run's report; returns its line of the index."""
    index = "../" * len(folder.parts) + INDEX_FILE
    page = write_report_of(
        records, rows, out / folder, formats, index=index, baseline=baseline, run_dirs=named_runs([run]), site=out
    )
    return Entry(
        folder=folder.as_posix(),
        link=quote(page.relative_to(out).as_posix()),
        title=distinct(record.title or record.experiment for record in records),
        finding=[*wrong_sentences(rows), *summary_sentences(rows)][0],
        hardware=distinct(record.gpu for record in records),
        records=len(records),
        statuses=_statuses(records),
        started=days_of(records),
        commit=distinct(record.commit[:10] for record in records),
    )


def _statuses(records: Sequence[Record]) -> list[tuple[str, int]]:
    counts = Counter(record.status for record in records)
    return sorted(counts.items(), key=lambda item: (item[0] != "ok", item[0]))
