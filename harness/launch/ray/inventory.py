"""The launcher for several hosts that a command line asks for: `--ray` joins a Ray cluster, `--nodes` the one of an
inventory, which is started for the run alone where none is up.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster.inventory.file import read_inventory
from cluster.inventory.nodes import Inventory
from cluster.ray_cluster.down import end_cluster
from cluster.ray_cluster.state import ClusterState, StateDirectory, default_directory
from cluster.ray_cluster.up import start_cluster
from cluster.transport.reach import connection
from harness.base.errors import UsageError
from harness.launch.launcher import Job, Launcher, Outcome
from harness.launch.ray.connection import ClusterLost, RayConnection
from harness.launch.ray.launcher import RayLauncher
from harness.machine.this_machine import Machine

SECONDS = 60.0  # for one answer of one node
Say = Callable[[str], None]


def joined(arguments: argparse.Namespace, say: Say) -> RayLauncher:
    """The launcher for a cluster that is up: that of `--ray`, else of `--nodes`. Starts none. Raises UsageError."""
    if not arguments.nodes:
        return _launcher(arguments.ray or "auto", None, say)
    inventory = _inventory(arguments.nodes)
    states = StateDirectory(arguments.state or default_directory())
    state = states.load()
    if state is None or not state.nodes:
        raise UsageError(f"no cluster is up; start it with burst cluster up {arguments.nodes}")
    return _of_inventory(inventory, states, state, say)


def ray_launcher(arguments: argparse.Namespace, say: Say) -> tuple[Machine, Launcher]:
    """The hosts as one machine, and their launcher. With `--nodes`, the cluster that is up gets those hosts of the
    inventory that it lacks; where none is up, one is started, and ends with the launcher. Raises UsageError."""
    if not arguments.nodes:
        launcher = joined(arguments, say)
        return launcher.machine, launcher
    inventory = _inventory(arguments.nodes)
    states = StateDirectory(arguments.state or default_directory())
    before = states.load()
    own = before is None or not before.nodes or before.of_run
    if before is None or not before.nodes:
        say("no cluster is up: starting one for this run")
    state = start_cluster(
        inventory,
        states,
        say,
        known_hosts=arguments.known_hosts,
        accept_new_host_keys=arguments.accept_new_host_keys,
        of_run=own,
    )
    try:
        launcher = _of_inventory(inventory, states, state, say)
    except BaseException:  # nodes that differ too much for one run, and Ctrl-C
        if own:
            end_own(states, state, say)
        raise
    return launcher.machine, OwnCluster(launcher, states, state, say) if own else launcher


def _of_inventory(inventory: Inventory, states: StateDirectory, state: ClusterState, say: Say) -> RayLauncher:
    """Those nodes of the inventory that are part of the cluster, in the inventory's order."""
    addresses = {node.name: node.address for node in state.nodes}
    nodes = {addresses[node.name]: node for node in inventory.nodes if node.name in addresses}
    if not nodes:
        raise UsageError(
            f"none of the nodes in {inventory.name} is part of the cluster that is up "
            f"({', '.join(addresses)}); add them with burst cluster up"
        )
    with _restarted("see burst cluster status"):
        return RayLauncher(RayConnection(state.head_address, states.token_path), say, nodes)


def _launcher(address: str, token: Path | None, say: Say) -> RayLauncher:
    with _restarted("start it again"):
        return RayLauncher(RayConnection(address, token), say)


@contextlib.contextmanager
def _restarted(how: str) -> Iterator[None]:
    """A cluster that cannot be joined refuses the command; `how` is the next step."""
    try:
        yield
    except ClusterLost as error:
        raise UsageError(f"{error}; {how}") from error


def _inventory(file: Path) -> Inventory:
    try:
        return read_inventory(file)
    except ValueError as error:
        raise UsageError(str(error)) from error


class OwnCluster:
    """A launcher with a cluster of its own, which ends with it: `burst run --nodes` where no cluster is up."""

    name = RayLauncher.name

    def __init__(self, launcher: RayLauncher, states: StateDirectory, state: ClusterState, say: Say) -> None:
        self._launcher = launcher
        self._states = states
        self._state = state
        self._say = say

    @property
    def stuck(self) -> bool:
        """See `RayLauncher.stuck`."""
        return self._launcher.stuck

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        return self._launcher.run(job, on_progress)

    def close(self) -> None:
        """End the ranks, then the cluster. Idempotent."""
        try:
            self._launcher.close()
        finally:
            end_own(self._states, self._state, self._say)


def end_own(states: StateDirectory, started: ClusterState, say: Say) -> None:
    """End the cluster that was started, unless it has been ended and perhaps replaced by another."""
    try:
        with states.held("end the cluster of this run"):
            state = states.load()
            if state is None or state.session != started.session:
                return
            say("ending the cluster of this run")
            connect = connection([node.host for node in state.nodes], known_hosts=state.known_hosts)
            problems = end_cluster(states, state, connect, SECONDS)
    except UsageError as error:  # the run has its results, whether or not the cluster ended
        problems = {"the cluster": str(error)}
    for name, sentence in problems.items():
        say(f"{name} could not be ended ({sentence}); the next run, burst cluster up or down tries again")
