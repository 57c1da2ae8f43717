"""Starting a cluster, or adding to one that is up: what is left of earlier ones is ended, the nodes are checked, and
Ray starts on the healthy ones, the head first.

`start_cluster` can be repeated at any time, also after a crash or with a lost host: it goes from what is there to one
cluster of all healthy nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import hashlib
import json
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster import checks
from cluster.discovery.drift import named_twice
from cluster.files.errors import UsageError
from cluster.health.nodes import SOFTWARE, check_nodes
from cluster.inventory import checkout
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import Inventory, InventoryNode
from cluster.inventory.site import RayPorts
from cluster.ray_cluster.commands import (
    MAX_DIRECTORY_CHARACTERS,
    SETTINGS,
    fixed_ports,
    run_container,
    start_command,
)
from cluster.ray_cluster.down import cluster_status, end_cluster, end_nodes, interpreter, run_engine
from cluster.ray_cluster.node import NodeError, ask, on_all
from cluster.ray_cluster.state import ClusterState, StartedNode, StateDirectory
from cluster.render.text import why_not
from cluster.transport.reach import address_of, connection
from cluster.transport.runner import Connect, Unreachable

ANSWER_SECONDS = 30.0  # beyond Ray's own deadline: to start the interpreter, and to end what Ray has started
MAX_HEADS = 3  # tried one after another; where so many fail, the site or the network is at fault
_PROBE_SECONDS = 5.0  # for a head that answers no login to accept a connection
Say = Callable[[str], None]


def start_cluster(
    inventory: Inventory,
    states: StateDirectory,
    say: Say,
    *,
    known_hosts: Path | None = None,
    accept_new_host_keys: bool = False,
    seconds: float = 60.0,
    of_run: bool = False,
    connect: Connect | None = None,
) -> ClusterState:
    """The cluster that is up, with every healthy node of the inventory in it. `of_run`: a new one is for one run alone.

    Starts a new one where none is up or its head is lost. A node that cannot take part is left out, and `say` gets one
    sentence; so it does for a node that did not answer when its earlier processes were to be ended, which is tried
    again next time. `seconds` is for one answer of one node; `connect` None: SSH.

    Raises UsageError, and leaves nothing behind, when no node can take part or no head starts, and for the cluster of
    another run. Only what was started here is ended then.
    """
    with states.held("start a cluster"):
        old = states.load()
        recorded = (*old.nodes, *old.left) if old else ()
        hosts = [*(node.host for node in inventory.nodes), *(node.host for node in recorded)]
        connect = connect or connection(hosts, known_hosts=known_hosts, accept_new_host_keys=accept_new_host_keys)
        kept = _kept(old, states, connect, seconds, say) if old and old.nodes else []
        if old is None or not kept:
            old = ClusterState(
                session=secrets.token_hex(4),
                inventory=inventory.name,
                created_at=datetime.now(UTC).isoformat(timespec="seconds"),
                created_by=f"{getpass.getuser()}@{socket.gethostname()}",
                known_hosts=known_hosts.absolute() if known_hosts else None,
                head_port=0,
                nodes=(),
                left=recorded,
                of_run=of_run,
            )
        else:
            names = {node.name for node in kept}
            lost = tuple(node for node in old.nodes if node.name not in names)
            old = dataclasses.replace(old, nodes=tuple(kept), left=(*lost, *old.left))
        return _StartingCluster(inventory, states, old, connect, seconds, say).run()


def _kept(state: ClusterState, states: StateDirectory, connect: Connect, seconds: float, say: Say) -> list[StartedNode]:
    """The nodes of a cluster that go on, its head first; none when the head is lost."""
    head, *others = cluster_status(state, connect, seconds)
    if head.state == "unknown" and _answers(state):
        raise UsageError(f"the head {head.name} answers no login ({head.finding}), but its Ray does; try again")
    if head.state != "up":
        say(f"the head {head.name} is lost ({head.finding}); starting a new cluster")
        return []
    if state.of_run:
        raise UsageError(
            f"the cluster in {states.path} belongs to another burst run (by {state.created_by}, {state.created_at}); "
            "wait for its end, or burst cluster down if that run was killed, or give --state a folder of this run's own"
        )
    for node in others:
        if node.state == "unknown":
            say(f"left out: {node.name}: {node.finding}; it stays part of the cluster as far as it is")
    return [
        dataclasses.replace(node, silent=found.state == "unknown")
        for node, found in zip(state.nodes, (head, *others), strict=True)
        if found.state != "down"
    ]


def _answers(state: ClusterState) -> bool:
    """Whether a connection to the head's Ray is accepted."""
    with contextlib.suppress(OSError), socket.create_connection((state.head.address, state.head_port), _PROBE_SECONDS):
        return True
    return False


class _StartingCluster:
    """One attempt at what `state` lacks. A node that fails a step is left out, the others go on."""

    def __init__(
        self,
        inventory: Inventory,
        states: StateDirectory,
        state: ClusterState,
        connect: Connect,
        seconds: float,
        say: Say,
    ) -> None:
        kept = {node.name for node in state.nodes}
        self.inventory = inventory
        self.states = states
        self.state = state
        self.kept = state.nodes
        self.nodes = {node.name: node for node in inventory.nodes if node.name not in kept}
        self.connect = connect
        self.seconds = seconds
        self.say = say
        self.left_out: dict[str, str] = {}  # by name: why
        self._free_ports: dict[str, int] = {}  # by name

    def run(self) -> ClusterState:
        started: list[StartedNode] = []
        try:
            candidates = self._clear()
            started = self._healthy(candidates)
            if not started:
                if not self.kept:
                    raise UsageError(
                        f"none of the {len(self.inventory.nodes)} nodes is usable; "
                        "see burst cluster check for each one's findings"
                    )
                self._save([])
                return self.state
            if not self.kept:
                self.states.save_token(secrets.token_hex(32))
            self._save(started)
            self._started(started)
        except BaseException as error:  # Ctrl-C as well: nothing half started stays
            self._take_back(started)
            if isinstance(error, NodeError | Unreachable):
                raise UsageError(str(error)) from error
            raise
        return self.state

    def _clear(self) -> list[StartedNode]:
        """End what earlier clusters left on nodes that are to start, and on others that were not reached then."""
        fresh = [self._intended(node) for node in self.nodes.values()]
        recorded = {(node.name, node.directory): node for node in (*fresh, *self.state.left)}
        problems = end_nodes(list(recorded.values()), self.connect, self.seconds)
        left = tuple(node for node in self.state.left if node.name in problems)
        self.state = dataclasses.replace(self.state, left=left)
        for name in dict.fromkeys(node.name for node in left):
            self._says_left_out(name, f"{name}: {problems[name]}; the next up ends what an earlier cluster left there")
        return [node for node in fresh if node.name not in {node.name for node in left}]

    def _healthy(self, candidates: Sequence[StartedNode]) -> list[StartedNode]:
        names = {node.name for node in candidates}
        unfit = unfit_nodes(
            [self.nodes[name] for name in self.nodes if name in names], self.connect, self.seconds, self.say
        )
        for name, sentence in unfit.items():
            self._says_left_out(name, sentence)
        return [node for node in candidates if node.name not in unfit]

    def _started(self, nodes: Sequence[StartedNode]) -> None:
        nodes = self._on(nodes, self._with_container)
        nodes = self._on(nodes, self._met)
        taken = {node.address: node.name for node in reversed((*self.kept, *nodes))}
        twice = {
            node.name: f"is the same machine as {taken[node.address]} ({node.address}); name it once"
            for node in nodes
            if taken[node.address] != node.name
        }
        nodes = self._without(nodes, twice)
        if not self.kept:
            nodes = self._with_head(nodes)
        head, *rest = (*self.kept, *nodes)
        others = [node for node in rest if node not in self.kept]
        joined = self._on(others, lambda node: self._with_ray(node, head=self.state.head_address))
        self._save(([] if self.kept else [head]) + joined)

    def _with_container(self, node: StartedNode) -> StartedNode:
        if not node.engine:
            return node
        site = self.nodes[node.name].site
        with self.connect(node.host, self.seconds) as runner:
            done = run_engine(runner, run_container(site.container, mark=node.mark), self.seconds)
            node = dataclasses.replace(node, container_id=done.strip())
            command = [*interpreter(node)[:-1], node.python, "-c", _PROGRAM, node.folder]
            said = runner.run(command, deadline_seconds=self.seconds).stdout.splitlines()
        answer = next((line for line in said if line.startswith(checkout.ANSWER)), None)
        if answer is None:
            raise NodeError(
                f"{node.python} does not run in {site.container.image}; correct software.python in the site"
            )
        found = json.loads(answer.removeprefix(checkout.ANSWER))
        if differs := checkout.difference(checkout.own_versions(), found):
            raise NodeError(f"{differs}; build the image of this version, and send it to the node")
        return node

    def _met(self, node: StartedNode) -> StartedNode:
        """The node with its address in the cluster."""
        site = self.nodes[node.name].site
        others = [other for name, other in self.nodes.items() if name != node.name]
        toward = next((ip for other in others for ip in resolved(other.host)), "")
        with self.connect(node.host, self.seconds) as runner:
            fields = {"toward": toward, "dashboard": site.ray.dashboard and not self.kept}
            answer = ask(runner, interpreter(node), "facts", seconds=self.seconds, **fields)
        if not answer["dashboard"]:
            raise NodeError(
                "ray.dashboard is true, and its Ray has no dashboard; leave that out, or install it there: "
                f"{node.python} -m pip install 'ray[default]=={checkout.own_versions()['ray']}'"
            )
        self._free_ports[node.name] = answer["free_port"]
        return dataclasses.replace(node, address=own_address(answer, resolved(node.host), site.network.interface))

    def _with_head(self, nodes: Sequence[StartedNode]) -> list[StartedNode]:
        """Start the first node that can be the head. Raises NodeError when MAX_HEADS could not."""
        for number, node in enumerate(nodes[:MAX_HEADS]):
            port = self.nodes[node.name].site.ray.head_port or self._free_ports[node.name]
            rest = list(nodes[number + 1 :])
            self.state = dataclasses.replace(self.state, head_port=port)
            self._save([node, *rest])
            if self._on([node], lambda first: self._with_ray(first, head="")):
                return [node, *rest]
        raise NodeError(f"no head could be started: {'; '.join(self.left_out.values())}")  # each names its node

    def _with_ray(self, node: StartedNode, *, head: str) -> StartedNode:
        """Start Ray on one node; `head` is the head's address, empty on the head itself. Its log is kept if that
        fails."""
        ray: RayPorts = self.nodes[node.name].site.ray
        if not head:
            ray = dataclasses.replace(ray, head_port=self.state.head_port)
        command = start_command(node.python, ray, address=node.address, directory=node.directory, head=head)
        with self.connect(node.host, self.seconds) as runner:
            try:
                ask(
                    runner,
                    interpreter(node),
                    "start",
                    seconds=ray.ready_seconds + min(self.seconds, ANSWER_SECONDS),
                    mark=node.mark,
                    directory=node.directory,
                    token=self.states.token(),
                    command=command,
                    environment={**SETTINGS, "PYTHONPATH": node.folder},
                    wait_seconds=ray.ready_seconds,
                    ports=fixed_ports(ray, head=not head),
                    reach=head,
                )
            except NodeError as error:
                kept = f"; see its log: {self.states.keep_log(node.name, error.log)}" if error.log else ""
                raise NodeError(f"{error}{kept}") from error
        return node

    def _on(self, nodes: Sequence[StartedNode], work: Callable[[StartedNode], StartedNode]) -> list[StartedNode]:
        """The results of `work` on all of these nodes at once, without those where it failed."""
        answers = on_all(nodes, work)
        failed = {node.name: answer for node, answer in zip(nodes, answers, strict=True) if isinstance(answer, str)}
        self._without(nodes, failed)
        return [answer for answer in answers if not isinstance(answer, str)]

    def _without(self, nodes: Sequence[StartedNode], failed: Mapping[str, str]) -> list[StartedNode]:
        """Go on without these nodes. One that may still run something is ended later."""
        for name, sentence in failed.items():
            self._says_left_out(name, f"{name}: {sentence}")
        gone = [node for node in nodes if node.name in failed]
        problems = end_nodes(gone, self.connect, self.seconds)
        left = (*self.state.left, *(node for node in gone if node.name in problems))
        rest = [node for node in nodes if node.name not in failed]
        self.state = dataclasses.replace(self.state, left=left)
        return rest

    def _says_left_out(self, name: str, sentence: str) -> None:
        self.left_out[name] = sentence
        self.say(f"left out: {sentence}")

    def _take_back(self, started: Sequence[StartedNode]) -> None:
        """End what was started here; the cluster that was up before goes on."""
        if self.kept:
            problems = end_nodes(started, self.connect, self.seconds)
            left = (*self.state.left, *(node for node in started if node.name in problems))
            self.state = dataclasses.replace(self.state, left=left)
            self._save([])
        else:
            state = dataclasses.replace(self.state, nodes=tuple(started))
            problems = end_cluster(self.states, state, self.connect, self.seconds)
        for name, sentence in problems.items():
            self.say(f"{name} may still run its part of the cluster ({sentence}); the next up or down ends it")

    def _save(self, started: Sequence[StartedNode]) -> None:
        self.state = dataclasses.replace(self.state, nodes=(*self.kept, *started))
        self.states.save(self.state)

    def _intended(self, node: InventoryNode) -> StartedNode:
        """The record of a node before anything is read from it."""
        mark = self.states.mark(node.name)
        base = (node.site.ray.temp_dir or "/tmp").rstrip("/")  # noqa: S108 - a new folder of mode 0700 is made in it
        directory = f"{base}/burst-ray-{hashlib.sha256(mark.encode()).hexdigest()[:8]}"
        if len(directory) > MAX_DIRECTORY_CHARACTERS:
            raise UsageError(
                f"{node.name}: ray.temp_dir {base} is too long for Ray's Unix sockets; "
                f"give one of at most {MAX_DIRECTORY_CHARACTERS - len(directory) + len(base)} characters"
            )
        return StartedNode(
            name=node.name,
            host=node.host,
            address="",
            mark=mark,
            directory=directory,
            python=node.site.software.python or sys.executable,
            folder=node.site.software.folder or str(checkout.ROOT),
            engine="" if node.site.container.engine == "none" else node.site.container.engine,
        )


_PROGRAM = Path(checkout.__file__).read_text(encoding="utf-8")


def unfit_nodes(nodes: Sequence[InventoryNode], connect: Connect, seconds: float, say: Say) -> dict[str, str]:
    """One sentence for every node that no run may use, by name. `say` gets one for what is not known of the others."""
    unfit: dict[str, str] = {}
    reports = {report.host.name: report for report in check_nodes(nodes, connect, checks.discover(), seconds)}
    same = named_twice({node.name: reports[node.name].verdicts for node in nodes})
    for name, report in reports.items():
        software = report.verdicts.get(SOFTWARE)
        if not report.usable:
            unfit[name] = why_not(report)
        elif name in same:
            unfit[name] = f"{name}: {same[name].summary}"
        elif software is not None and software.level == "warn":
            unfit[name] = f"{name}: {software.summary}"
        else:
            unknown = [check for check, verdict in report.verdicts.items() if verdict.level == "unknown"]
            if unknown:
                say(f"{name} takes part, although {', '.join(unknown)} gave no answer; see burst cluster check")
    return {node.name: unfit[node.name] for node in nodes if node.name in unfit}


def own_address(facts: Mapping[str, Any], of_name: Sequence[str], interface: str | None) -> str:
    """The IPv4 address of a node that the others are to use: of the site's `interface`, else of the node's name, else
    that of its login, else towards another node, else its only one. Raises NodeError without one."""
    interfaces: Mapping[str, str] = facts["interfaces"]
    others = [address for name, address in interfaces.items() if name != "lo"]
    if interface:
        chosen = interfaces.get(interface, "")
    elif not others:
        raise NodeError("has no IPv4 address, and Ray connects nodes over IPv4 here; give its interface one")
    else:
        known = [*of_name, facts["login_address"], facts["source_address"], *(others if len(others) == 1 else [])]
        # Not loopback, as of a node that is named localhost: there Ray takes the host's other address by itself.
        chosen = next((address for address in known if address in others), "")
    if not chosen:
        found = ", ".join(f"{name} {address}" for name, address in interfaces.items()) or "none"
        raise NodeError(
            f"has no address that the others could use (interfaces: {found}); "
            "name one with network.interface in the site or inventory"
        )
    return chosen


def resolved(host: Host) -> list[str]:
    """IPv4 addresses of the host's name as seen from here; the node may or may not have one of them."""
    if host.is_local:
        return []
    with contextlib.suppress(socket.gaierror):
        found = socket.getaddrinfo(address_of(host), None, socket.AF_INET, socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return []
