"""The pages of a checkout: numbers of its published records, and verdicts on the paper's claims, between markers.

    python -m harness.pages           # or: make docs

`harness.report.quoted` reads the markers and computes numbers and tables of records. The table of claims is made by the
code behind `burst reproduce claims`, so that the command and docs/paper.md give one verdict. The list of published runs
is read from their files, and what `burst conform` found of each system from results/conform.
"""

from __future__ import annotations

import sys
from pathlib import Path

from conform.matrix import matrix_lines
from harness.base.errors import UsageError
from harness.records.stored import read_records, runs_below, stored_run
from harness.report.page import days_of, distinct
from harness.report.quoted import RECORDS, Quotes, write_pages
from harness.reproduce.claims import claims_lines, judged
from harness.reproduce.points import all_rows, runs_in

CLAIMS, RUNS, CONFORM = "claims", "published_runs", "conform"  # names of markers


def quotes_of(root: Path) -> Quotes:
    """What pages of the checkout at `root` may quote. Its own published records decide on claims, local runs do not."""
    published = root / RECORDS
    made = {
        CLAIMS: lambda: claims_lines(judged(all_rows(runs_in([published])))),
        RUNS: lambda: runs_lines(published),
        CONFORM: lambda: matrix_lines(root / "results" / "conform"),
    }
    return Quotes(root, made)


def runs_lines(published: Path) -> list[str]:
    """A Markdown table with a line for every run below `published`: its file, question, hardware, days and trials; of a
    run whose code is lost, that."""
    lines = ["| run | question | hardware | measured | trials |", "| --- | --- | --- | --- | --- |"]
    for path in runs_below(published):
        records, name = read_records(path), path.relative_to(published).with_suffix("").as_posix()
        ranks = max(record.settings.world_size for record in records)
        hardware = distinct(record.gpu for record in records)
        lost = any("lost_commit" in reason.about for reason in stored_run(path).stated().reasons)
        cells = (
            f"[{name}]({path.relative_to(published).as_posix()})",
            distinct(record.title for record in records) + (" (its commits are in no history)" if lost else ""),
            hardware if hardware == "cpu" else f"{ranks} x {hardware}",
            days_of(records),
            str(len(records)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    try:
        write_pages(quotes_of(Path(__file__).parents[1]))
    except UsageError as found:
        sys.exit(str(found))
