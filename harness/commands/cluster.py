"""`burst cluster up | status | down | release`: Ray over SSH on the healthy nodes of an inventory."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.files.errors import counted, shown
from harness.base.errors import UsageError
from harness.commands import add_state_argument, state_directory

if TYPE_CHECKING:
    from cluster.ray_cluster.quarantine import Entry
    from cluster.ray_cluster.state import ClusterState, StateDirectory

ALL_WELL, NOT_ALL = 0, 1


class ClusterCommand:
    help = "start Ray on an inventory's healthy nodes over SSH, look at it, end it"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        from cluster.node_arguments import add_host_key_arguments

        actions = parser.add_subparsers(dest="action", required=True, metavar="up|status|down|release")
        up = actions.add_parser("up", help="check the nodes, then start Ray on those that are healthy")
        up.add_argument("inventory", type=Path, metavar="INVENTORY", help="inventory, or a plain list of hosts")
        up.add_argument("names", nargs="*", metavar="NODE", help="only these of it, such as gpu[01-04]")
        add_host_key_arguments(up)
        status = actions.add_parser("status", help="print the state of each node; exit code 1 unless all are up")
        down = actions.add_parser("down", help="end what up started, and nothing else; works after a crash of up, too")
        down.add_argument(
            "--forget", action="store_true",
            help="forget nodes that cannot be reached; end the processes there by hand",
        )  # fmt: skip
        release = actions.add_parser("release", help="let repaired nodes in again that are in quarantine")
        release.add_argument("names", nargs="+", metavar="NODE", help="names, or ranges such as gpu[01-04]")
        add_state_argument(release)
        for action in (up, status, down):
            add_state_argument(action)
            action.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="per node (default: 60)")

    def run(self, arguments: argparse.Namespace) -> int:
        from cluster.ray_cluster.state import StateDirectory

        states = StateDirectory(state_directory(arguments))
        if arguments.action == "release":
            return _release(arguments.names, states)
        if not 0 < arguments.timeout <= 3600:
            raise UsageError(f"--timeout is {arguments.timeout:g}; expected seconds above 0 and at most 3600")
        action = {"up": _up, "status": _status, "down": _down}[arguments.action]
        return action(arguments, states)


def _up(arguments: argparse.Namespace, states: StateDirectory) -> int:
    from cluster.inventory.file import read_inventory
    from harness.launch.nodes.cluster import Trust, start

    try:
        inventory = read_inventory(arguments.inventory)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if arguments.names:
        inventory = inventory.select(arguments.names)
    trust = Trust(known_hosts=arguments.known_hosts, accept_new_host_keys=arguments.accept_new_host_keys)
    state = start(inventory, states, trust, _say, arguments.timeout)
    ranks = sum(node.ranks for node in state.joined)
    left_out = len(inventory.nodes) - len(state.joined)
    print(
        f"{counted(len(state.joined), 'node')} {'is' if len(state.joined) == 1 else 'are'} up "
        f"with room for {counted(ranks, 'rank')}, "
        f"head {state.head.name} ({state.head_address}); {state.versions}"
    )
    print(f"Next: burst run EXP.yaml --nodes {arguments.inventory}, and burst cluster down at the end")
    return NOT_ALL if left_out else ALL_WELL


def _status(arguments: argparse.Namespace, states: StateDirectory) -> int:
    from cluster.ray_cluster.quarantine import Quarantine
    from cluster.ray_cluster.status import cluster_status
    from cluster.transport.reach import connection

    locked = Quarantine(states.path).entries()
    if states.load() is None and locked:
        for name, entry in locked.items():
            print(shown(f"{name}  in quarantine for {_minutes(entry)}: {entry.reason}"))
    state = _recorded(states)
    connect = connection([node.host for node in state.nodes], known_hosts=state.known_hosts)
    nodes = cluster_status(state, connect, arguments.timeout)
    width = max(len(node.name) for node in nodes)
    for node in nodes:
        found = locked.get(node.name)
        note = f"; quarantined: {found.reason} (for {_minutes(found)}, or until it passes a check)" if found else ""
        facts = f"{node.name:<{width}}  {node.role:<6}  {node.address:<15}  {node.state:<7}"
        print(shown(f"{facts}  {node.finding}{note}"))
    if state.ending:
        print(
            f"{counted(len(nodes), 'node')} of {state.inventory} did not answer burst cluster down, "
            "the others are ended; repeat it, or give --forget if they are gone"
        )
        return NOT_ALL
    up = sum(node.state == "up" for node in nodes)
    owner = ", for one burst run alone" if state.of_run else ""
    started = owner if state.complete else "; its start was cut short: run burst cluster down"
    print(f"{up} of {len(nodes)} nodes of {state.inventory} are up, since {state.created_at}{started}")
    return ALL_WELL if up == len(nodes) and state.complete else NOT_ALL


def _release(patterns: Sequence[str], states: StateDirectory) -> int:
    from cluster.inventory.hosts import expand
    from cluster.ray_cluster.quarantine import Quarantine

    quarantine = Quarantine(states.path)
    locked = quarantine.entries()
    try:
        names = [name for pattern in patterns for name in ([pattern] if pattern in locked else expand(pattern))]
    except ValueError as error:
        raise UsageError(str(error)) from error
    if unknown := [name for name in names if name not in locked]:
        held = f"those that are: {', '.join(locked)}" if locked else f"no node is, as {states.path} says"
        raise UsageError(f"{', '.join(unknown)} is not in quarantine; {held}")
    released = quarantine.release(*names)
    print(shown(f"released: {', '.join(released)}; the next run checks them as any other"))
    return ALL_WELL


def _minutes(entry: Entry) -> str:
    return f"{max(1, round((entry.until - time.time()) / 60))} min"


def _down(arguments: argparse.Namespace, states: StateDirectory) -> int:
    from cluster.ray_cluster.down import end_cluster
    from cluster.transport.reach import connection

    state = _recorded(states)
    connect = connection([node.host for node in state.nodes], known_hosts=state.known_hosts)
    with states.held("end the cluster"):
        problems = end_cluster(states, state, connect, arguments.timeout)
    for name, sentence in problems.items():
        _say(f"{name}: {sentence}")
    if problems and arguments.forget:
        states.clear()
        print(f"{counted(len(state.nodes) - len(problems), 'node')} ended, {len(problems)} forgotten")
        return NOT_ALL
    if problems:
        print(
            f"{counted(len(problems), 'node')} did not answer; "
            "repeat burst cluster down, or give --forget if they are gone"
        )
        return NOT_ALL
    print(f"{counted(len(state.nodes), 'node')} ended; no process or file of burst is left on them")
    return ALL_WELL


def _recorded(states: StateDirectory) -> ClusterState:
    """The cluster that is up, wholly or half. Raises UsageError when there is none."""
    state = states.load()
    if state is None:
        raise UsageError(f"{states.path} holds no cluster; start one with burst cluster up INVENTORY")
    return state


def _say(sentence: str) -> None:
    print(shown(sentence), file=sys.stderr, flush=True)


COMMAND = ClusterCommand()
