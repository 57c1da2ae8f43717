"""Starting a cluster: health first, then versions and addresses, then the head, then all other nodes at once."""

from __future__ import annotations

import dataclasses
import getpass
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from cluster.files.errors import UsageError
from cluster.inventory.nodes import Inventory, Node
from cluster.ray_cluster.candidates import Means, as_candidates, healthy, intended, meet
from cluster.ray_cluster.container import interpreter, run_command
from cluster.ray_cluster.down import end_cluster, end_node, run_engine
from cluster.ray_cluster.introduction import HEAD_PORTS, Introduction, introduce
from cluster.ray_cluster.node import NodeError, ask, on_all
from cluster.ray_cluster.ray_commands import SETTINGS, fixed_ports, head_command, worker_command
from cluster.ray_cluster.state import ClusterState, Process, StartedNode, StateDirectory
from cluster.transport.runner import Unreachable

ANSWER_SECONDS = 30.0  # beyond Ray's own deadline: to start the interpreter, and to end what Ray has started
MAX_HEADS = 3  # tried one after another; where so many fail, the site or the network is at fault


def start_cluster(inventory: Inventory, states: StateDirectory, means: Means, *, of_run: bool = False) -> ClusterState:
    """Start Ray on the inventory's healthy nodes, the first of them as head; `of_run` for one run alone.

    Ends what is left of an earlier cluster that `down` did not reach whole. Ends everything it started and raises
    UsageError when a cluster is recorded already, no node is healthy, none has
    this machine's software, or no head starts. A node that cannot take part is left out with a sentence.
    """
    with states.held("start a cluster"):
        old = states.load()
        if old is not None and old.ending:
            if problems := end_cluster(states, old, means.connect, means.seconds):
                raise UsageError(
                    f"the cluster in {states.path} was ended except on {', '.join(problems)}; "
                    "repeat burst cluster down, or give it --forget if they are gone"
                )
            old = None
        if old is not None:
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
    """One attempt; `state` is saved after every step of it. A node that fails a step is left out, the others go on."""

    def __init__(self, states: StateDirectory, state: ClusterState, nodes: Sequence[Node], means: Means) -> None:
        self.states = states
        self.state = state
        self.nodes = {node.name: node for node in nodes}
        self.means = means
        self.token = states.token()
        self.left_out: dict[str, str] = {}  # by name: why
        self._lock = threading.Lock()

    def run(self) -> ClusterState:
        self._on(self.state.nodes, self._start_container)
        met = self._meet()
        self._save(dataclasses.replace(self.state, versions=_sentence(next(iter(met.values())).versions)))
        ports = self._start_head(met)
        self._on(self.state.nodes[1:], partial(self._start_ray, ports=ports))
        self._save(dataclasses.replace(self.state, complete=True))
        return self.state

    def _start_container(self, node: StartedNode) -> None:
        site = self.nodes[node.name].site
        if not node.container:
            return
        command = run_command(site.container, mark=node.mark, name=f"burst-ray-{node.mark.replace('/', '-')}")
        self._learn(node, begun=True)
        with self.means.connect(node.host, self.means.seconds) as runner:
            done = run_engine(runner, command, self.means.seconds)
        self._learn(node, container_id=done.stdout.strip())

    def _meet(self) -> dict[str, Introduction]:
        """Learn address and ranks of the nodes that can form a cluster; returns their introductions, the head first."""
        present = [node for node in self.state.nodes if node.name not in self.left_out]
        if not present:
            raise NodeError(self._reasons())
        met, left_out = meet([self.nodes[node.name] for node in present], self._introduced, self.means)
        self._leave_out(left_out)
        chosen = as_candidates([self.nodes[node.name] for node in present], met, self.means)
        if why := self.means.pointless(chosen):
            raise UsageError(why)
        for one in chosen:
            found = met[one.name]
            self._learn(
                self._record(one.name),
                address=found.address,
                interface=found.interface,
                ranks=one.ranks,
                description=one.description,
            )
        return met

    def _introduced(self, node: Node, toward: str) -> Introduction:
        record = self._record(node.name)
        with self.means.connect(node.host, self.means.seconds) as runner:
            python = interpreter(record)
            interface = node.site.network.interface
            return introduce(runner, python, record, interface, toward, self.means.describe, self.means.seconds)

    def _start_head(self, met: Mapping[str, Introduction]) -> Mapping[str, Any]:
        """Start the first node that can be the head; returns its ports. Raises NodeError when MAX_HEADS could not."""
        for name in list(met)[:MAX_HEADS]:
            site = self.nodes[name].site
            free = iter(met[name].free_ports)
            ports = {port: getattr(site.ray, port) or next(free) for port in HEAD_PORTS}
            first = self._record(name)
            others = [node for node in self.state.nodes if node is not first]
            self._save(dataclasses.replace(self.state, head_port=ports["head_port"], nodes=(first, *others)))
            self._on([first], partial(self._start_ray, ports=ports))
            if name not in self.left_out:
                return ports
        raise NodeError(f"no head could be started: {self._reasons()}")

    def _start_ray(self, node: StartedNode, ports: Mapping[str, Any]) -> None:
        """Start Ray on one node. Its log is kept where that fails."""
        site = self.nodes[node.name].site
        known = self._record(node.name)
        head = known.name == self.state.head.name
        ray = dataclasses.replace(site.ray, **ports) if head else site.ray
        common = {"address": known.address, "name": node.name, "directory": f"{node.directory}/ray"}
        if head:
            command = head_command(node.python, ray, **common)
        else:
            command = worker_command(node.python, ray, **common, head=self.state.head_address)
        self._learn(node, begun=True)
        with self.means.connect(node.host, self.means.seconds) as runner:
            try:
                answer = ask(
                    runner,
                    interpreter(known),
                    "start",
                    seconds=ray.ready_seconds + min(self.means.seconds, ANSWER_SECONDS),
                    mark=node.mark,
                    directory=node.directory,
                    token=self.token,
                    command=command,
                    environment={**SETTINGS, "PYTHONPATH": node.folder},
                    wait_seconds=ray.ready_seconds,
                    ports=fixed_ports(ray, head=head),
                    reach="" if head else self.state.head_address,
                )
            except NodeError as error:
                kept = f"; its log: {self.states.keep_log(node.name, error.log)}" if error.log else ""
                raise NodeError(f"{error}{kept}") from error
        processes = tuple(Process(**process) for process in answer["processes"])
        self._learn(node, session=answer["session"], processes=processes)

    def _on(self, nodes: Sequence[StartedNode], work: Callable[[StartedNode], None]) -> None:
        """`work` on all of these nodes at once; those where it fails are left out."""
        chosen = [node for node in nodes if node.name not in self.left_out]
        answers = zip(chosen, on_all(chosen, work), strict=True)
        self._leave_out({node.name: answer for node, answer in answers if isinstance(answer, str)})

    def _leave_out(self, failed: Mapping[str, str]) -> None:
        """Go on without these nodes. One that may still run something stays in the record, for `down`, as the last."""
        self.left_out |= failed
        for name, sentence in failed.items():
            self.means.say(f"left out: {name}: {sentence}")
        records = [self._record(name) for name in failed]
        ended = on_all(records, self._end)
        kept = [self._record(node.name) for node, answer in zip(records, ended, strict=True) if isinstance(answer, str)]
        others = [node for node in self.state.nodes if node.name not in failed]
        if others or kept:
            self._save(dataclasses.replace(self.state, nodes=(*others, *kept)))

    def _end(self, node: StartedNode) -> int:
        return end_node(node, self.means.connect, self.means.seconds) if node.begun else 0

    def _reasons(self) -> str:
        return "; ".join(f"{name}: {why}" for name, why in self.left_out.items())

    def _record(self, name: str) -> StartedNode:
        """The node with everything learned since."""
        return next(known for known in self.state.nodes if known.name == name)

    def _learn(self, node: StartedNode, **facts: Any) -> None:
        with self._lock:
            self.state = self.state.with_node(dataclasses.replace(self._record(node.name), **facts))
            self.states.save(self.state)

    def _save(self, state: ClusterState) -> None:
        with self._lock:
            self.state = state
            self.states.save(state)


def _sentence(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())
