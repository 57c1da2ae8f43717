"""The command line of `check_nodes.py` and `burst cluster check`, and the checks that it names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from cluster.active.judge import TESTS
from cluster.checks import Check, discover, select
from cluster.discovery.drift import READS
from cluster.files.errors import UsageError
from cluster.health.nodes import CLOCK, REACHABILITY
from cluster.node_arguments import add_node_arguments

# Verdicts that no file of cluster/checks gives.
OTHERS = (REACHABILITY, CLOCK, "drift", "history", *TESTS)
_EXIT_CODES_HELP = "exit codes: 0 all ok, 1 a warning, 2 a failure, 3 a node stayed unknown or the usage was wrong"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def parser(prog: str = "check_nodes.py") -> argparse.ArgumentParser:
    """Arguments of a node check."""
    result = _Parser(
        prog=prog,
        description="Check nodes: do they answer, are GPUs and network sound, is there room, are they free?",
        epilog=_EXIT_CODES_HELP,
    )
    add_node_arguments(result)
    chosen = result.add_argument_group("what is checked")
    chosen.add_argument(
        "--only", type=_names, default=(), metavar="CHECK,...", help="only these checks, as the column CHECK names them"
    )
    chosen.add_argument("--skip", type=_names, default=(), metavar="CHECK,...", help="all but these checks")
    chosen.add_argument(
        "--profiles", type=Path, action="append", default=[], metavar="DIR", help="more GPU profiles; later ones win"
    )
    chosen.add_argument(
        "--active",
        nargs="?",
        choices=["cuda", "cpu"],
        const="cuda",
        help="also load the free nodes: GEMM, copies, NVLink, all-reduce, pairs; cpu: tiny, to try it out",
    )
    history = chosen.add_mutually_exclusive_group()
    history.add_argument(
        "--history", type=Path, metavar="DIR", help="where counters are kept; default: ~/.local/state/burst/nodes"
    )
    history.add_argument("--no-history", action="store_true", help="neither keep counters nor look at kept ones")
    form = result.add_argument_group("output")
    output = form.add_mutually_exclusive_group()
    output.add_argument(
        "--all", action="store_true", help="the table with a row for every check, also those that are ok"
    )
    output.add_argument("--json", action="store_true", help="one JSON object per node and line")
    output.add_argument("--nagios", action="store_true", help="one line as a Nagios plugin prints it")
    output.add_argument(
        "--free", action="store_true", help="only the names of usable nodes; why not the others: stderr"
    )
    form.add_argument("--only-faults", action="store_true", help="print nothing that is ok; it counts all the same")
    form.add_argument("--html", type=Path, metavar="FILE", help="also write a page with all findings")
    return result


def chosen_checks(arguments: argparse.Namespace) -> tuple[dict[str, Check], frozenset[str]]:
    """The checks that run, and the names of further verdicts that are not wanted. Raises UsageError.

    `drift` and `history` compare verdicts of others, which run with them.
    """
    if (arguments.free or arguments.nagios) and arguments.only_faults:
        raise UsageError("--only-faults chooses rows of tables, JSON and pages; leave --free out")
    only, skip = set(arguments.only), set(arguments.skip)
    if REACHABILITY in skip:
        raise UsageError(f"{REACHABILITY} cannot be skipped: without it nothing is known of a node; leave it out")
    if (tests := only & set(TESTS)) and not arguments.active:
        raise UsageError(f"--only {min(tests)} is an active test, which loads nodes; add --active")
    chosen = select(only, skip, OTHERS)
    every = discover()
    if "drift" in only:
        chosen |= {name: every[name] for name in READS if name not in skip}
    if "history" in only:
        chosen |= {name: check for name, check in every.items() if check.rise and name not in skip}
    return dict(sorted(chosen.items())), frozenset(skip | (set(TESTS) - tests - {"active"} if tests else set()))


def _names(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
