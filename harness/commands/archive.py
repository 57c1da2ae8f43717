"""`burst archive`: a run as one file for a paper's artifact, which `burst verify` accepts on another machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.files.errors import shown
from harness.base.errors import UsageError


class Archive:
    help = "pack a run's records, figures, environment and commands into one file that `burst verify` checks"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("directory", type=Path, metavar="DIR", help="a directory `burst run` left")
        parser.add_argument(
            "--out", type=Path, metavar="FILE", help="the archive (default: the directory's name with .tar.gz, here)"
        )
        parser.add_argument("--logs", action="store_true", help="with the logs and traces of the trials")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.report.site import runs_below
        from harness.verify.packing import pack

        directory = arguments.directory
        if runs := runs_below(directory):
            raise UsageError(f"{directory} holds {len(runs)} runs; pack one at a time, such as {runs[0]}")
        out = arguments.out or Path(f"{directory.resolve().name}.tar.gz")
        try:
            pack(directory, out, logs=arguments.logs)
        except ValueError as error:
            raise UsageError(str(error)) from error
        print(shown(f"Archive: {out}"))
        return 0


COMMAND = Archive()
