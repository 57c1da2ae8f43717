"""`burst report`: tables, plots and one HTML file from records alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cluster.shown import shown
from harness.errors import UsageError

FORMATS = "html,md,csv,tex,png,pdf"


class Report:
    help = "write tables, plots and one HTML file from the records of one or more runs"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="a directory `burst run` left")
        parser.add_argument("--format", default=FORMATS, metavar="LIST", help=f"which files (default: {FORMATS})")
        parser.add_argument(
            "--set-aside-bad", action="store_true", help="rename records that cannot be used, and go on without them"
        )
        parser.add_argument("--out", type=Path, metavar="DIR", help="where they go (default: the first DIR)")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.report import write_report

        def say(sentence: str) -> None:
            print(shown(sentence), file=sys.stderr)

        formats = [part.strip() for part in arguments.format.split(",") if part.strip()]
        if not formats:
            raise UsageError(f"--format {arguments.format!r} names no format; choose from {FORMATS}")
        try:
            path = write_report(
                arguments.directories,
                arguments.out or arguments.directories[0],
                formats,
                set_bad_aside=arguments.set_aside_bad,
                say=say,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        print(shown(f"Report: {path}"))
        return 0


COMMAND = Report()
