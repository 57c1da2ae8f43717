"""The command line of `check_nodes.py` and `burst check`, and the nodes that it names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from cluster.inventory.file import named_nodes
from cluster.inventory.hosts import read_hosts
from cluster.inventory.nodes import Node
from cluster.node_arguments import add_node_arguments

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
    result.add_argument("--hosts", dest="hosts_file", type=Path, metavar="FILE", help="more hosts, one per line")
    chosen = result.add_argument_group("what is checked")
    chosen.add_argument("--only", type=_names, default=(), metavar="CHECK,...", help="only these checks")
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
    form.add_argument("--html", type=Path, metavar="FILE", help="also write a page with all findings")
    return result


def chosen_nodes(arguments: argparse.Namespace) -> tuple[Node, ...]:
    """The nodes named, each once, with its own site; this machine when none is named. Raises ValueError."""
    if arguments.hosts_file:
        arguments.nodes += [host.target for host in read_hosts(arguments.hosts_file)]
    return named_nodes(arguments).nodes


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
