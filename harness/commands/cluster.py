"""`burst cluster up | status | down`: Ray over SSH on the healthy nodes of an inventory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.files.errors import counted, shown
from harness.base.errors import UsageError
from harness.commands import add_state_argument, state_directory

if TYPE_CHECKING:
    from cluster.ray_cluster.state import ClusterState, StateDirectory

ALL_WELL, NOT_ALL = 0, 1


class ClusterCommand:
    help = "start Ray on an inventory's healthy nodes over SSH, look at it, end it"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        from cluster.node_arguments import add_host_key_arguments

        actions = parser.add_subparsers(dest="action", required=True, metavar="up|status|down")
        up = actions.add_parser("up", help="start Ray on the healthy nodes; again: add those that are not up")
        up.add_argument("inventory", type=Path, metavar="INVENTORY", help="inventory, or a plain list of hosts")
        up.add_argument("names", nargs="*", metavar="NODE", help="only these of it, such as gpu[01-04]")
        add_host_key_arguments(up)
        status = actions.add_parser(
            "status", help="print the state of each node; exit code 1 unless all are up and nothing else is left"
        )
        down = actions.add_parser("down", help="end what up started, and nothing else; works after a crash of up, too")
        for action in (up, status, down):
            add_state_argument(action)
            action.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="per node (default: 60)")

    def run(self, arguments: argparse.Namespace) -> int:
        from cluster.ray_cluster.state import StateDirectory

        states = StateDirectory(state_directory(arguments))
        if not 0 < arguments.timeout <= 3600:
            raise UsageError(f"--timeout is {arguments.timeout:g}; expected seconds above 0 and at most 3600")
        action = {"up": _up, "status": _status, "down": _down}[arguments.action]
        return action(arguments, states)


def _up(arguments: argparse.Namespace, states: StateDirectory) -> int:
    from cluster.inventory.file import read_inventory
    from cluster.ray_cluster.up import start_cluster

    try:
        inventory = read_inventory(arguments.inventory)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if arguments.names:
        inventory = inventory.select(arguments.names)
    state = start_cluster(
        inventory,
        states,
        _say,
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
    with states.held("end the cluster"):
        problems = end_cluster(states, state, connect, arguments.timeout)
    for name, sentence in problems.items():
        _say(f"{name}: {sentence}")
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


def _say(sentence: str) -> None:
    print(shown(sentence), file=sys.stderr, flush=True)


COMMAND = ClusterCommand()
