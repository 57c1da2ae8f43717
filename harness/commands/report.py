"""`burst report`: tables, plots and one HTML file from records alone, or one site of all runs below a directory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cluster.files.errors import shown
from cluster.files.progress import Progress, say
from harness.base.errors import UsageError

FORMATS = "html,md,csv,tex,png,pdf"


class ReportCommand:
    help = "write tables, plots and one HTML file from the records of one or more runs"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "runs", nargs="+", type=Path, metavar="RUN",
            help="a directory `burst run` left, or a packed run (.jsonl); or a directory that holds runs: then a site "
            "with an index",
        )  # fmt: skip
        parser.add_argument(
            "--format", metavar="LIST", help=f"which files (default: {FORMATS}; of a site: html, which it always has)"
        )
        parser.add_argument(
            "--baseline", metavar="METHOD",
            help="method that tables compare the others with (default: at every point the best other one)",
        )  # fmt: skip
        parser.add_argument(
            "--subject",
            metavar="METHOD",
            help="method that is held against each of the others (default: burst)",
        )
        parser.add_argument(
            "--label", metavar="METHOD=NAME", action="append", default=[],
            help="show NAME for a method in tables and figures, such as mine=Ours; may be repeated",
        )  # fmt: skip
        parser.add_argument(
            "--set-aside-bad", action="store_true", help="rename records that cannot be used, and go on without them"
        )
        parser.add_argument(
            "--out", type=Path, metavar="DIR",
            help="where they go (default: the first RUN; of a packed run the directory of its name, beside it)",
        )  # fmt: skip

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.base.writable import refuse_foreign
        from harness.records.stored import REPORT_FILE, RESULTS_FILE, runs_below, stored_run
        from harness.report.html import page_beginning
        from harness.report.page import write_report
        from harness.report.results import CSV_BEGINNING
        from harness.report.site import INDEX_FILE, write_site

        runs, out = arguments.runs, arguments.out or stored_run(arguments.runs[0]).report_dir
        sites = [path for path in runs if runs_below(path)]
        if sites and len(runs) > 1:
            raise UsageError(f"{sites[0]} holds several runs; give it alone for a site, or name the runs in it")
        if sites:
            refuse_foreign(out / INDEX_FILE, page_beginning())
            for path in runs_below(sites[0]):
                _refuse_other_run(out / stored_run(path).report_dir.relative_to(sites[0]), [path])
        else:
            _refuse_other_run(out, runs)
            if arguments.out is not None:  # a run's own directory has no file of others
                refuse_foreign(out / REPORT_FILE, page_beginning())
                refuse_foreign(out / RESULTS_FILE, CSV_BEGINNING)
                if not (out / REPORT_FILE).is_file() and not (out / RESULTS_FILE).is_file():
                    _refuse_other_drawings(out, _formats(arguments.format, FORMATS))
        problems: list[str] = []
        aside, baseline, subject = arguments.set_aside_bad, arguments.baseline, arguments.subject
        labels = _labels(arguments.label)
        if subject is not None and subject == baseline:
            raise UsageError(f"--subject and --baseline are both {subject}; name two methods")
        try:
            formats = _formats(arguments.format, "html" if sites else FORMATS)
            with Progress(f"drawing the report of {', '.join(map(str, runs))}") as progress:
                if sites:
                    path, problems = write_site(
                        sites[0], out, formats, baseline=baseline, subject=subject, labels=labels,
                        set_bad_aside=aside, say=say, so_far=progress.so_far,
                    )  # fmt: skip
                else:
                    path = write_report(
                        runs, out, formats, baseline=baseline, subject=subject, labels=labels, set_bad_aside=aside,
                        say=say,
                    )  # fmt: skip
        except ValueError as error:
            raise UsageError(str(error)) from error
        for problem in problems:
            say(f"burst: {problem}")
        print(shown(f"Report: {path}"))
        return 1 if problems else 0


def _refuse_other_run(out: Path, runs: Sequence[Path]) -> None:
    """Raise UsageError where a report would go into the directory of a run that it is not about: that run's own would
    be lost, and the numbers there be those of other records."""
    from harness.records.stored import is_run, resolved

    if is_run(out) and resolved(out) not in map(resolved, runs):
        others = ", ".join(map(str, runs))
        raise UsageError(f"{out} is a run, whose report one of {others} would replace; give --out another directory")


def _refuse_other_drawings(out: Path, formats: list[str]) -> None:
    """Raise UsageError where a directory without a report has files of these formats in the folders in which one keeps
    its own: no table or figure says whose it is."""
    for folder in (out / "tables", out / "figures"):
        for path in folder.glob("*"):
            if path.suffix[1:] in formats:
                raise UsageError(f"{folder} holds {path.name}, and {out} no report of burst; give another --out")


def _labels(given: list[str]) -> dict[str, str]:
    """Names by method. Raises UsageError for what is no METHOD=NAME, and for a method that is named twice."""
    labels: dict[str, str] = {}
    for text in given:
        method, _, name = (part.strip() for part in text.partition("="))
        if not method or not name:
            raise UsageError(f"--label {text}: expected METHOD=NAME, such as mine=Ours")
        if method in labels:
            raise UsageError(f"--label {text}: {method} is called {labels[method]} already; give each method one name")
        labels[method] = name
    return labels


def _formats(given: str | None, default: str) -> list[str]:
    formats = [part.strip() for part in (default if given is None else given).split(",") if part.strip()]
    if not formats:
        raise UsageError(f"--format {given!r} names no format; choose from {FORMATS}")
    return formats


COMMAND = ReportCommand()
