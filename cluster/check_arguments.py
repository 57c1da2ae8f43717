"""What `check_nodes.py` and `burst check` take on their command line, and the nodes that it names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from cluster.hosts import parse_hosts, read_hosts, this_machine
from cluster.inventory import Node, from_hosts
from cluster.inventory_file import read_inventory
from cluster.local import connect_local
from cluster.runner import Connect
from cluster.site import Site, load_site

_EXIT_CODES_HELP = "exit codes: 0 all ok, 1 a warning, 2 a failure, 3 a node stayed unknown or the usage was wrong"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def parser(prog: str = "check_nodes.py") -> argparse.ArgumentParser:
    """Arguments of a node check."""
    result = _Parser(
        prog=prog,
        description="Check nodes: do they answer, are GPUs and network sound, is there room, is anybody on them?",
        epilog=_EXIT_CODES_HELP,
    )
    which = result.add_argument_group("which nodes")
    which.add_argument(
        "hosts", nargs="*", metavar="HOST", help="[user@]host[:port], ranges as gpu[01-04]; none: this machine"
    )
    which.add_argument("--hosts", dest="hosts_file", type=Path, metavar="FILE", help="more hosts, one per line")
    which.add_argument("--nodes", type=Path, metavar="FILE", help="an inventory; HOSTs then choose among its nodes")
    which.add_argument("--site", type=Path, metavar="FILE", help="what to expect, such as experiments/sites/local.yaml")
    what = result.add_argument_group("what to look at")
    what.add_argument("--only", type=_names, default=(), metavar="CHECK,...", help="only these checks")
    what.add_argument("--skip", type=_names, default=(), metavar="CHECK,...", help="all but these checks")
    what.add_argument(
        "--profiles", type=Path, action="append", default=[], metavar="DIR", help="more GPU profiles; later ones win"
    )
    what.add_argument(
        "--active",
        nargs="?",
        choices=["cuda", "cpu"],
        const="cuda",
        help="also load the free nodes: GEMM, copies, NVLink, all-reduce, pairs; cpu: tiny, to try it out",
    )
    history = what.add_mutually_exclusive_group()
    history.add_argument(
        "--history", type=Path, metavar="DIR", help="where counters are kept; default: ~/.local/state/burst/nodes"
    )
    history.add_argument("--no-history", action="store_true", help="neither keep counters nor look at kept ones")
    form = result.add_argument_group("in which form")
    output = form.add_mutually_exclusive_group()
    output.add_argument(
        "--all", action="store_true", help="the table with a row for every check, also those that are ok"
    )
    output.add_argument("--json", action="store_true", help="one JSON object per node and line")
    output.add_argument("--nagios", action="store_true", help="one line as a Nagios plugin prints it")
    output.add_argument(
        "--free", action="store_true", help="only the names of usable nodes; why not the others: stderr"
    )
    form.add_argument("--html", type=Path, metavar="FILE", help="also write a page with everything that was found")
    login = result.add_argument_group("how to log in")
    login.add_argument("--key", type=Path, metavar="FILE", help="private key; default: the agent and ~/.ssh")
    login.add_argument("--known-hosts", type=Path, metavar="FILE", help="host keys; default: ~/.ssh/known_hosts")
    login.add_argument(
        "--accept-new-host-keys", action="store_true", help="add unknown hosts to known_hosts; changed keys stay errors"
    )
    login.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="per node (default: 60)")
    return result


def chosen_nodes(arguments: argparse.Namespace) -> tuple[Node, ...]:
    """The nodes asked for, each once, with its own site; this machine when none is. Raises ValueError."""
    nodes = _named_nodes(arguments)
    keys = {arguments.key} if arguments.key else {node.host.key for node in nodes if node.host.key}
    for key in keys:
        if any(not node.host.is_local for node in nodes) and not key.expanduser().is_file():
            raise ValueError(f"the private key {key} is no file; give the path of the key that opens the nodes")
    if not arguments.key:
        return nodes
    return tuple(
        node if node.host.is_local else replace(node, host=replace(node.host, key=arguments.key)) for node in nodes
    )


def _named_nodes(arguments: argparse.Namespace) -> tuple[Node, ...]:
    if arguments.nodes:
        if arguments.hosts_file:
            raise ValueError("--nodes and --hosts both name all nodes; give one of the two")
        inventory = read_inventory(arguments.nodes, arguments.site)
        return (inventory.select(arguments.hosts) if arguments.hosts else inventory).nodes
    site = load_site(arguments.site) if arguments.site else Site()
    named = [host for target in arguments.hosts for host in parse_hosts(target)]
    if arguments.hosts_file:
        named += read_hosts(arguments.hosts_file)
    if not named:
        return (Node(host=this_machine(), site=site),)
    return from_hosts(named, site).nodes


def chosen_connect(arguments: argparse.Namespace, nodes: Sequence[Node]) -> Connect:
    """How these nodes are reached. paramiko is imported only when one of them is remote."""
    if all(node.host.is_local for node in nodes):
        return connect_local
    try:
        from cluster.ssh import SshOptions, connector
    except ModuleNotFoundError as error:
        raise ValueError(
            f"checking other machines needs {error.name}, which is not installed; pip install paramiko"
        ) from None
    known_hosts = {"known_hosts": arguments.known_hosts} if arguments.known_hosts else {}
    return connector(SshOptions(accept_new_host_keys=arguments.accept_new_host_keys, **known_hosts))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
