"""The command line of node checks: `check_nodes.py` and `burst check` are both this `main`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cluster import checks, render
from cluster.health import NodeReport, check_nodes
from cluster.hosts import Host, distinct, parse_hosts, read_hosts, this_machine
from cluster.local import connect_local
from cluster.runner import Connect
from cluster.site import Site, load_site
from cluster.verdict import EXIT_CODES, worst_level

BAD_USAGE = 3  # argparse's own 2 would read as "a node failed"
_EXIT_CODES_HELP = "exit codes: 0 all ok, 1 a warning, 2 a failure, 3 a node stayed unknown or the usage was wrong"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def parser(prog: str = "check_nodes.py") -> argparse.ArgumentParser:
    """Arguments of a node check."""
    result = _Parser(
        prog=prog,
        description="Check nodes: do they answer, are their GPUs there and free, is there memory and disk space?",
        epilog=_EXIT_CODES_HELP,
    )
    result.add_argument(
        "hosts", nargs="*", metavar="HOST", help="[user@]host[:port], ranges as gpu[01-04]; none: this machine"
    )
    result.add_argument("--hosts", dest="hosts_file", type=Path, metavar="FILE", help="more hosts, one per line")
    result.add_argument(
        "--site", type=Path, metavar="FILE", help="what to expect, such as experiments/sites/local.yaml"
    )
    output = result.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="one JSON object per node and line, as they answer")
    output.add_argument(
        "--free", action="store_true", help="only the names of usable nodes; why not the others: stderr"
    )
    result.add_argument("--key", type=Path, metavar="FILE", help="private key; default: the agent and ~/.ssh")
    result.add_argument("--known-hosts", type=Path, metavar="FILE", help="host keys; default: ~/.ssh/known_hosts")
    result.add_argument(
        "--accept-new-host-keys", action="store_true", help="add unknown hosts to known_hosts; changed keys stay errors"
    )
    result.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="per node (default: 60)")
    return result


def main(argv: Sequence[str] | None = None, prog: str = "check_nodes.py") -> int:
    """Check the nodes and print what was found; the result is the exit code. Raises SystemExit for --help only."""
    try:
        arguments = parser(prog).parse_args(argv)
        if not 0 < arguments.timeout <= 86400:
            raise ValueError(f"--timeout is {arguments.timeout:g}; expected seconds above 0 and at most 86400")
        site = load_site(arguments.site) if arguments.site else Site()
        hosts = _hosts(arguments, site)
        connect = _connect(arguments, hosts)
    except ValueError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return BAD_USAGE
    reports: dict[Host, NodeReport] = {}
    try:
        for report in check_nodes(hosts, connect, checks.discover(), site, arguments.timeout):
            reports[report.host] = report
            if arguments.json:
                print(render.json_line(report), flush=True)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted when {len(reports)} of {len(hosts)} nodes had answered", file=sys.stderr)
        return EXIT_CODES["unknown"]
    in_order = [reports[host] for host in hosts]
    if arguments.free:
        for report in in_order:
            if report.usable:
                print(report.host.name)
            else:
                print(render.why_not(report), file=sys.stderr)
    elif not arguments.json:
        print(render.table(in_order))
    return EXIT_CODES[worst_level(report.level for report in in_order)]


def _hosts(arguments: argparse.Namespace, site: Site) -> list[Host]:
    """The hosts asked for, each once, with the site's defaults filled in; this machine when none is."""
    named = [host for target in arguments.hosts for host in parse_hosts(target)]
    if arguments.hosts_file:
        named += read_hosts(arguments.hosts_file)
    if not named:
        return [this_machine()]
    key = arguments.key or site.ssh.key
    if key and not key.expanduser().is_file():
        raise ValueError(f"the private key {key} is no file; give the path of the key that opens the nodes")
    return distinct(host.with_defaults(user=site.ssh.user, port=site.ssh.port, key=key) for host in named)


def _connect(arguments: argparse.Namespace, hosts: Sequence[Host]) -> Connect:
    """How these hosts are reached. paramiko is imported only when one of them is remote."""
    if all(host.is_local for host in hosts):
        return connect_local
    try:
        from cluster.ssh import SshOptions, connector
    except ModuleNotFoundError as error:
        raise ValueError(
            f"checking other machines needs {error.name}, which is not installed; pip install paramiko"
        ) from None
    known_hosts = {"known_hosts": arguments.known_hosts} if arguments.known_hosts else {}
    return connector(SshOptions(accept_new_host_keys=arguments.accept_new_host_keys, **known_hosts))
