"""The launcher for several hosts: it reserves the hosts of a Ray cluster, with a supervisor on each, and places jobs.

Before each job its hosts are looked at again: one that is lost, busy or short of GPUs is left out of that job, and one
that came back, or joined, is used as any other.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cluster.files.errors import counted
from cluster.inventory.checkout import difference, own_versions
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import Site
from harness.base.errors import UsageError
from harness.base.interrupts import look
from harness.launch.environment import RECORDED_PREFIXES
from harness.launch.launcher import Job, Outcome
from harness.launch.ray.connection import ClusterLost, RayConnection, RayMember
from harness.launch.ray.host import LAUNCHERS_OWN, Description, HostActor
from harness.launch.ray.job import HostsJob, ReservedHost
from harness.launch.ray.watch import (
    ENDING_SECONDS,
    HostLost,
    lost_sentence,
)
from harness.machine.this_machine import Machine, ranks_of, together
from harness.records.record import Status

PLACEMENT_SECONDS = 60.0
ATTEMPTS = 3  # to place a job whose hosts turn out to be lost before its ranks start
_CONCURRENCY = 7  # watch, and beside it progress, cancel, fetch, files, release, close
Say = Callable[[str], None]


class TooFewHosts(Exception):
    """A job that cannot be placed now; one sentence gives the reason for each host that was not taken."""


def choose(
    hosts: Sequence[ReservedHost],
    count: int,
    avoid: Sequence[str],
    unfit: Callable[[ReservedHost], str],
    out: Mapping[str, str],
) -> list[ReservedHost]:
    """The first `count` hosts for which `unfit` gives no reason, those to `avoid` last, in the order of `hosts`.

    `out` are hosts that are out already, with reasons. Raises TooFewHosts.
    """
    reasons = dict(out)
    taken: list[str] = []
    for host in sorted(hosts, key=lambda host: host.name in avoid):
        if len(taken) == count:
            break
        if why := unfit(host):
            reasons[host.name] = why
        else:
            taken.append(host.name)
    if len(taken) < count:
        said = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        raise TooFewHosts(
            f"{counted(count, 'host')} {'is' if count == 1 else 'are'} needed but {len(taken)} can be used now"
            + (f" ({said})" if said else "")
        )
    return [host for host in hosts if host.name in taken]


class RayLauncher:
    """`--ray`, and `--nodes` with the cluster of an inventory."""

    name = "ray"

    def __init__(self, connection: RayConnection, say: Say, nodes: Mapping[str, InventoryNode] | None = None) -> None:
        """`nodes` are those to use, by address, with their sites; None: all of the cluster. Reserves them until
        `close`. Raises UsageError when none can be used."""
        self._connection = connection
        self._say = say
        self._nodes = nodes
        self._hosts: dict[str, ReservedHost] = {}  # by name
        self._out: dict[str, str] = {}  # by name: why a host of the cluster is not used, at the last look
        self._broken = ""  # why the cluster as a whole is lost
        self._own = own_versions()
        self.stuck = False  # after `close`: Ray cannot be left in order, see `RayConnection.stuck`
        self._user = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(RECORDED_PREFIXES) and name not in LAUNCHERS_OWN
        }
        self._gather()
        for name, why in self._out.items():
            say(f"left out: {name}: {why}")
        if not self._hosts:
            raise UsageError(
                f"no host of the Ray cluster at {connection.named} can be used"
                + "".join(f"; {name}: {why}" for name, why in self._out.items())
            )
        hosts = list(self._hosts.values())
        self.machine = together([host.machine for host in hosts], min(host.ranks for host in hosts))

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        started = time.monotonic()

        def outcome(status: Status, reason: str, hosts: Sequence[str] = (), lost: Iterable[str] = ()) -> Outcome:
            seconds = time.monotonic() - started
            return Outcome(status=status, reason=reason, wall_seconds=seconds, hosts=list(hosts), lost=tuple(lost))

        names: list[str] = []
        count = self.machine.nodes_for(job.ranks)
        assert count is not None, job  # the plan refuses such trials
        try:
            for attempt in range(ATTEMPTS):
                hosts = self._take(count, job.avoid)
                names = [host.name for host in hosts]
                run = HostsJob(job, hosts, self._connection, self._user, on_progress)
                try:
                    status, reason = run.execute()
                    break
                except HostLost as error:
                    self._lose({error.host: error.why})
                    if run.begun or attempt + 1 == ATTEMPTS:  # else it was lost while it was idle: no job's fault
                        lost = {error.host: error.why}
                        return outcome("node_lost", lost_sentence(lost, {}, [], job.again), names, lost)
            self._lose(run.lost)
            if run.head_lost:
                self._break()
                reason = f"{self._broken}{reason}{self._next(job)}"
            return outcome(status, reason, names, {*run.lost, *self._lost_with_cluster()})
        except (TooFewHosts, ClusterLost) as error:
            return outcome("node_lost", f"{error}{self._next(job)}", names, self._lost_with_cluster())

    def _lost_with_cluster(self) -> list[str]:
        """The host of the head, where the cluster is lost and the inventory names it: the run goes on without it."""
        head = (self._nodes or {}).get(self._connection.head[0])
        return [head.name] if self._broken and head else []

    def _next(self, job: Job) -> str:
        if self._broken and self._nodes is not None:
            return f"; {job.again} goes on with the hosts that answer" if job.again else ""
        if self._broken:
            return f"; start it again, then repeat the command with {job.again}" if job.again else "; start it again"
        return f"; {job.again} tries again" if job.again else ""

    def close(self) -> None:
        """End the ranks on all hosts and leave the cluster, which stays up. Idempotent."""
        if not self._broken:
            endings = [(host.member, host.member.begin("close")) for host in self._hosts.values()]
            ends_at = time.monotonic() + ENDING_SECONDS
            for member, ending in endings:
                with contextlib.suppress(HostLost):
                    member.result(ending, max(0.1, ends_at - time.monotonic()))
            for host in list(self._hosts.values()):
                self._drop(host)
        self._hosts.clear()
        self._connection.close(head_lost=bool(self._broken))
        self.stuck |= self._connection.stuck

    def _require_head(self) -> None:
        if not self._broken and not self._connection.answers():
            self._break()

    def _break(self) -> None:
        """The cluster is lost: every call to Ray would wait for its head. Its hosts end their ranks by themselves."""
        if not self._broken:
            self._broken = f"the head of the Ray cluster at {self._connection.named} does not answer"
            for name in self._lost_with_cluster():  # by which the user knows it
                self._broken = f"{name} was lost ({self._broken})"
            self.close()

    def _lose(self, lost: Mapping[str, str]) -> None:
        if lost:
            self._require_head()
        for name in lost:
            if (host := self._hosts.get(name)) is not None:
                self._drop(host)

    def _drop(self, host: ReservedHost) -> None:
        """Forget a host; Ray ends its supervisor if that still runs."""
        from ray.util.placement_group import remove_placement_group

        self._hosts.pop(host.name, None)
        host.member.end()
        with contextlib.suppress(self._connection.ray.exceptions.RayError):
            remove_placement_group(host.group)

    def _take(self, count: int, avoid: Sequence[str]) -> list[ReservedHost]:
        """The first `count` hosts that can be used now, those to `avoid` last. Raises TooFewHosts and ClusterLost."""
        self._require_head()
        if self._broken:
            raise ClusterLost(self._broken)
        self._gather()
        return choose(list(self._hosts.values()), count, avoid, self._unfit, self._out)

    def _unfit(self, host: ReservedHost) -> str:
        """Why a host cannot be used now; empty when it can. One that does not answer is lost."""
        try:
            return host.unfit(time.monotonic())
        except HostLost as loss:
            self._lose({host.name: loss.why})
            return loss.why

    def _gather(self) -> None:
        """Reserve the hosts of the cluster that are there and not reserved yet, and forget those that are gone.

        Each is in a placement group of its own, which only that host can hold: one that does not answer delays the
        others until Ray gives it up or PLACEMENT_SECONDS have passed, and costs them nothing else.
        """
        found = self._found()
        present = {node["NodeID"] for _, node in found}
        for host in [host for host in self._hosts.values() if host.node_id not in present]:
            self._drop(host)
        known = {host.node_id for host in self._hosts.values()}
        self._out = {
            node.name: "is no node of the Ray cluster now"
            for address, node in (self._nodes or {}).items()
            if address not in {node["NodeManagerAddress"] for _, node in found}
        }
        new = {node["NodeID"]: (name, node) for name, node in found if node["NodeID"] not in known}
        placed = {key: self._place(name, node) for key, (name, node) in new.items()}
        waiting = {actor.describe.remote(): key for key, (actor, _) in placed.items()}
        give_up = time.monotonic() + PLACEMENT_SECONDS
        while waiting and time.monotonic() < give_up:
            look()
            done, _ = self._connection.ray.wait(list(waiting), timeout=0.5)
            for reference in done:
                key = waiting.pop(reference)
                self._met(*new[key], *placed[key], reference)
        for key in waiting.values():
            name, _ = new[key]
            self._abandon(*placed[key], name, "another program of the cluster has reserved its CPUs or GPUs")
        if self._nodes is not None:  # the inventory's order
            order = {node.name: place for place, node in enumerate(self._nodes.values())}
            self._hosts = dict(sorted(self._hosts.items(), key=lambda item: order[item[0]]))

    def _found(self) -> list[tuple[str, dict[str, Any]]]:
        """The cluster's nodes that may be used, with the host's name each."""
        nodes = [node for node in self._connection.nodes() if node["Resources"].get("CPU", 0) >= 1]
        if self._nodes is not None:
            return [
                (self._nodes[node["NodeManagerAddress"]].name, node)
                for node in nodes
                if node["NodeManagerAddress"] in self._nodes
            ]
        counts = Counter(node["NodeManagerHostname"] for node in nodes)
        return [
            (
                node["NodeManagerHostname"] if counts[node["NodeManagerHostname"]] == 1 else node["NodeManagerAddress"],
                node,
            )
            for node in nodes
        ]

    def _place(self, name: str, node: Mapping[str, Any]) -> tuple[Any, Any]:
        """A supervisor in a placement group with all CPUs and GPUs that Ray has of the host; returns both."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        address, resources = node["NodeManagerAddress"], node["Resources"]
        cpus, gpus = int(resources["CPU"]), int(resources.get("GPU", 0))
        bundle = {"CPU": cpus, f"node:{address}": 0.001} | ({"GPU": gpus} if gpus else {})
        group = placement_group([bundle], strategy="STRICT_PACK")
        actor = (
            self._connection.ray.remote(HostActor)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_concurrency=_CONCURRENCY,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
            .remote(name, self._site(address), own_gpus=gpus > 0)
        )
        return actor, group

    def _site(self, address: str) -> Site:
        return self._nodes[address].site if self._nodes is not None else Site()

    def _met(self, name: str, node: Mapping[str, Any], actor: Any, group: Any, reference: Any) -> None:
        """Keep a host that has described itself, unless it differs too much."""
        member = RayMember(name=name, actor=actor, ray=self._connection.ray)
        address = node["NodeManagerAddress"]
        try:
            described: Description = member.result(reference)
        except HostLost as loss:
            return self._abandon(actor, group, name, loss.why)
        except self._connection.ray.exceptions.RayTaskError as error:
            return self._abandon(actor, group, name, f"it cannot run this project ({error.cause}); install it there")
        if differs := difference(self._own, described.versions):
            return self._abandon(actor, group, name, f"{differs}; install the same there")
        machine = Machine(**described.machine)
        try:
            site = self._site(address)
            if site.ranks_per_node or machine.gpu_count or machine.gpu_problem:
                ranks = ranks_of(machine, site)
            else:
                ranks = int(node["Resources"]["CPU"])
        except ValueError as error:
            return self._abandon(actor, group, name, str(error))
        self._out.pop(name, None)
        self._hosts[name] = ReservedHost(
            name=name,
            address=address,
            node_id=node["NodeID"],
            ranks=ranks,
            machine=machine,
            described=described,
            member=member,
            group=group,
        )
        return None

    def _abandon(self, actor: Any, group: Any, name: str, why: str) -> None:
        from ray.util.placement_group import remove_placement_group

        self._out[name] = why
        with contextlib.suppress(self._connection.ray.exceptions.RayError):
            self._connection.ray.kill(actor)
        with contextlib.suppress(self._connection.ray.exceptions.RayError):
            remove_placement_group(group)
