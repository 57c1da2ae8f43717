"""`burst conform`: is somebody's context parallelism right? Cases by name, judged by float64 on one process."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.files.errors import shown
from cluster.files.progress import Progress, say
from engine.atomic import write_atomic
from harness.base.errors import UsageError
from harness.commands import command_line

if TYPE_CHECKING:
    from conform.cases import ConformCase
    from conform.report import ConformReport
    from conform.run import CaseResult


class ConformCommand:
    help = "judge a context parallelism, ours or another: cases beside float64, on real ranks"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "target", nargs="?", metavar="TARGET", help="a Python file, or a name that --list prints, of what is judged"
        )
        parser.add_argument("--list", action="store_true", help="print the targets and all cases with their sources")
        parser.add_argument("--case", nargs="+", metavar="NAME", help="these cases alone")
        parser.add_argument(
            "--quick", action="store_true", help="the most telling cases of attention alone, in seconds"
        )
        parser.add_argument("--ranks", nargs="+", type=int, metavar="N", help="on these numbers of ranks alone")
        parser.add_argument(
            "--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks: gloo, or NCCL (default: cpu)"
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
        print(shown(f"{case.kind:<10}{case.name:<{width}}  {case.source}"))
    return 0


def _judge(arguments: argparse.Namespace) -> int:
    from conform.cases import case_named, cases_of
    from conform.report import ConformReport, bug_report, dumped, summary, table
    from conform.run import run
    from conform.target import load

    try:
        target = load(arguments.target)
        cases: list[ConformCase] = [case_named(name) for name in arguments.case or ()]
        cases = cases or cases_of(target.kind, quick=arguments.quick and target.kind == "attention")
    except ValueError as error:
        raise UsageError(str(error)) from error
    if other := [case.name for case in cases if case.kind != target.kind]:
        raise UsageError(f"{target.name} is a target of {target.kind}, and {other[0]} a case of another kind")
    if arguments.seconds <= 0 or any(count < 1 for count in arguments.ranks or ()):
        raise UsageError("--seconds and --ranks have to be positive; correct them")
    if target.missing:
        install = f": {target.install}" if target.install else ""
        raise UsageError(
            f"{target.name} needs {', '.join(target.missing)}, which is not installed; install it{install}"
        )
    ranks = arguments.ranks or list(target.ranks)
    total, numbers = len(cases) * len(ranks), itertools.count(1)
    with Progress(f"judging {target.name}", quiet=arguments.json) as progress:

        def seen(result: CaseResult) -> None:
            progress.so_far(f"{next(numbers)} of {total}, {result.case.name} on {result.ranks}")

        results = run(
            target, cases, ranks=ranks, device=arguments.device, limit_seconds=arguments.seconds, seen=seen
        )  # fmt: skip
    report = ConformReport(
        target=target.name,
        version=target.version,
        command=" ".join(command_line(arguments)),
        device=arguments.device,
        results=results,
    )
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


def _write(report: ConformReport, folder: Path) -> None:
    from conform.report import as_html, badge, bug_report, dumped

    bugs = "\n".join(bug_report(report, result) for result in report.failures)
    for name, text in (
        ("report.json", dumped(report)),
        ("report.html", as_html(report)),
        ("badge.svg", badge(report)),
        ("bugs.md", bugs),
    ):
        write_atomic(folder / name, text)


COMMAND = ConformCommand()
