"""Starting a cluster: health first, then versions and addresses, then the head, then all other nodes at once."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from cluster.files.errors import UsageError
from cluster.inventory.nodes import Inventory, Node
from cluster.ray_cluster.candidates import Means, healthy, intended, ranks_of
from cluster.ray_cluster.container import interpreter, run_command
from cluster.ray_cluster.down import docker, end_cluster, end_node
from cluster.ray_cluster.introduction import HEAD_PORTS, THIS_MACHINE, introduce, mismatch, own_versions
from cluster.ray_cluster.node import NodeError, ask, named, on_all
from cluster.ray_cluster.ray_commands import SETTINGS, fixed_ports, head_command, worker_command
from cluster.ray_cluster.state import ClusterState, Process, StartedNode, StateDirectory
from cluster.transport.runner import Unreachable


def start_cluster(inventory: Inventory, states: StateDirectory, means: Means, *, of_run: bool = False) -> ClusterState:
    """Start Ray on the inventory's healthy nodes, the first of them as head; `of_run` for one run alone.

    Ends everything it started and raises UsageError when a cluster is recorded already, no node is healthy, versions
    differ, or the head does not start. A worker that does not start is left out with a sentence.
    """
    with states.held("start a cluster"):
        if (old := states.load()) is not None:
            how = "is up" if old.complete else "was left half started"
            raise UsageError(
                f"a cluster of {old.inventory} {how} (by {old.created_by}, {old.created_at}); "
                "`burst cluster down` ends it"
            )
        return _started(inventory, states, means, of_run)


def _started(inventory: Inventory, states: StateDirectory, means: Means, of_run: bool) -> ClusterState:
    nodes = healthy(inventory, means)
    session = secrets.token_hex(4)
    state = ClusterState(
        session=session,
        inventory=inventory.name,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        created_by=f"{getpass.getuser()}@{socket.gethostname()}",
        known_hosts=means.known_hosts,
        head_port=nodes[0].site.ray.head_port,
        complete=False,
        versions="",
        of_run=of_run,
        nodes=tuple(intended(node, session, number, means) for number, node in enumerate(nodes)),
    )
    states.save_token(secrets.token_hex(32))
    states.save(state)
    try:
        return _Start(states, state, nodes, means).run()
    except BaseException as error:  # Ctrl-C as well: nothing half started stays
        problems = end_cluster(states, states.load() or state, means.connect, means.seconds)
        for name, sentence in problems.items():
            means.say(f"{name} may still run its part of the cluster ({sentence}); `burst cluster down` tries again")
        if isinstance(error, NodeError | Unreachable):
            raise UsageError(str(error)) from error
        raise


class _Start:
    """One attempt; `state` is saved after every step of it."""

    def __init__(self, states: StateDirectory, state: ClusterState, nodes: Sequence[Node], means: Means) -> None:
        self.states = states
        self.state = state
        self.nodes = {node.name: node for node in nodes}
        self.means = means
        self.token = states.token()
        self._lock = threading.Lock()

    def run(self) -> ClusterState:
        head, *workers = self.state.nodes
        self._each(self.state.nodes, self._start_container)
        versions = {THIS_MACHINE: own_versions(self.means.folder, self.means.describe, self.means.seconds)}
        [versions[head.name]] = self._each([head], lambda node: self._introduce(node, toward=""))
        others = self._each(workers, lambda node: self._introduce(node, toward=self.state.head.address))
        versions |= {node.name: answer for node, answer in zip(workers, others, strict=True)}
        if problem := mismatch(versions):
            raise UsageError(problem)
        self._save(dataclasses.replace(self.state, versions=_sentence(versions[head.name])))
        self._each([self.state.head], self._start_ray)
        self._start_workers()
        self._save(dataclasses.replace(self.state, complete=True))
        return self.state

    def _start_container(self, node: StartedNode) -> None:
        site = self.nodes[node.name].site
        if not node.container:
            return
        command = run_command(site.container, mark=node.mark, name=f"burst-ray-{node.mark.replace('/', '-')}")
        self._learn(node, begun=True)
        with self.means.connect(node.host, self.means.seconds) as runner:
            done = docker(runner, command, self.means.seconds)
        self._learn(node, container_id=done.stdout.strip())

    def _introduce(self, node: StartedNode, *, toward: str) -> dict[str, str]:
        """Learn a node's address and ranks; returns its versions."""
        site = self.nodes[node.name].site
        with self.means.connect(node.host, self.means.seconds) as runner:
            python = interpreter(site, node.python, self._now(node).container_id)
            met = introduce(
                runner, python, node, site.network.interface, toward, self.means.describe, self.means.seconds
            )
        ranks = ranks_of(self.nodes[node.name], met.description, self.means)
        if not toward:  # only the head listens on ports that other nodes use
            free = iter(met.free_ports)
            ports: dict[str, Any] = {name: getattr(site.ray, name) or next(free) for name in HEAD_PORTS}
            site = dataclasses.replace(site, ray=dataclasses.replace(site.ray, **ports))
            self.nodes[node.name] = dataclasses.replace(self.nodes[node.name], site=site)
            self._save(dataclasses.replace(self.state, head_port=site.ray.head_port))
        self._learn(node, address=met.address, interface=met.interface, ranks=ranks, description=met.description)
        return met.versions

    def _start_workers(self) -> None:
        """All but the head; a node that does not start is ended and left out."""
        workers = [node for node in self.state.nodes if node is not self.state.head]
        failed = {}
        for node, answer in zip(workers, on_all(workers, self._start_ray), strict=True):
            if isinstance(answer, str):
                failed[node.name] = answer
        for name, sentence in failed.items():
            self.means.say(f"left out: {name} did not start ({sentence})")
            node = next(node for node in self.state.nodes if node.name == name)
            with contextlib.suppress(NodeError, Unreachable):
                end_node(node, self.means.connect, self.means.seconds)
                self._save(
                    dataclasses.replace(self.state, nodes=tuple(old for old in self.state.nodes if old.name != name))
                )

    def _start_ray(self, node: StartedNode) -> None:
        site = self.nodes[node.name].site
        known = self._now(node)
        common = {"address": known.address, "name": node.name, "directory": f"{node.directory}/ray"}
        if known.name == self.state.head.name:
            command = head_command(node.python, site.ray, **common)
        else:
            command = worker_command(node.python, site.ray, **common, head=self.state.head_address)
        seconds = site.ray.ready_seconds
        self._learn(node, begun=True)
        with self.means.connect(node.host, self.means.seconds) as runner:
            answer = ask(
                runner,
                interpreter(site, node.python, known.container_id),
                "start",
                seconds=seconds + self.means.seconds,
                mark=node.mark,
                directory=node.directory,
                token=self.token,
                command=command,
                environment={**SETTINGS, "PYTHONPATH": node.folder},
                wait_seconds=seconds,
                ports=fixed_ports(site.ray, head=known.name == self.state.head.name),
            )
        processes = tuple(Process(**process) for process in answer["processes"])
        self._learn(node, session=answer["session"], processes=processes)

    def _each(self, nodes: Sequence[StartedNode], work: Callable[[StartedNode], Any]) -> list[Any]:
        """`work` on all nodes at once. Raises NodeError with every sentence when it failed on some."""
        answers = on_all(nodes, work)
        if problems := named(nodes, answers):
            raise NodeError(problems)
        return answers

    def _now(self, node: StartedNode) -> StartedNode:
        """The node with everything learned since."""
        return next(known for known in self.state.nodes if known.name == node.name)

    def _learn(self, node: StartedNode, **facts: Any) -> None:
        with self._lock:
            self.state = self.state.with_node(dataclasses.replace(self._now(node), **facts))
            self.states.save(self.state)

    def _save(self, state: ClusterState) -> None:
        with self._lock:
            self.state = state
            self.states.save(state)


def _sentence(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())
