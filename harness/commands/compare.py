"""`burst compare`: are these trials faster, slower or not distinguishable? Of two runs, two methods or two commits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.files.errors import shown
from cluster.files.progress import Progress
from harness.base.errors import UsageError, nearest
from harness.commands import parse_tolerance

if TYPE_CHECKING:
    from harness.compare.pairs import ComparedRecord, Comparison

FORMATS = "md,csv,tex"
REGRESSED = 1
_MOST_VALUES = 4  # of a setting, or settings, that a refusal lists


class CompareCommand:
    help = (
        "compare two runs, or the methods, settings or commits of runs, trial by trial; exit code 1 for a worse or "
        "wrong one"
    )

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "directories", nargs="+", type=Path, metavar="DIR",
            help="A (the reference) and B: runs (directories or packed files), or directories that hold runs; one "
            "alone: burst against each other method in it; with --methods or --commits any number",
        )  # fmt: skip
        sides = parser.add_mutually_exclusive_group()
        sides.add_argument(
            "--methods", nargs=2, metavar=("A", "B"), help="compare two methods at equal points of a run"
        )
        sides.add_argument(
            "--commits", nargs=2, metavar=("A", "B"),
            help="compare the records of two commits, earlier attempts and runs moved aside among them",
        )  # fmt: skip
        sides.add_argument(
            "--across", metavar="SETTING", action="append", default=[],
            help="pair trials that differ in this setting, such as dtype or checkpoint: of two runs, or its two values "
            "in one; may be repeated",
        )  # fmt: skip
        parser.add_argument(
            "--tolerance", default="2%", metavar="SHARE",
            help="what may be lost before it is a regression, such as 2%% or 0.02 (default: 2%%)",
        )  # fmt: skip
        parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
        parser.add_argument("--out", type=Path, metavar="DIR", help="write the table to DIR as well")
        parser.add_argument("--format", metavar="LIST", help=f"in which forms (default: {FORMATS}); needs --out")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.base.writable import make_writable, refuse_foreign
        from harness.compare import report
        from harness.report.tables.table import save_table

        formats = _formats(arguments)
        of_methods = len(arguments.directories) == 1 and not (
            arguments.methods or arguments.commits or arguments.across
        )
        places = " and ".join(map(str, arguments.directories))
        with Progress(f"comparing the records of {places}", quiet=arguments.json):
            comparisons = _of_own_method(arguments) if of_methods else [_compared(arguments)]
            named = [(comparison, report.trial_names(comparison)) for comparison in comparisons]
        if arguments.out is not None:
            make_writable(arguments.out)
            tables = []
            for comparison, names in named:
                table = report.comparison_of(comparison, names)
                tables.append(replace(table, name=f"{table.name}_{comparison.labels[0]}") if of_methods else table)
            for path in (arguments.out / f"{table.name}.{kind}" for table in tables for kind in formats):
                refuse_foreign(path, report.TABLE_BEGINNINGS[path.suffix[1:]])
            for table in tables:
                save_table(table, arguments.out, formats)
        if arguments.json:
            plain = [report.to_plain(comparison, names) for comparison, names in named]
            print(json.dumps({"schema": report.SCHEMA, "comparisons": plain} if of_methods else plain[0], indent=1))
        else:
            parts = [
                part
                for comparison, names in named
                for part in (
                    report.heading(comparison),
                    report.pair_lines(comparison, names),
                    [*report.alone(comparison, names), *report.closing(comparison, names)],
                )
            ]
            print("\n\n".join("\n".join(shown(line.replace("\n", " ")) for line in part) for part in parts))
        return REGRESSED if any(one.regressions or one.wrong for one in comparisons) else 0


def _compared(arguments: argparse.Namespace) -> Comparison:
    """The comparison that was asked for. Raises UsageError where no trial of a pair has a number or is wrong."""
    from harness.compare.pairs import compare, ever_kept, of_commit, of_same_steps

    tolerance, directories, across = parse_tolerance(arguments.tolerance), arguments.directories, arguments.across
    if arguments.methods:
        members = _of_all(directories)
        sides = [_of_method(members, method) for method in arguments.methods]
        labels, across = tuple(arguments.methods), ["method"]
        hint = "name two methods that ran at equal settings"
    elif arguments.commits:
        members = ever_kept(directories)
        sides = [of_commit(members, prefix) for prefix in arguments.commits]
        labels = tuple(f"commit {side[0].record.commit}" for side in sides)
        hint = "name commits that ran trials of equal settings"
    elif across:
        labels, sides = _across(directories, across)
        hint = ""
    else:
        if len(directories) != 2:
            raise UsageError(
                f"{len(directories)} directories given; expected A and B, or --methods or --commits for any number"
            )
        sides = [_of_all([directory]) for directory in directories]
        labels = tuple(map(str, directories))
        hint = "name runs of one experiment"
    places = {member.place for member in sides[0]} & {member.place for member in sides[1]}
    if labels[0] == labels[1] or len(places) == len(sides[0]) == len(sides[1]):
        raise UsageError(f"A and B are both {labels[0]}; name two different things to compare")
    if shared := of_same_steps(*sides):
        records = "1 record" if len(shared) == 1 else f"{len(shared)} records"
        raise UsageError(f"A and B share {records}, which would be compared with themselves; name two separate runs")
    one_run = bool(arguments.methods) or (bool(across) and len(directories) == 1)
    found = compare((labels[0], labels[1]), *sides, tolerance=tolerance, across=across, one_run=one_run)
    if not _has_figures(found):
        counts = " and ".join(f"{len(side)} of {label}" for side, label in zip(sides, labels, strict=True))
        what = "no pair of them has a number" if found.pairs else "no two of them have equal settings"
        if not found.pairs and not arguments.methods and not arguments.commits:  # which --across does not go with
            hint = _differing(sides, across) or hint
        raise UsageError(f"nothing to compare: the records found are {counts}, and {what}; {hint}")
    return found


def _has_figures(found: Comparison) -> bool:
    """Whether a trial of a pair has a number or is wrong."""
    return any(pair.outcome != "neither" for pair in found.pairs) or bool(found.pairs and found.wrong)


def _of_own_method(arguments: argparse.Namespace) -> list[Comparison]:
    """Our method (B) against each other one (A) of the runs in one directory, as far as pairs have figures."""
    from harness.compare.pairs import compare
    from harness.report.results import method_rank
    from harness.report.variants import OWN_METHOD

    tolerance, [directory] = parse_tolerance(arguments.tolerance), arguments.directories
    members = _of_all([directory])
    methods = sorted({member.row["method"] for member in members}, key=method_rank)
    others = [method for method in methods if method != OWN_METHOD]
    if OWN_METHOD not in methods and len(others) > 1:
        raise UsageError(f"{directory} has no trial of {OWN_METHOD}; name two of {', '.join(others)} with --methods")
    if not others or OWN_METHOD not in methods:
        raise UsageError(
            f"all trials of {directory} are of one method, {methods[0]}; name another run beside it, or a setting that "
            "varies in it with --across"
        )
    ours = _of_method(members, OWN_METHOD)
    found = [
        compare(
            (method, OWN_METHOD), _of_method(members, method), ours,
            tolerance=tolerance, across=["method"], one_run=True,
        )
        for method in others
    ]  # fmt: skip
    if not any(map(_has_figures, found)):
        raise UsageError(
            f"nothing to compare: no trial of {OWN_METHOD} in {directory} has the settings of one of "
            f"{', '.join(others)} and a number beside it; burst report {directory} shows how each ended"
        )
    return [comparison for comparison in found if _has_figures(comparison)]


def _across(directories: list[Path], across: list[str]) -> tuple[tuple[str, ...], list[list[ComparedRecord]]]:
    """Labels and members of both sides, each of one value of the settings `across`: of two runs, or of one run cut in
    two. Raises UsageError for an unknown setting and for other numbers of values."""
    from harness.compare.pairs import is_across, values_of

    if len(directories) > 2:
        raise UsageError(f"{len(directories)} directories given; --across compares two runs, or two values in one")
    sides = [_of_all([directory]) for directory in directories]
    members = [member for side in sides for member in side]
    known = {name for member in members for name in (*member.settings, *member.groups)}
    for setting in across:
        if setting not in known:
            differing = sorted(name for name in known if _several(members, name))
            near = nearest(setting, sorted(known), listed=differing)
            raise UsageError(f"--across {setting}: no trial of these records has it; {near}")
    varying = [  # of a group such as `checkpoint` the members that tell the two sides apart
        name for name in sorted(known) if is_across(name, across) and _several(members, name)
    ] or across
    by_value: list[dict[str, list[ComparedRecord]]] = []
    for side in sides:
        found: dict[str, list[ComparedRecord]] = {}
        for member in side:
            found.setdefault(values_of(member, varying), []).append(member)
        by_value.append(found)
    names = " and ".join(across)
    if len(directories) == 1:
        [found] = by_value
        if len(found) != 2:
            raise UsageError(
                f"{directories[0]} has {_listed(found)} of {names}; expected two to compare (burst report shows any "
                "number beside each other)"
            )
        return tuple(found), list(found.values())
    for directory, found in zip(directories, by_value, strict=True):
        if len(found) != 1:
            raise UsageError(f"{directory} has {_listed(found)} of {names}; expected one in each of two runs")
    labels = [f"{directory}, {next(iter(found))}" for directory, found in zip(directories, by_value, strict=True)]
    if next(iter(by_value[0])) == next(iter(by_value[1])):
        raise UsageError(f"A and B both have {next(iter(by_value[0]))}; leave --across {across[0]} out")
    return tuple(labels), sides


def _several(members: Sequence[ComparedRecord], name: str) -> bool:
    """Whether they have several values of this setting."""
    return len({one.settings.get(name) for one in members}) > 1


def _listed(values: Iterable[str]) -> str:
    found = list(values)
    shown_few = ", ".join(found[:_MOST_VALUES]) + (" ..." if found[_MOST_VALUES:] else "")
    return f"{len(found)} value{'' if len(found) == 1 else 's'} ({shown_few})"


def _differing(sides: list[list[ComparedRecord]], across: list[str]) -> str:
    """What the most alike trials of both sides differ in, with the option that pairs them; empty where that is much."""
    from harness.compare.pairs import closest, differing, values_of

    first, second = closest(*sides)
    names = sorted({name.partition(".")[0] for name in differing(first, second)})
    if not 0 < len(names) <= _MOST_VALUES:
        return ""
    options = " ".join(f"--across {name}" for name in dict.fromkeys([*across, *names]))
    return f"the most alike are {values_of(first, names)} and {values_of(second, names)}: {options} pairs such trials"


def _of_all(directories: list[Path]) -> list[ComparedRecord]:
    from harness.compare.pairs import of_directory
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
