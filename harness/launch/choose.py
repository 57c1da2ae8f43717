"""Which launcher a run uses."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UsageError
from harness.launch import Launcher

if TYPE_CHECKING:
    from harness.machine import Machine

LAUNCHERS = ("ray", "local")
CHECK_SECONDS = 60.0  # for one node's health, before a trial that takes several


def default_launcher() -> str:
    """Ray where it is installed, else local."""
    return "ray" if importlib.util.find_spec("ray") is not None else "local"


def make_launcher(name: str) -> Launcher:
    """A launcher by name, for this machine. Raises UsageError when it cannot be used here."""
    if name == "ray":
        from harness.launch.ray import RayLauncher

        return RayLauncher()
    assert name == "local", name
    from harness.launch.local import LocalLauncher

    return LocalLauncher()


def cluster_launcher(inventory: Path, state_folder: Path, say: Callable[[str], None]) -> tuple[Machine, Launcher]:
    """The cluster that is up, as one machine, and its launcher for the nodes that `inventory` names.

    Raises UsageError when no cluster is up, or none of these nodes is part of it.
    """
    from cluster.inventory_file import read_inventory
    from cluster.ray_cluster.fitness import unfit_nodes
    from cluster.ray_cluster.state import StateDirectory
    from cluster.reach import connection
    from harness.launch.host_environments import HostEnvironments
    from harness.launch.multi_node import ClusterLauncher, ClusterMeans
    from harness.machine import together
    from harness.node_facts import machine_of

    try:
        wanted = read_inventory(inventory)
    except ValueError as error:
        raise UsageError(str(error)) from error
    states = StateDirectory(state_folder)
    state = states.load()
    if state is None or not state.complete:
        first = "" if state is None else "burst cluster down, then "
        raise UsageError(f"no cluster is up (see {state_folder}); start one with: {first}burst cluster up {inventory}")
    started = {node.name: node for node in state.nodes}
    nodes = [node for node in wanted.nodes if node.name in started]
    for node in wanted.nodes:
        if node.name not in started:
            say(f"left out: {node.name} is not part of the cluster that is up")
    if not nodes:
        raise UsageError(
            f"none of the nodes in {inventory} is part of the cluster that is up ({', '.join(started)}); "
            f"end it with burst cluster down, then burst cluster up {inventory}"
        )
    described = [machine_of(json.loads(started[node.name].description)) for node in nodes]
    machine = together(described, min(started[node.name].ranks for node in nodes))
    connect = connection([node.host for node in nodes], known_hosts=state.known_hosts)
    means = ClusterMeans(
        machine=machine,
        unfit=partial(unfit_nodes, connect=connect, timeout_seconds=CHECK_SECONDS),
        environments=HostEnvironments(connect, state.head.address, os.environ),
    )
    return machine, ClusterLauncher(states, state, nodes, means)
