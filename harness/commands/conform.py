"""`burst conform`: compares an implementation of context parallelism with float64 on one process, case by case."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.files.errors import shown
from cluster.files.progress import Progress, say
from engine.atomic import write_atomic
from engine.reader import read_json
from harness.base.errors import UsageError
from harness.base.writable import make_writable
from harness.commands import command_line

if TYPE_CHECKING:
    from conform.cases import ConformCase
    from conform.report import ConformReport
    from conform.run import CaseResult
    from conform.target import LoadedTarget


class ConformCommand:
    help = "test an implementation of context parallelism, ours or another, against float64"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "target", nargs="?", metavar="TARGET", help="a Python file, or a name that --list prints, of what is judged"
        )
        parser.add_argument("--list", action="store_true", help="print the targets and all cases with their sources")
        parser.add_argument("--case", nargs="+", metavar="NAME", help="these cases alone")
        parser.add_argument("--quick", action="store_true", help="five cases of attention alone, in seconds")
        parser.add_argument("--ranks", nargs="+", type=int, metavar="N", help="on these numbers of ranks alone")
        parser.add_argument(
            "--device",
            choices=("cpu", "cuda"),
            default="cpu",
            help="of the ranks: cpu connects them with gloo; cuda with NCCL, or with gloo where ranks share a GPU "
            "(default: cpu)",
        )
        parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="limit of one case (default: 60)")
        parser.add_argument(
            "--out", type=Path, metavar="DIR", help="write report.json, report.html, badge.svg, bugs.md"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON value instead of the table")

    def run(self, arguments: argparse.Namespace) -> int:
        if arguments.list:
            return _print_list()
        if arguments.target is None:
            raise UsageError("burst conform names no target; give a Python file or a name, or --list")
        return _judge(arguments)


def _print_list() -> int:
    from conform.cases import CASES
    from conform.target import target_names

    print("Targets: " + ", ".join(target_names()))
    width = max(len(case.name) for case in CASES)
    for case in CASES:
        print(shown(f"{case.kind:<12}{case.name:<{width}}  {case.source}"))
    return 0


def _asked(arguments: argparse.Namespace) -> tuple[LoadedTarget, str, list[ConformCase]]:
    """The target, its version, and the cases. Raises ValueError where the target cannot be asked."""
    from conform.cases import case_named, cases_of
    from conform.run import backend_of
    from conform.target import load

    if arguments.seconds <= 0 or any(count < 1 for count in arguments.ranks or ()):
        raise ValueError("--seconds and --ranks have to be positive; correct them")
    target = load(arguments.target)
    cases = [case_named(name) for name in arguments.case or ()]
    if other := [case.name for case in cases if case.kind != target.kind]:
        raise ValueError(
            f"{target.name} is a target of {target.kind}, and {other[0]} a case of another kind; "
            f"choose cases of {target.kind} from burst conform --list"
        )
    if foreign := [count for count in arguments.ranks or () if count not in target.ranks]:
        known = ", ".join(map(str, target.ranks))
        raise ValueError(f"{target.name} does not run on {foreign[0]} ranks; choose from {known}, RANKS in its file")
    if arguments.device not in target.devices:
        raise ValueError(f"{target.name} runs on {target.devices[0]} ranks alone; choose --device {target.devices[0]}")
    if target.missing:
        todo = f"run: {target.install}" if target.install else "install them"
        raise ValueError(f"{target.name} needs modules that are not installed: {', '.join(target.missing)}; {todo}")
    if arguments.device == "cuda":
        import torch

        backend_of("cuda", max(target.ranks), torch.cuda.device_count())
    cases = cases or cases_of(target.kind, quick=arguments.quick and target.kind == "attention")
    return target, target.version, cases


def _for_others(typed: Sequence[str]) -> str:
    """The command as others may type it: reports are shown to them, and directories of this machine are not."""
    words, before = [], ""
    for word in typed:
        if before == "--out":
            word = "DIR"
        elif word.startswith("--out="):
            word = "--out=DIR"
        elif Path(word).is_absolute():
            word = Path(word).name
        words.append(word)
        before = word
    return shlex.join(words)


def _judge(arguments: argparse.Namespace) -> int:
    from conform.report import ConformReport, bug_report, dumped, summary, table
    from conform.run import NotStarted, run

    try:
        target, version, cases = _asked(arguments)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if arguments.out is not None:
        _check_out(arguments.out)
    ranks = arguments.ranks or target.ranks
    total = len(cases) * len(ranks)
    found: list[CaseResult] = []
    report = ConformReport(
        target=target.name,
        version=version,
        command=_for_others(command_line(arguments)),
        device=arguments.device,
        results=found,
    )
    try:
        results = run(target, cases, ranks=ranks, device=arguments.device, limit_seconds=arguments.seconds)
        with Progress(f"judging {target.name}", quiet=arguments.json) as progress, contextlib.closing(results):
            for result in results:
                found.append(result)
                progress.so_far(f"{len(found)} of {total}, {result.case.name} on {result.ranks}")
    except NotStarted as error:
        raise UsageError(str(error)) from error
    except KeyboardInterrupt as interrupt:
        if not found or arguments.json:
            raise
        for line in table(report)[:-1]:  # of a part there is no verdict
            print(shown(line))
        said = f"interrupted after {len(found)} of {total} results, which are above; nothing is written"
        raise KeyboardInterrupt(said) from interrupt
    if arguments.json:
        print(dumped(report), end="")
    else:
        for line in table(report):
            print(shown(line))
        if report.failures:
            print("\nA bug report of the first failure:\n\n" + bug_report(report, report.failures[0]))
    if arguments.out is not None:
        _write(report, arguments.out)
        say(f"{summary(report)}: {arguments.out / 'report.html'}")
    return 1 if report.failures else 0


_FILES = ("report.json", "report.html", "badge.svg", "bugs.md")


def _check_out(folder: Path) -> None:
    """Make the folder. Raises UsageError where nothing can be written there, for the directory of a run, and where a
    file would be overwritten that no earlier report left."""
    from engine.training.files import RUN_FILE as TRAINING_FILE
    from harness.records.stored import RUN_FILE

    make_writable(folder)
    for name in (RUN_FILE, TRAINING_FILE):
        if os.path.lexists(folder / name):
            raise UsageError(f"{folder} is the directory of a run ({name}); give --out another directory")
    taken = [name for name in _FILES if os.path.lexists(folder / name)]
    if taken and not _is_report(folder / "report.json"):
        raise UsageError(f"{folder} holds {taken[0]}, which is of no report of burst conform; give --out another one")


def _is_report(path: Path) -> bool:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"target", "claimed", "cases"} <= set(found)


def _write(report: ConformReport, folder: Path) -> None:
    from conform.report import as_html, badge, bug_report, dumped

    bugs = "\n".join(bug_report(report, result) for result in report.failures)
    for name, text in zip(_FILES, (dumped(report), as_html(report), badge(report), bugs), strict=True):
        write_atomic(folder / name, text)


COMMAND = ConformCommand()
