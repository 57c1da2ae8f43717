"""`burst archive`: a run as one file that `burst verify` accepts on another machine: an archive for a paper's artifact,
or a packed run, which every command that reads runs takes in the place of a directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.files.errors import shown
from harness.base.errors import UsageError


class ArchiveCommand:
    help = "pack a run into one file: an archive with figures and environment (.tar.gz), or its records alone (.jsonl)"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "run", type=Path, metavar="RUN", help="a directory `burst run` left, or a packed run (.jsonl)"
        )
        parser.add_argument(
            "--out", type=Path, metavar="FILE",
            help="the archive (default: the run's name with .tar.gz, here); a name that ends with .jsonl makes a "
            "packed run: provenance on the first line, then a record on each",
        )  # fmt: skip
        parser.add_argument("--logs", action="store_true", help="with the logs and traces of the trials")
        parser.add_argument("--replace", action="store_true", help="overwrite a packed run that has other contents")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.records.packed import SUFFIX
        from harness.records.stored import runs_below, stored_run
        from harness.verify.packing import pack, pack_lines

        path = arguments.run
        if runs := runs_below(path):
            raise UsageError(f"{path} holds {len(runs)} runs; pack one at a time, such as {runs[0]}")
        out = arguments.out or Path(f"{stored_run(path).name}.tar.gz")
        as_lines = out.suffix == SUFFIX
        if as_lines and arguments.logs:
            raise UsageError(
                f"{out} would be a packed run, which holds no logs; leave out --logs, or name a .tar.gz file"
            )
        if arguments.replace and not as_lines:
            raise UsageError(f"--replace is for packed runs, and {out} would be an archive; give --out another name")
        try:
            if as_lines:
                pack_lines(path, out, replace=arguments.replace)
            else:
                pack(path, out, logs=arguments.logs)
        except ValueError as error:
            raise UsageError(str(error)) from error
        print(shown(f"{'Packed run' if as_lines else 'Archive'}: {out}"))
        return 0


COMMAND = ArchiveCommand()
