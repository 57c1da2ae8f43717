"""`burst cluster`: an inventory of nodes, their health and environment, and Ray over SSH on the healthy ones."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.files.errors import UsageError, counted, shown
from cluster.files.progress import Progress
from harness.commands import Command, OtherProgram, Verbs, add_state_argument, state_directory

if TYPE_CHECKING:
    from cluster.inventory.hosts import Host
    from cluster.inventory.nodes import Inventory, InventoryNode
    from cluster.ray_cluster.state import ClusterState, StateDirectory

ALL_WELL, NOT_ALL = 0, 1


class NodesCommand:
    help = "expand an inventory, or turn an /etc/hosts style file or a plain list into one"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("inventory", nargs="?", type=Path, metavar="INVENTORY", help="YAML, or a plain list")
        parser.add_argument("nodes", nargs="*", metavar="NODE", help="only these of it, ranges as gpu[01-04]")
        parser.add_argument("--site", type=Path, metavar="FILE", help="a site file instead of the one it names")
        parser.add_argument(
            "--import", dest="source", type=Path, metavar="FILE", help="print the inventory of a hosts file instead"
        )
        output = parser.add_mutually_exclusive_group()
        output.add_argument("--json", action="store_true", help="one JSON list instead of a table")
        output.add_argument("--names", action="store_true", help="only the names, one per line")

    def run(self, arguments: argparse.Namespace) -> int:
        if (arguments.inventory is None) == (arguments.source is None):
            raise UsageError(
                "burst cluster nodes takes one file; give an INVENTORY to expand or --import FILE to convert"
            )
        try:
            if arguments.source:
                self._import(arguments)
                return 0
            from cluster.inventory.file import read_inventory

            inventory = read_inventory(arguments.inventory, arguments.site)
            inventory = inventory.select(arguments.nodes) if arguments.nodes else inventory
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(str(error)) from None
        if arguments.names:
            print("\n".join(node.name for node in inventory.nodes))
        elif arguments.json:
            print(json.dumps([_as_json(node) for node in inventory.nodes], indent=1, default=str))
        else:
            _print_table(inventory)
        return 0

    def _import(self, arguments: argparse.Namespace) -> None:
        from cluster.inventory.hosts_file import import_hosts, render_inventory

        if arguments.json or arguments.names or arguments.site:
            raise UsageError("--import prints an inventory file; give it alone, then expand what it printed")
        print(render_inventory(import_hosts(arguments.source), str(arguments.source)), end="")


def _as_json(node: InventoryNode) -> dict[str, Any]:
    """All fields of a node. Of the environment only the names: values may be secrets."""
    from dataclasses import asdict

    site = asdict(node.site)
    login = site.pop("ssh")
    site["environment"] = sorted(site["environment"])
    host = node.host
    return {
        "name": node.name,
        "address": host.address,
        "user": host.user,
        "port": host.port,
        "key": str(host.key) if host.key else None,
        "jump": login["jump"],
        "site": site,
    }


def _route(host: Host) -> str:
    """The jump hosts, first to last."""
    return f"{_route(host.jump)} > {host.jump.target}".removeprefix(" > ") if host.jump else ""


def _print_table(inventory: Inventory) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from harness.base.terminal import stdout_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows = [_row(node) for node in inventory.nodes]
    headings = ("node", "target", "through", "GPUs", "network", "image", "variables")
    used = [
        at
        for at, heading in enumerate(headings)
        if heading in ("node", "target", "GPUs") or any(row[at] for row in rows)
    ]
    for at in used:
        table.add_column(headings[at], overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[at]) for at in used))
    console = stdout_console()
    console.print(table)
    sites = sorted({node.site.name for node in inventory.nodes})
    console.print(Text(f"{inventory.name}: {counted(len(inventory.nodes), 'node')}, site {', '.join(sites)}"))


def _row(node: InventoryNode) -> tuple[str, ...]:
    """One line of the table; a cell without a value is empty."""
    site = node.site
    count = "any" if site.gpus.count is None else str(site.gpus.count)
    adapters = "" if site.network.hcas is None else ",".join(site.network.hcas) or "no HCA"
    return (
        node.name,
        node.host.target,
        _route(node.host),
        f"{count} x {site.gpus.model}" if site.gpus.model else count,
        " ".join(filter(None, [site.network.interface, adapters])),
        (site.container.image or "") if site.container.engine != "none" else "",
        ", ".join(sorted(site.environment)),
    )


class CheckCommand(OtherProgram):
    help = "check the health of nodes; see burst cluster check --help"

    def run(self, arguments: argparse.Namespace) -> int:
        from cluster.cli import main

        return main(arguments.rest, prog="burst cluster check")


class EnvCommand:
    help = "render each node's environment (interfaces, adapters, per-method values) with reasons"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        from cluster.node_arguments import add_node_arguments

        add_node_arguments(parser)
        parser.add_argument(
            "--head", metavar="ADDRESS", help="the address that routes of other nodes lead to; default: the first node"
        )
        parser.add_argument(
            "--method", default="burst", metavar="NAME", help="render this method's values (default: burst)"
        )
        parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
        parser.add_argument("--all", action="store_true", help="also what is left to NCCL on purpose, with the reasons")
        parser.add_argument(
            "--install", metavar="PATH", help="write PATH on each node; a file that differs is kept aside"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from cluster.environment.rendering import table
        from cluster.environment.survey import SurveyOptions, head_address, survey
        from cluster.inventory.file import named_nodes
        from cluster.transport.reach import connection
        from harness.spec.methods import method_named

        method_named(arguments.method)
        if arguments.install is not None and not arguments.install.startswith("/"):
            raise UsageError(f"--install is {arguments.install}; expected an absolute path on the nodes")
        inventory = named_nodes(arguments)
        connect = connection(
            [node.host for node in inventory.nodes],
            known_hosts=arguments.known_hosts,
            accept_new_host_keys=arguments.accept_new_host_keys,
        )
        options = SurveyOptions(
            head=head_address(arguments.head, inventory.nodes),
            method=arguments.method,
            install=arguments.install,
        )
        asked = f"reading interfaces and adapters of {counted(len(inventory.nodes), 'node')}"
        with Progress(asked, quiet=arguments.json):
            found = survey(inventory.nodes, connect, options, arguments.timeout)
        if arguments.json:
            print(json.dumps(found.as_json(), indent=1, allow_nan=False))
        else:
            print("\n\n".join(table(environment, every_one=arguments.all) for environment in found.environments))
        said = [f"warning: {sentence}" for sentence in found.drift]
        said += [f"{node}: {installed.sentence}" for node, installed in found.installed.items()]
        said += [f"{node}: {reason}" for node, reason in found.silent.items()]
        for sentence in said:
            print(sentence, file=sys.stderr)
        return 1 if found.silent else 0


class RayCommand:
    """One of the verbs about Ray: what it does is given."""

    def __init__(self, help: str, act: Callable[[argparse.Namespace, StateDirectory], int]) -> None:
        self.help = help
        self._act = act

    def configure(self, parser: argparse.ArgumentParser) -> None:
        add_state_argument(parser)
        parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="per node (default: 60)")

    def run(self, arguments: argparse.Namespace) -> int:
        from cluster.ray_cluster.state import StateDirectory

        states = StateDirectory(state_directory(arguments))
        if not 0 < arguments.timeout <= 3600:
            raise UsageError(f"--timeout is {arguments.timeout:g}; expected seconds above 0 and at most 3600")
        return self._act(arguments, states)


class UpCommand(RayCommand):
    def configure(self, parser: argparse.ArgumentParser) -> None:
        from cluster.node_arguments import add_host_key_arguments

        parser.add_argument("inventory", type=Path, metavar="INVENTORY", help="inventory, or a plain list of hosts")
        parser.add_argument("names", nargs="*", metavar="NODE", help="only these of it, such as gpu[01-04]")
        add_host_key_arguments(parser)
        super().configure(parser)


def _up(arguments: argparse.Namespace, states: StateDirectory) -> int:
    from cluster.inventory.file import read_inventory
    from cluster.ray_cluster.up import start_cluster

    try:
        inventory = read_inventory(arguments.inventory)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if arguments.names:
        inventory = inventory.select(arguments.names)
    with Progress(f"starting Ray on {counted(len(inventory.nodes), 'node')}") as progress:
        state = start_cluster(
            inventory,
            states,
            progress.say,
            known_hosts=arguments.known_hosts,
            accept_new_host_keys=arguments.accept_new_host_keys,
            seconds=arguments.timeout,
        )
    up = [node.name for node in state.nodes if not node.silent]
    missing = [node.name for node in inventory.nodes if node.name not in up]
    print(
        f"{counted(len(up), 'node')} {'is' if len(up) == 1 else 'are'} up, "
        f"head {state.head.name} ({state.head_address})"
    )
    print(f"Next: burst run EXP.yaml --nodes {arguments.inventory}, and burst cluster down at the end")
    return NOT_ALL if missing else ALL_WELL


def _status(arguments: argparse.Namespace, states: StateDirectory) -> int:
    from cluster.ray_cluster.down import cluster_status
    from cluster.transport.reach import connection

    state = _recorded(states)
    connect = connection([node.host for node in state.nodes], known_hosts=state.known_hosts)
    with Progress(f"asking {counted(len(state.nodes), 'node')}"):
        nodes = cluster_status(state, connect, arguments.timeout)
    width = max((len(node.name) for node in nodes), default=0)
    for node in nodes:
        print(shown(f"{node.name:<{width}}  {node.role:<6}  {node.address:<15}  {node.state:<7}  {node.finding}"))
    for left in state.left:
        print(shown(f"{left.name} may hold processes of an earlier cluster; the next up or down ends them"))
    if not nodes:
        return NOT_ALL
    up = sum(node.state == "up" for node in nodes)
    owner = ", for one burst run alone" if state.of_run else ""
    print(f"{up} of {len(nodes)} nodes of {state.inventory} are up, since {state.created_at}{owner}")
    if nodes[0].state != "up":
        print("The head is lost: burst cluster up INVENTORY starts a cluster of the nodes that answer")
    return ALL_WELL if up == len(nodes) and not state.left else NOT_ALL


def _down(arguments: argparse.Namespace, states: StateDirectory) -> int:
    from cluster.ray_cluster.down import end_cluster
    from cluster.transport.reach import connection

    state = _recorded(states)
    nodes = {node.name for node in (*state.nodes, *state.left)}
    connect = connection([node.host for node in (*state.nodes, *state.left)], known_hosts=state.known_hosts)
    with Progress(f"ending Ray on {counted(len(nodes), 'node')}") as progress:
        with states.held("end the cluster"):
            problems = end_cluster(states, state, connect, arguments.timeout)
        for name, sentence in problems.items():
            progress.say(f"{name}: {sentence}")
    ended = f"{counted(len(nodes) - len(problems), 'node')} ended"
    if problems:
        print(
            f"{ended}, {', '.join(problems)} not. Ray ends by itself without its head; the next up or down ends what "
            f"is left there, and to forget it, remove {states.path}"
        )
        return NOT_ALL
    print(f"{ended}; no process or file of burst is left on them")
    return ALL_WELL


def _recorded(states: StateDirectory) -> ClusterState:
    """The cluster that is up, wholly or in part. Raises UsageError when there is none."""
    state = states.load()
    if state is None:
        raise UsageError(f"{states.path} holds no cluster; start one with burst cluster up INVENTORY")
    return state


VERBS: dict[str, Command] = {
    "nodes": NodesCommand(),
    "check": CheckCommand(),
    "env": EnvCommand(),
    "up": UpCommand("start Ray on the healthy nodes; again: add those that are not up", _up),
    "status": RayCommand(
        "print the state of each node; exit code 1 unless all are up and nothing else is left", _status
    ),
    "down": RayCommand("end what up started, and nothing else; works after a crash of up, too", _down),
}
COMMAND = Verbs("look at the nodes of an inventory, and start and end Ray on the healthy ones over SSH", VERBS)
