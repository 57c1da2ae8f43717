"""The hosts that `--nodes` names: those of the cluster that is up, else of one that is started for the run alone.

Planning and running see the same hosts in the same order, so that a plan holds for the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cluster.inventory.file import read_inventory
from cluster.inventory.nodes import Inventory, Node
from cluster.ray_cluster.candidates import Candidate, Means, candidates, unfit_nodes
from cluster.ray_cluster.down import end_cluster
from cluster.ray_cluster.quarantine import Quarantine
from cluster.ray_cluster.state import ClusterState, StartedNode, StateDirectory, default_directory
from cluster.ray_cluster.status import cluster_status
from cluster.ray_cluster.up import start_cluster
from cluster.transport.reach import connection
from cluster.transport.runner import Connect
from harness.base.errors import UsageError
from harness.launch.launcher import Job, Launcher, Outcome
from harness.launch.nodes.hosts import HostEnvironments
from harness.launch.nodes.launcher import ClusterLauncher, ClusterMeans
from harness.machine.this_machine import Machine, machine_of, ranks_of, together
from harness.records.provenance import PROJECT_ROOT

SECONDS = 60.0  # for one answer of one node
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """Which host keys are trusted; see `cluster.transport.reach.connection`."""

    known_hosts: Path | None = None
    accept_new_host_keys: bool = False


def start(inventory: Inventory, states: StateDirectory, trust: Trust, say: Say, seconds: float) -> ClusterState:
    """Start Ray on the inventory's healthy nodes, which must hold the same code as this one. Raises UsageError."""
    return start_cluster(inventory, states, _means(inventory, states, trust, say, seconds))


def planned_machine(arguments: argparse.Namespace, say: Say) -> Machine:
    """The hosts that a run with these arguments would have, as one machine. Starts nothing. Raises UsageError."""
    inventory = _inventory(arguments.nodes)
    states = StateDirectory(arguments.state or default_directory())
    state = _usable(states, arguments.nodes)
    if state is not None:
        shared = _shared(inventory, state, arguments.nodes, say)
        return _machine(state, _fit(shared, state, states, say))
    return _machine_of(candidates(inventory, _means(inventory, states, _trust(arguments), say, SECONDS)))


def cluster_launcher(
    arguments: argparse.Namespace, say: Say, pointless: Callable[[Machine], str | None]
) -> tuple[Machine, Launcher]:
    """The hosts as one machine, and their launcher. Starts a cluster where none is up, unless `pointless` says why the
    run needs none: it is asked with the hosts, before Ray. Raises UsageError.
    """
    inventory = _inventory(arguments.nodes)
    states = StateDirectory(arguments.state or default_directory())
    state = _usable(states, arguments.nodes)
    if state is not None:
        shared = _shared(inventory, state, arguments.nodes, say)
        return _launcher(state, states, shared, _fit(shared, state, states, say))
    say("no cluster is up: starting one for this run")
    means = _means(inventory, states, _trust(arguments), say, SECONDS)
    means = dataclasses.replace(means, pointless=lambda found: pointless(_machine_of(found)))
    state = start_cluster(inventory, states, means, of_run=True)
    try:
        shared = _shared(inventory, state, arguments.nodes, say)
        machine, launcher = _launcher(state, states, shared, shared)  # they were checked before they were started
    except BaseException:  # nodes that differ too much for one run, and Ctrl-C
        end_own(states, state, say)
        raise
    return machine, OwnCluster(launcher, states, state, say)


def _usable(states: StateDirectory, inventory: Path) -> ClusterState | None:
    """The cluster that a run may take part in; None when none is up. Raises UsageError for one it must not touch."""
    state = states.load()
    if state is None or state.ending:  # the next start ends what is left of it
        return None
    if state.of_run:
        raise UsageError(
            f"the cluster in {states.path} belongs to another burst run (by {state.created_by}, {state.created_at}); "
            "wait for its end, or burst cluster down if that run was killed, or give --state a folder of this run's own"
        )
    if not state.complete:
        raise UsageError(
            f"the cluster in {states.path} is half up; burst cluster down, then burst cluster up {inventory}"
        )
    return state


def _shared(inventory: Inventory, state: ClusterState, file: Path, say: Say) -> list[Node]:
    """Nodes that are in both, in the inventory's order."""
    joined = {node.name for node in state.joined}
    for node in inventory.nodes:
        if node.name not in joined and not state.of_run:
            say(f"left out: {node.name} is not part of the cluster that is up")
    nodes = [node for node in inventory.nodes if node.name in joined]
    if not nodes:
        raise UsageError(
            f"none of the nodes in {file} is part of the cluster that is up "
            f"({', '.join(node.name for node in state.nodes)}); "
            f"end it with burst cluster down, then burst cluster up {file}"
        )
    return nodes


def _fit(nodes: Sequence[Node], state: ClusterState, states: StateDirectory, say: Say) -> list[Node]:
    """The nodes of a cluster that is up that can be used now: they pass their check, and Ray still runs there.

    A repaired node leaves the quarantine by that. Raises UsageError for none, and where the head is not up.
    """
    connect = _connect(state)
    unfit = unfit_nodes(nodes, connect, SECONDS, Quarantine(states.path))
    names = {node.name for node in nodes if node.name not in unfit}
    for found in cluster_status(state, connect, SECONDS, only=names | {state.head.name}):
        if found.state != "up" and found.name == state.head.name:
            raise UsageError(
                f"the cluster's head {found.name} is not up ({found.finding}); burst cluster down, then up"
            )
        if found.state != "up":
            unfit[found.name] = f"{found.name}: {found.finding}; burst cluster down, then up, let it join again"
    for sentence in unfit.values():
        say(f"left out: {sentence}")
    fit = [node for node in nodes if node.name not in unfit]
    if not fit:
        raise UsageError(
            f"none of the {len(nodes)} nodes of the cluster can be used now; see burst check and burst cluster status"
        )
    return fit


def _launcher(
    state: ClusterState, states: StateDirectory, nodes: Sequence[Node], fit: Sequence[Node]
) -> tuple[Machine, ClusterLauncher]:
    """`fit` of the `nodes` can be used now; the others may be repaired meanwhile."""
    connect = _connect(state)
    means = ClusterMeans(
        machine=_machine(state, fit),
        unfit=partial(unfit_nodes, connect=connect, timeout_seconds=SECONDS),
        environments=HostEnvironments(connect, state.head.address, os.environ),
    )
    first = [*fit, *(node for node in nodes if node not in fit)]
    return means.machine, ClusterLauncher(states, state, first, means)


def _connect(state: ClusterState) -> Connect:
    return connection([node.host for node in state.nodes], known_hosts=state.known_hosts)


def _machine(state: ClusterState, nodes: Sequence[Node]) -> Machine:
    started = {node.name: node for node in state.nodes}
    return _machine_of([started[node.name] for node in nodes])


def _machine_of(found: Sequence[Candidate | StartedNode]) -> Machine:
    return together([machine_of(json.loads(node.description)) for node in found], min(node.ranks for node in found))


def _inventory(file: Path) -> Inventory:
    try:
        return read_inventory(file)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _trust(arguments: argparse.Namespace) -> Trust:
    return Trust(known_hosts=arguments.known_hosts, accept_new_host_keys=arguments.accept_new_host_keys)


def _means(inventory: Inventory, states: StateDirectory, trust: Trust, say: Say, seconds: float) -> Means:
    connect = connection(
        [node.host for node in inventory.nodes],
        known_hosts=trust.known_hosts,
        accept_new_host_keys=trust.accept_new_host_keys,
    )
    return Means(
        connect=connect,
        unfit=partial(unfit_nodes, connect=connect, timeout_seconds=seconds, quarantine=Quarantine(states.path)),
        describe=("-m", "harness.machine.this_machine"),
        ranks=ranks_of,
        folder=PROJECT_ROOT,
        say=say,
        known_hosts=trust.known_hosts.absolute() if trust.known_hosts else None,
        seconds=seconds,
    )


class OwnCluster:
    """A launcher with a cluster of its own, which ends with it: `burst run --nodes` where no cluster is up."""

    def __init__(
        self, launcher: ClusterLauncher, states: StateDirectory, state: ClusterState, say: Callable[[str], None]
    ) -> None:
        self.name = launcher.name
        self._launcher = launcher
        self._states = states
        self._state = state
        self._say = say

    @property
    def stuck(self) -> bool:
        """See `ClusterLauncher.stuck`."""
        return self._launcher.stuck

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        return self._launcher.run(job, on_progress)

    def lanes(self, number: int) -> list[tuple[Machine, Launcher]]:
        """See `ClusterLauncher.lanes`."""
        return self._launcher.lanes(number)

    def close(self) -> None:
        """End the ranks, then the cluster. Idempotent."""
        try:
            self._launcher.close()
        finally:
            end_own(self._states, self._state, self._say)


def end_own(states: StateDirectory, started: ClusterState, say: Callable[[str], None]) -> None:
    """End the cluster that was started, unless it has been ended and perhaps replaced by another."""
    try:
        with states.held("end the cluster of this run"):
            state = states.load()
            if state is None or state.session != started.session:
                return
            problems = end_cluster(states, state, _connect(state), SECONDS)
    except UsageError as error:  # the run has its results, whether or not the cluster ended
        problems = {"the cluster": str(error)}
    for name, sentence in problems.items():
        say(f"{name} could not be ended ({sentence}); burst cluster down tries again")
