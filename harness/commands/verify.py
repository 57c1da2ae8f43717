"""`burst verify`: a second look at the records, figures, tables and provenance of a run, or of an archive of one."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

from cluster.files.errors import shown
from harness.commands import parse_tolerance


class VerifyCommand:
    help = "check a run, all runs below a directory, or an archive: records, figures, tables, provenance"
    forwards = False

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
            "--tolerance", default="5%", metavar="SHARE",
            help="of a step's time, peak memory and loss beside the reference's, as 5%% or 0.05 (default: 5%%)",
        )  # fmt: skip
        parser.add_argument("--json", action="store_true", help="print one JSON value instead of lines")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.records.packed import SUFFIX
        from harness.verify.finding import as_json, lines
        from harness.verify.provenance import CommitHistory
        from harness.verify.unpacking import unpacked
        from harness.verify.verdict import verify

        tolerance = parse_tolerance(arguments.tolerance)
        with contextlib.ExitStack() as stack:

            def readable(place: Path) -> Path:
                return place if place.is_dir() or place.suffix == SUFFIX else stack.enter_context(unpacked(place))

            reference = readable(arguments.reference) if arguments.reference else None
            verdicts = verify(readable(arguments.place), CommitHistory(), reference, tolerance)
        if arguments.json:
            print(json.dumps(as_json(verdicts), indent=1))
        else:
            for line in lines(verdicts):
                print(shown(line))
        return 0 if all(verdict.holds for verdict in verdicts) else 1


COMMAND = VerifyCommand()
