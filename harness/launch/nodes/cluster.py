"""The hosts that `--nodes` names: those of the cluster that is up, else of one that is started for the run alone.

Planning and running see the same hosts in the same order, so that a plan holds for the run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.inventory.file import read_inventory
from cluster.inventory.nodes import Inventory, Node
from cluster.ray_cluster.down import end_cluster
from cluster.ray_cluster.node import NodeError, on_all
from cluster.ray_cluster.state import ClusterState, StateDirectory, default_directory
from cluster.ray_cluster.up import start_cluster, unfit_nodes
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


def planned_machine(arguments: argparse.Namespace, say: Say) -> Machine:
    """The hosts that a run with these arguments would have, as one machine. Starts nothing. Raises UsageError."""
    inventory = _inventory(arguments.nodes)
    connect = connection(
        [node.host for node in inventory.nodes],
        known_hosts=arguments.known_hosts,
        accept_new_host_keys=arguments.accept_new_host_keys,
    )
    unfit = unfit_nodes(inventory.nodes, connect, SECONDS, say)
    for sentence in unfit.values():
        say(f"left out: {sentence}")
    fit = [node for node in inventory.nodes if node.name not in unfit]
    if not fit:
        raise UsageError(f"none of the {len(inventory.nodes)} nodes is usable; see burst check for each one's findings")
    return _machine(fit, connect)


def cluster_launcher(
    arguments: argparse.Namespace, say: Say, pointless: Callable[[Machine], str | None]
) -> tuple[Machine, Launcher]:
    """The hosts as one machine, and their launcher. Starts a cluster where none is up, unless `pointless` says why the
    run needs none: it is asked with the hosts, before Ray. Raises UsageError.
    """
    inventory = _inventory(arguments.nodes)
    states = StateDirectory(arguments.state or default_directory())
    old = states.load()
    own = old is None or not old.nodes or old.of_run
    if old is None or not old.nodes:
        say("no cluster is up: starting one for this run")
        if why := pointless(planned_machine(arguments, lambda sentence: None)):
            raise UsageError(why)
    state = start_cluster(
        inventory,
        states,
        say,
        known_hosts=arguments.known_hosts,
        accept_new_host_keys=arguments.accept_new_host_keys,
        of_run=own,
    )
    try:
        names = {node.name for node in state.nodes if not node.silent}
        nodes = [node for node in inventory.nodes if node.name in names]
        machine, launcher = _launcher(state, states, nodes)
    except BaseException:  # nodes that differ too much for one run, and Ctrl-C
        if own:
            end_own(states, state, say)
        raise
    return machine, OwnCluster(launcher, states, state, say) if own else launcher


def _launcher(state: ClusterState, states: StateDirectory, nodes: Sequence[Node]) -> tuple[Machine, ClusterLauncher]:
    connect = _connect(state)

    def unfit(nodes: Sequence[Node]) -> dict[str, str]:
        return unfit_nodes(nodes, connect, SECONDS, lambda sentence: None)

    means = ClusterMeans(
        machine=_machine(nodes, connect),
        unfit=unfit,
        environments=HostEnvironments(connect, state.head.address, os.environ),
    )
    return means.machine, ClusterLauncher(states, state, nodes, means)


def _connect(state: ClusterState) -> Connect:
    return connection([node.host for node in state.nodes], known_hosts=state.known_hosts)


def _machine(nodes: Sequence[Node], connect: Connect) -> Machine:
    """These nodes as one machine, by the words of each. Raises UsageError for one that cannot say."""

    def described(node: Node) -> tuple[Machine, int]:
        software = node.site.software
        python, folder = software.python or sys.executable, software.folder or str(PROJECT_ROOT)
        words = ["env", "-C", folder, f"PYTHONPATH={folder}", python, "-m", "harness.machine.this_machine"]
        with connect(node.host, SECONDS) as runner:
            done = runner.run(words, deadline_seconds=SECONDS)
        if done.exit_status != 0:
            said = done.stderr.strip().splitlines()
            raise NodeError(f"cannot run this project ({said[-1][:200] if said else 'it printed nothing'})")
        description = json.loads(done.stdout.strip().splitlines()[-1])
        try:
            return machine_of(description), ranks_of(node, description)
        except ValueError as error:
            raise NodeError(str(error)) from error

    answers = on_all(nodes, described)
    if failed := [
        f"{node.name}: {answer}" for node, answer in zip(nodes, answers, strict=True) if isinstance(answer, str)
    ]:
        raise UsageError("; ".join(failed))
    found = [answer for answer in answers if not isinstance(answer, str)]
    return together([machine for machine, _ in found], min(ranks for _, ranks in found))


def _inventory(file: Path) -> Inventory:
    try:
        return read_inventory(file)
    except ValueError as error:
        raise UsageError(str(error)) from error


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
