"""`burst verify`: a second look at the records, figures, tables and provenance of a run, or of an archive of one.

`burst verify pack` makes a run one file that `burst verify` accepts on another machine: an archive for a paper's
artifact, or a packed run, which every command that reads runs takes in the place of a directory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.files.errors import counted, shown
from cluster.files.progress import Progress
from harness.base.errors import UsageError
from harness.commands import parse_tolerance

if TYPE_CHECKING:
    from harness.records.stored import StoredRun


class VerifyCommand:
    help = "check a run, all runs below a directory, or an archive: records, figures, tables, provenance"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "place", type=Path, metavar="RUN|DIR|ARCHIVE",
            help="a run (a directory `burst run` left, or a packed file), a directory that holds runs, or an archive",
        )  # fmt: skip
        parser.add_argument(
            "--reference",
            type=Path,
            metavar="RUN|DIR|ARCHIVE",
            help="compare each row with the same trial's row in there",
        )
        parser.add_argument(
            "--tolerance", metavar="SHARE",
            help="of a step's time, peak memory and loss beside the reference's, as 5%% or 0.05 (default: 5%%)",
        )  # fmt: skip
        parser.add_argument("--json", action="store_true", help="print one JSON value instead of lines")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.verify.finding import as_json, lines
        from harness.verify.provenance import CommitHistory
        from harness.verify.verdict import verify

        if arguments.tolerance is not None and not arguments.reference:
            raise UsageError("--tolerance is for a comparison, found no --reference; give the run to compare with")
        tolerance = parse_tolerance("5%" if arguments.tolerance is None else arguments.tolerance)
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(Progress(f"verifying {arguments.place}", quiet=arguments.json))
            reference = _readable(arguments.reference, stack) if arguments.reference else None
            place = _readable(arguments.place, stack)
            verdicts = verify(place, CommitHistory(), reference, tolerance, so_far=progress.so_far)
        if arguments.json:
            print(json.dumps(as_json(verdicts), indent=1))
        else:
            for line in lines(verdicts):
                print(shown(line))
        return 0 if all(verdict.holds for verdict in verdicts) else 1


def _readable(place: Path, stack: contextlib.ExitStack) -> Path:
    """A directory or a packed run as it is; an archive unpacked, until `stack` closes."""
    from harness.records.packed import SUFFIX
    from harness.verify.unpacking import unpacked

    return place if place.is_dir() or place.suffix == SUFFIX else stack.enter_context(unpacked(place))


# Endings of formats that `pack` does not write.
_OTHER_FORMATS = (".7z", ".bz2", ".csv", ".gz", ".json", ".tar", ".xz", ".zip", ".zst")


class PackCommand:
    help = "pack a run into one file: an archive with figures and environment (.tar.gz), or its records alone (.jsonl)"

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
        from harness.run.directory import RunDirectory
        from harness.verify.packing import pack, pack_lines
        from harness.verify.provenance import CommitHistory
        from harness.verify.verdict import verify

        path = arguments.run
        if runs := runs_below(path):
            raise UsageError(f"{path} holds {len(runs)} runs; pack one at a time, such as {runs[0]}")
        out = arguments.out or Path(f"{stored_run(path).name}.tar.gz")
        as_lines = out.suffix == SUFFIX
        if out.suffix in _OTHER_FORMATS and not out.name.endswith(".tar.gz"):
            raise UsageError(f"--out {out}: expected a name that ends with .tar.gz (an archive) or {SUFFIX} (records)")
        if as_lines and arguments.logs:
            raise UsageError(
                f"{out} would be a packed run, which holds no logs; leave out --logs, or name a .tar.gz file"
            )
        if arguments.replace and not as_lines:
            raise UsageError(f"--replace is for packed runs, and {out} would be an archive; give --out another name")
        try:
            if RunDirectory(path).in_use():
                raise UsageError(f"{path} is a run that goes on; pack it when it has ended, which burst status tells")
            with Progress(f"packing {path}"):
                if as_lines:
                    pack_lines(path, out, replace=arguments.replace)
                else:
                    pack(path, out, logs=arguments.logs)
        except ValueError as error:
            raise UsageError(str(error)) from error
        print(shown(f"{'Packed run' if as_lines else 'Archive'}: {out}{_part_of(stored_run(path))}"))
        with contextlib.ExitStack() as stack:
            stack.enter_context(Progress(f"verifying {out}"))
            verdicts = verify(_readable(out, stack), CommitHistory())
        failures = sum(len(verdict.failures) for verdict in verdicts)
        if failures:
            found = f"{out} fails {counted(failures, 'check')}; burst verify {shlex.quote(str(out))} says which"
            print(shown(f"note: {found}"), file=sys.stderr)
        return 0


def _part_of(run: StoredRun) -> str:
    """How many trials of the plan have a record, where some have none; empty otherwise, and for a packed run."""
    try:
        planned = run.planned() or []
    except ValueError:  # a damaged plan, which `burst verify` names
        return ""
    having = sum(run.record_file(trial).is_file() for trial in planned)
    return f", {having} of {len(planned)} trials" if having < len(planned) else ""


COMMAND = VerifyCommand()
VERBS = {"pack": PackCommand()}
