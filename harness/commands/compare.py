"""`burst compare`: are these trials faster, slower or not distinguishable? Of two runs, two methods or two commits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.files.errors import shown
from harness.base.errors import UsageError, nearest
from harness.commands import parse_tolerance

if TYPE_CHECKING:
    from harness.compare.pairs import Comparison
    from harness.compare.sources import ComparedRecord

FORMATS = "md,csv,tex"
REGRESSED = 1


class CompareCommand:
    help = (
        "compare two runs, two methods of a run, or two commits, trial by trial; exit code 1 for a worse or wrong one"
    )
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "directories", nargs="+", type=Path, metavar="DIR",
            help="A (the reference) and B: runs (directories or packed files), or directories that hold runs; with "
            "--methods or --commits any number",
        )  # fmt: skip
        sides = parser.add_mutually_exclusive_group()
        sides.add_argument(
            "--methods", nargs=2, metavar=("A", "B"), help="compare two methods at equal points of a run"
        )
        sides.add_argument(
            "--commits", nargs=2, metavar=("A", "B"),
            help="compare the records of two commits, earlier attempts and runs moved aside among them",
        )  # fmt: skip
        parser.add_argument(
            "--tolerance", default="2%", metavar="SHARE",
            help="what may be lost before it is a regression, such as 2%% or 0.02 (default: 2%%)",
        )  # fmt: skip
        parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
        parser.add_argument("--out", type=Path, metavar="DIR", help="write the table to DIR as well")
        parser.add_argument("--format", metavar="LIST", help=f"in which forms (default: {FORMATS}); needs --out")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.base.writable import make_writable
        from harness.compare import report
        from harness.report.tables.table import save_table

        formats = _formats(arguments)
        comparison = _compared(arguments)
        names = report.trial_names(comparison, one_run=arguments.methods is not None)
        if arguments.out is not None:
            make_writable(arguments.out)
            save_table(report.comparison_of(comparison, names), arguments.out, formats)
        if arguments.json:
            print(json.dumps(report.to_plain(comparison, names), indent=1))
        else:
            parts = (
                report.heading(comparison),
                report.pair_lines(comparison, names),
                [*report.alone(comparison, names), *report.closing(comparison, names)],
            )
            print("\n\n".join("\n".join(shown(line.replace("\n", " ")) for line in part) for part in parts))
        return REGRESSED if comparison.regressions or comparison.wrong else 0


def _compared(arguments: argparse.Namespace) -> Comparison:
    """The comparison that was asked for. Raises UsageError where no trial of a pair has a number or is wrong."""
    from harness.compare.pairs import compare
    from harness.compare.sources import ever_kept, of_commit

    tolerance, directories = parse_tolerance(arguments.tolerance), arguments.directories
    if arguments.methods:
        members = _of_all(directories)
        sides = [_of_method(members, method) for method in arguments.methods]
        labels = tuple(arguments.methods)
        hint = "name two methods that ran at equal settings"
    elif arguments.commits:
        members = ever_kept(directories)
        sides = [of_commit(members, prefix) for prefix in arguments.commits]
        labels = tuple(f"commit {side[0].record.commit}" for side in sides)
        hint = "name commits that ran trials of equal settings"
    else:
        if len(directories) != 2:
            given = "1 directory" if len(directories) == 1 else f"{len(directories)} directories"
            raise UsageError(f"{given} given; expected A and B, or one directory with --methods or --commits")
        sides = [_of_all([directory]) for directory in directories]
        labels = tuple(map(str, directories))
        hint = "name runs of one experiment"
    shared = {member.place for member in sides[0]} & {member.place for member in sides[1]}
    if labels[0] == labels[1] or len(shared) == len(sides[0]) == len(sides[1]):
        raise UsageError(f"A and B are both {labels[0]}; name two different things to compare")
    if shared:
        records = "1 record" if len(shared) == 1 else f"{len(shared)} records"
        raise UsageError(f"A and B share {records}, which would be compared with themselves; name two separate runs")
    found = compare((labels[0], labels[1]), *sides, tolerance=tolerance, one_run=bool(arguments.methods))
    if all(pair.outcome == "neither" for pair in found.pairs) and not (found.pairs and found.wrong):
        counts = " and ".join(f"{len(side)} of {label}" for side, label in zip(sides, labels, strict=True))
        what = "no pair of them has a number" if found.pairs else "no two of them have equal settings"
        raise UsageError(f"nothing to compare: the records found are {counts}, and {what}; {hint}")
    return found


def _of_all(directories: list[Path]) -> list[ComparedRecord]:
    from harness.compare.sources import of_directory
    from harness.records.stored import resolved

    unique = dict.fromkeys(map(resolved, directories))
    return [member for directory in unique for member in of_directory(directory)]


def _of_method(members: list[ComparedRecord], method: str) -> list[ComparedRecord]:
    found = [member for member in members if member.row["method"] == method]
    if not found:
        known = sorted({member.row["method"] for member in members})
        raise UsageError(f"--methods {method}: no trial of these records is of that method; {nearest(method, known)}")
    return found


def _formats(arguments: argparse.Namespace) -> list[str]:
    if arguments.format is None:
        return FORMATS.split(",")
    if arguments.out is None:
        raise UsageError("--format is given without --out; name the directory that the table is written to")
    formats = [part.strip() for part in arguments.format.split(",") if part.strip()]
    unknown = [form for form in formats if form not in FORMATS.split(",")]
    if unknown or not formats:
        raise UsageError(f"--format {arguments.format}: expected a list of {FORMATS}")
    return formats


COMMAND = CompareCommand()
