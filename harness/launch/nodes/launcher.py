"""The launcher for a cluster that `burst cluster up` started: `burst run --nodes`.

One supervisor actor per host, in a STRICT_SPREAD placement group; each starts its ranks as `launch.supervisor` does on
one machine. Their observations are merged and judged here.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.inventory.nodes import Node
from cluster.ray_cluster.quarantine import Quarantine
from cluster.ray_cluster.state import ClusterState, StartedNode, StateDirectory
from cluster.transport.runner import Unreachable
from engine.measurement import write_json
from harness.launch.launcher import Job, Launcher, Outcome
from harness.launch.nodes.actor import receive_files
from harness.launch.nodes.folder import HostFolder
from harness.launch.nodes.hosts import HostEnvironments, HostPool, TooFewHosts
from harness.launch.nodes.team import HostLost, Member, Team
from harness.launch.nodes.watch import JobWatch, lost_sentence, merged, split
from harness.launch.ray.guest import ClusterLost, RayGuest
from harness.launch.verdict import judge
from harness.machine.this_machine import Machine
from harness.records.provenance import portable_command, redact
from harness.records.record import Status

ENVIRONMENTS = "environment"  # folder in a trial's directory: one file per host, secrets redacted
_PROBE_FILE = ".shared"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterMeans:
    """How a cluster's launcher checks its nodes, and reads their environments."""

    machine: Machine  # all nodes together
    unfit: Callable[[Sequence[Node]], dict[str, str]]
    environments: HostEnvironments


class ClusterLauncher:
    """`--launcher ray` with `--nodes`."""

    name = "ray"

    def __init__(self, states: StateDirectory, state: ClusterState, nodes: Sequence[Node], means: ClusterMeans) -> None:
        """`nodes` are those of the cluster that this run may use."""
        self._states = states
        self._state = state
        self._started = {node.name: node for node in state.nodes}
        self._nodes = nodes
        self._means = means
        self._pool = HostPool(self._nodes, Quarantine(states.path), means.unfit)
        self._guest: RayGuest | None = None
        self._team: Team | None = None
        self._broken = ""  # why the cluster as a whole is lost
        self._lock = threading.RLock()  # lanes run jobs at the same time
        self.stuck = False  # after `close`: Ray cannot be left in order, see `RayGuest.stuck`

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        return self.run_on(self._pool, self._means.machine, job, on_progress)

    def lanes(self, number: int) -> list[tuple[Machine, Launcher]]:
        """Equal numbers of consecutive hosts for trials that run at the same time, with a launcher each.

        For the main thread: the lanes are then used by others. At most as many as there are hosts.
        """
        size = len(self._nodes) // number
        with contextlib.suppress(ClusterLost):  # each trial says so
            self._joined()
        lanes: list[tuple[Machine, Launcher]] = []
        for first in range(0, size * number, size):
            pool = self._pool.part(self._nodes[first : first + size])
            machine = replace(self._means.machine, nodes=size)
            lanes.append((machine, ClusterLane(self, pool, machine)))
        return lanes

    def run_on(
        self,
        pool: HostPool,
        machine: Machine,
        job: Job,
        on_progress: Callable[[dict[str, object]], None] | None = None,
    ) -> Outcome:
        """Run a job on hosts of the pool, which are those of `machine`."""
        started = time.monotonic()

        def outcome(status: Status, reason: str, hosts: Sequence[str] = (), lost: Iterable[str] = ()) -> Outcome:
            seconds = time.monotonic() - started
            return Outcome(status=status, reason=reason, wall_seconds=seconds, hosts=list(hosts), lost=tuple(lost))

        hosts: list[str] = []
        try:
            team = self._joined()
            count = machine.nodes_for(job.ranks)
            assert count is not None, job  # the plan refuses such trials
            chosen = pool.take(count, job.avoid)
            hosts = [node.name for node in chosen]
            members = team.members(hosts)
            run = _Run(job, members, self._started, self._means.environments, on_progress)
            status, reason = run.execute(chosen, self._state)
            self._take_losses(run.lost)
            if self._state.head.name in run.lost:
                reason += "; the cluster ended with it, so first: burst cluster down --forget"
            return outcome(status, reason, hosts, run.lost)
        except TooFewHosts as error:
            again = f", then {job.again}: a host that passes its check is used again" if job.again else ""
            return outcome("node_lost", f"{error}{again}")
        except HostLost as error:
            self._take_losses({error.host: error.why})
            lost = {error.host: error.why}
            return outcome("node_lost", lost_sentence(lost, {}, [], job.again), hosts, lost)
        except ClusterLost as error:
            self._broken = str(error)
            again = f", and {job.again}" if job.again else ""
            return outcome("node_lost", f"{error}; burst cluster down, then up{again}", hosts)

    def close(self) -> None:
        """End the ranks on all hosts and leave the cluster, which stays up. Idempotent."""
        if self._team is not None:
            self._team.close()
            self._team = None
        if self._guest is not None:
            self._guest.close(head_lost=bool(self._broken))
            self.stuck |= self._guest.stuck
            self._guest = None

    def _joined(self) -> Team:
        with self._lock:
            if self._broken:
                raise ClusterLost(self._broken)
            if self._team is None:
                self._guest = RayGuest(self._state, self._states)
                self._team = Team(self._guest.ray)
                addresses = {node.name: self._started[node.name].address for node in self._nodes}
                for name, why in self._team.gather(addresses).items():
                    self._pool.without(name, why)
            return self._team

    def _take_losses(self, lost: Mapping[str, str]) -> None:
        head = self._state.head.name
        with self._lock:
            for name, why in lost.items():
                self._pool.lose(name, why)
                if self._team is not None and head not in lost:
                    self._team.drop(name)
            if head in lost:
                self._broken = f"the cluster's head {head} was lost ({lost[head]})"
                # Every call to Ray would now wait for the head; its nodes end their ranks by themselves.
                self._team = None
                self.close()


class ClusterLane:
    """A part of a cluster's hosts as a launcher of its own; the cluster's launcher ends what it started."""

    name = ClusterLauncher.name

    def __init__(self, launcher: ClusterLauncher, pool: HostPool, machine: Machine) -> None:
        self._launcher, self._pool, self._machine = launcher, pool, machine

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        return self._launcher.run_on(self._pool, self._machine, job, on_progress)

    def close(self) -> None:
        """Nothing: see the class."""


class _Run:
    """One job on its hosts."""

    def __init__(
        self,
        job: Job,
        members: Sequence[Member],
        started: Mapping[str, StartedNode],
        environments: HostEnvironments,
        on_progress: Callable[[dict[str, object]], None] | None,
    ) -> None:
        self._job = job
        self._members = members
        self._started = started
        self._environments = environments
        self._on_progress = on_progress
        self.lost: dict[str, str] = {}  # hosts that were lost, and why
        self._own: dict[str, str] = {}  # trial directory on hosts that do not share this one's storage
        self._folders: list[HostFolder] = []  # of the job's exchange, on those hosts

    def execute(self, nodes: Sequence[Node], state: ClusterState) -> tuple[Status, str]:
        """Run the job to its end; returns status and reason. Raises HostLost when a host was lost before it began."""
        self._stage()
        first = self._members[0]
        port = int(first.call("reserve"))
        try:
            parts = split(self._job, hosts=len(nodes), address=self._started[first.name].address, port=port)
            placed = [self._placed(part, node) for part, node in zip(parts, nodes, strict=True)]
            head = (state.head.name, state.head.address, state.head_port)
            watch = JobWatch(list(zip(self._members, placed, strict=True)), head, self._progressed)
            try:
                watch.run()
            finally:  # also at Ctrl-C, which goes on when the ranks have ended
                self.lost = dict(watch.lost)
                self._fetch()
        finally:
            if not self.lost:  # the port goes with the host, or at the next job
                with contextlib.suppress(HostLost):
                    first.call("release")
        if watch.lost:
            others = [member.name for member in self._members if member.name not in watch.lost]
            return "node_lost", lost_sentence(watch.lost, watch.last_progress, others, self._job.again)
        return judge(self._job, merged(watch.seen))

    def _stage(self) -> None:
        """Give hosts that do not see the trial's directory one of their own."""
        trial_dir, exchange = self._job.trial_dir, self._job.exchange
        (trial_dir / "logs").mkdir(parents=True, exist_ok=True)
        probe = trial_dir / _PROBE_FILE
        content = secrets.token_hex(8)
        probe.write_text(content, encoding="utf-8")
        try:
            apart = [member for member in self._members if not member.call("sees", str(probe.absolute()), content)]
        finally:
            probe.unlink()
        own = [(member, f"{self._started[member.name].directory}/trials/{self._job.trial_id}") for member in apart]
        if exchange is not None and apart:
            self._folders = [HostFolder(member, path, first=member is self._members[0]) for member, path in own]
            exchange.begin(self._folders, all_apart=len(apart) == len(self._members))
            own = [(member, f"{path}/{trial_dir.relative_to(exchange.root)}") for member, path in own]
        files = {path.name: path.read_bytes() for path in trial_dir.glob("*.json")}
        for member, path in own:
            member.call("stage", path, files)
            self._own[member.name] = path

    def _progressed(self, line: dict[str, object]) -> None:
        if self._job.exchange is not None and self._folders:
            self._job.exchange.progressed(line, self._folders)
        if self._on_progress is not None:
            self._on_progress(line)

    def _placed(self, part: Job, node: Node) -> Job:
        """The part as this host runs it: its paths, its interpreter, its environment."""
        started = self._started[node.name]
        here = str(part.trial_dir)
        there = self._own.get(node.name, here)
        names = {sys.executable: started.python, here: there}
        try:
            environment = self._environments.of(node, part, alone=len(self._members) == 1)
        except Unreachable as error:
            raise HostLost(node.name, str(error)) from error
        write_json(
            self._job.trial_dir / ENVIRONMENTS / f"{node.name}.json",
            {
                "host": node.name,
                "address": started.address,
                "ranks": list(part.own_ranks),
                "command": portable_command(part.command, part.trial_dir),
                "environment": redact(environment),
            },
        )
        return replace(
            part,
            exchange=None,
            trial_dir=Path(there),
            command=[names.get(word, word) for word in part.command],
            environment=environment,
        )

    def _fetch(self) -> None:
        """Fetch the ranks' files from hosts with a directory of their own."""
        for member in self._members:
            if member.name in self._own and member.name not in self.lost:
                with contextlib.suppress(HostLost):
                    receive_files(self._job.trial_dir, member.call("fetch", self._own[member.name]))
        left = [folder for folder in self._folders if folder.host not in self.lost]
        if self._job.exchange is not None and self._folders:
            self._job.exchange.end(left)
        for folder in left:
            with contextlib.suppress(HostLost):
                folder.remove()
