"""The program of node checks: `check_nodes.py` and `burst cluster check` are both this `main`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.active.fleet import Plan, run_active
from cluster.active.judge import Pair, Speed
from cluster.active.rail_fleet import TEST, find_rails, run_rails
from cluster.check_arguments import chosen_checks, parser
from cluster.checks import Check
from cluster.discovery.drift import version_drift
from cluster.files.errors import counted, shown, shown_error
from cluster.files.progress import Progress
from cluster.health import history
from cluster.health.nodes import NodeReport, check_nodes
from cluster.inventory.file import named_nodes
from cluster.inventory.nodes import InventoryNode
from cluster.probing.verdict import EXIT_CODES, worst_level
from cluster.profiles import Profiles, load_profiles
from cluster.render.html import html_page, pair_map, refuse_foreign, write_page
from cluster.render.live import live_table
from cluster.render.text import json_line, nagios_line, table, why_not
from cluster.transport.reach import connection
from cluster.transport.runner import Connect

READER_LEFT = 128 + signal.SIGPIPE  # as the shell shows a program that the signal ended
BAD_USAGE = 3  # argparse's own 2 would read as "a node failed"


def main(argv: Sequence[str] | None = None, prog: str = "check_nodes.py") -> int:
    """Check the nodes and print the findings; returns the exit code. Raises SystemExit for --help only."""
    try:
        arguments = parser(prog).parse_args(argv)
        chosen, unwanted = chosen_checks(arguments)
        profiles = load_profiles(*arguments.profiles)
        nodes = named_nodes(arguments).nodes
        connect = connection(
            [node.host for node in nodes],
            known_hosts=arguments.known_hosts,
            accept_new_host_keys=arguments.accept_new_host_keys,
        )
        if arguments.html:
            if not arguments.html.parent.is_dir():
                raise ValueError(f"--html {arguments.html} is in no folder that exists; create it or name another")
            refuse_foreign(arguments.html)
        code = _check(arguments, nodes, connect, chosen, unwanted, profiles, prog)
        sys.stdout.flush()  # here, where a closed pipe can still be distinguished from a mistake
        return code
    except BrokenPipeError:
        # Buffered output cannot be written; Python would try again at exit, and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    except ValueError as error:
        print(f"{prog}: {shown_error(str(error))}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        print(
            f"{prog}: interrupted during the active tests; their commands end at their own deadlines", file=sys.stderr
        )
        return EXIT_CODES["unknown"]


def _check(
    arguments: argparse.Namespace,
    nodes: Sequence[InventoryNode],
    connect: Connect,
    chosen: Mapping[str, Check],
    unwanted: frozenset[str],
    profiles: Profiles,
    prog: str,
) -> int:
    reports: dict[str, NodeReport] = {}
    past = None if arguments.no_history or "history" in unwanted else _open_history(arguments.history, prog)
    plain = arguments.json or arguments.nagios or arguments.free
    try:
        asked = f"checking {counted(len(nodes), 'node')}"
        quiet = arguments.json or arguments.nagios or arguments.only_faults  # cron mails whatever is printed
        with Progress(asked, quiet=quiet) as progress, live_table([] if plain else nodes) as show:
            for report in check_nodes(nodes, connect, chosen, arguments.timeout, profiles):
                report = _with_history(report, past, chosen, prog) if past and report.answered else report
                reports[report.host.name] = report.without(unwanted)
                progress.so_far(f"{len(reports)} have answered")
                show(report)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted when {len(reports)} of {len(nodes)} nodes had answered", file=sys.stderr)
        return EXIT_CODES["unknown"]
    compared = {} if "drift" in unwanted else {node.name: reports[node.name].verdicts for node in nodes}
    for name, verdict in version_drift(compared).items():
        reports[name] = reports[name].also("drift", verdict)
    pairs = _run_active(arguments, nodes, connect, profiles, reports, prog) if arguments.active else {}
    in_order = [reports[node.name].without(unwanted) for node in nodes]
    _print(arguments, in_order)
    if arguments.html:
        heat_maps = [pair_map(pairs)] if pairs else []
        write_page(arguments.html, html_page(in_order, heat_maps, only_faults=arguments.only_faults))
    return EXIT_CODES[worst_level(report.level for report in in_order)]


def _run_active(
    arguments: argparse.Namespace,
    nodes: Sequence[InventoryNode],
    connect: Connect,
    profiles: Profiles,
    reports: dict[str, NodeReport],
    prog: str,
) -> Mapping[Pair, Speed]:
    """Load the usable nodes and add the findings to their reports; returns the speed of each pair."""
    free = [node for node in nodes if reports[node.name].usable]

    def say(sentence: str) -> None:
        print(f"{prog}: {shown(sentence)}", file=sys.stderr)

    if not free:
        say("no node is usable, so none is loaded with active tests")
        return {}
    plan = Plan(connect=connect, profiles=profiles, device=arguments.active, say=say)
    findings = run_active(free, plan)
    if arguments.active == "cuda":
        rails = find_rails(free, connect, arguments.timeout)
        for name, verdict in run_rails(free, rails, plan).items():
            reports[name] = reports[name].also(TEST, verdict)
    for name, tests in findings.verdicts.items():
        for test, verdict in tests.items():
            reports[name] = reports[name].also(test, verdict)
    return findings.pairs


def _print(arguments: argparse.Namespace, reports: Sequence[NodeReport]) -> None:
    """Print the chosen form. Nothing is printed before all nodes have answered: some verdicts compare them."""
    if arguments.json:
        for report in reports:
            if not arguments.only_faults or report.level != "ok":
                print(json_line(report, only_faults=arguments.only_faults))
    elif arguments.nagios:
        print(nagios_line(reports))
    elif arguments.free:
        for report in reports:
            if report.usable:
                print(report.host.name)
            else:
                print(why_not(report), file=sys.stderr)
    else:
        print(table(reports, only_faults=arguments.only_faults, every_check=arguments.all))


def _open_history(folder: Path | None, prog: str) -> history.History | None:
    """History in `folder`, which must be usable, or in the default folder; None where that one is not usable."""
    try:
        return history.History(folder or history.default_folder())
    except OSError as error:
        place = f"{error.filename or folder}: {error.strerror}"
        if folder:
            raise ValueError(f"--history cannot be used ({place}); give a folder you can write to") from None
        print(shown(f"{prog}: counters are not kept ({place}); give --history DIR, or --no-history"), file=sys.stderr)
        return None


def _with_history(report: NodeReport, past: history.History, chosen: Mapping[str, Check], prog: str) -> NodeReport:
    """The report with a verdict on counters that rose; a full disk here is no finding about the node."""
    name = report.host.target or report.host.name  # two fleets may both call a node gpu01
    now = history.entry_of(report)
    try:
        judged = report.also("history", history.judge(past.last(name), now, chosen))
        past.append(name, now)
    except OSError as error:
        print(f"{prog}: counters of {report.host.name} are not kept ({error.strerror}); make room", file=sys.stderr)
        return report
    return judged


if __name__ == "__main__":
    sys.exit(main())
