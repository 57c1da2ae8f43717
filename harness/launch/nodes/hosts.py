"""The hosts of a job, healthy and free, checked just before; and the environment of the ranks on each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from cluster.discovery.facts import NodeFacts
from cluster.discovery.read import read_node
from cluster.environment.rendering import render_node
from cluster.environment.value import overlaid
from cluster.files.errors import counted
from cluster.inventory.nodes import Node
from cluster.ray_cluster.quarantine import Quarantine
from cluster.transport.runner import Connect
from harness.launch.environment import RECORDED_PREFIXES
from harness.launch.launcher import Job

FRESH_SECONDS = 30.0  # a node found healthy, or unfit, so recently is not checked again
# Interfaces and routes: the trial's values were rendered on one machine, so those of each host replace them.
_ROUTES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_")
# The GPUs visible in the launching shell are not those of another host.
_LAUNCHERS_OWN = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


class TooFewHosts(Exception):
    """A job that cannot be placed now; one sentence gives the reason for each host that was not taken."""


class HostPool:
    """The hosts of one run, in the order ranks are placed on them."""

    def __init__(
        self,
        nodes: Sequence[Node],
        quarantine: Quarantine,
        unfit: Callable[[Sequence[Node]], dict[str, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`unfit` checks nodes and says, by name, why some must not be used."""
        self._nodes = tuple(nodes)
        self._quarantine = quarantine
        self._unfit = unfit
        self._clock = clock
        self._healthy_at: dict[str, float] = {}
        self._unfit_at: dict[str, float] = {}
        self._gone: dict[str, str] = {}  # by name: why it is out for the rest of the run

    def part(self, nodes: Sequence[Node]) -> HostPool:
        """A pool of some of its hosts, which shares what is known of them."""
        pool = HostPool(nodes, self._quarantine, self._unfit, self._clock)
        pool._healthy_at, pool._unfit_at, pool._gone = self._healthy_at, self._unfit_at, self._gone
        return pool

    def take(self, count: int, avoid: Sequence[str] = ()) -> list[Node]:
        """The first `count` hosts that are healthy now, those to `avoid` last. Raises TooFewHosts.

        Hosts in quarantine are taken only where the others are too few, and after a check that lets them in again.
        """
        while True:
            quarantined = self._quarantine.entries()
            here = [node for node in self._nodes if node.name not in self._gone]
            usable = [node for node in here if node.name not in quarantined]
            taken = {node.name for node in sorted(usable, key=lambda node: node.name in avoid)[:count]}
            chosen = [node for node in usable if node.name in taken]
            if len(chosen) < count:
                again = [
                    node
                    for node in here
                    if node.name in quarantined and self._since(self._unfit_at, node) >= FRESH_SECONDS
                ]
                if not again:
                    raise TooFewHosts(self._too_few(count, {name: entry.reason for name, entry in quarantined.items()}))
                self._check(again)
                continue
            stale = [node for node in chosen if self._since(self._healthy_at, node) >= FRESH_SECONDS]
            if not stale or not self._check(stale):
                return chosen

    def _check(self, nodes: Sequence[Node]) -> dict[str, str]:
        """Check these hosts: unfit ones go into quarantine, the others leave it. Returns the reason for each unfit."""
        problems = self._unfit(nodes)
        for node in nodes:
            if node.name in problems:
                self._quarantine.add(node.name, problems[node.name])
                self._unfit_at[node.name] = self._clock()
            else:
                self._quarantine.release(node.name)
                self._healthy_at[node.name] = self._clock()
        return problems

    def lose(self, name: str, reason: str) -> None:
        """A host that was lost during a job: out for this run, and in quarantine for others."""
        self._gone[name] = reason
        self._quarantine.add(name, reason)

    def without(self, name: str, reason: str) -> None:
        """A host that this run cannot use although it is healthy."""
        self._gone[name] = reason

    def _since(self, times: Mapping[str, float], node: Node) -> float:
        """Seconds since the host's time there; without one, for ever."""
        return self._clock() - times.get(node.name, float("-inf"))

    def _too_few(self, count: int, quarantined: dict[str, str]) -> str:
        out = {node.name: self._gone.get(node.name) or quarantined.get(node.name) for node in self._nodes}
        reasons = "; ".join(f"{name}: {reason}" for name, reason in out.items() if reason)
        left = sum(reason is None for reason in out.values())
        needed = f"{counted(count, 'host')} {'is' if count == 1 else 'are'} needed"
        return f"{needed} but {left} of {len(self._nodes)} can be used ({reasons}); repair them"


class HostEnvironments:
    """Environments of the ranks by host, as `burst env` renders them there, with the trial's own values over them.

    Each host's network is read once."""

    def __init__(self, connect: Connect, head: str, user: Mapping[str, str], seconds: float = 60.0) -> None:
        """`head` is the head's address, towards which routes count; `user` the environment `burst` was started with."""
        self._connect = connect
        self._head = head
        self._user = {
            name: value
            for name, value in user.items()
            if name.startswith(RECORDED_PREFIXES) and name not in _LAUNCHERS_OWN
        }
        self._seconds = seconds
        self._facts: dict[str, NodeFacts] = {}

    def of(self, node: Node, part: Job, *, alone: bool) -> dict[str, str]:
        """The environment of a part of a job; `alone` when no other host takes part. Raises Unreachable."""
        if node.name not in self._facts:
            with self._connect(node.host, self._seconds) as runner:
                self._facts[node.name] = read_node(
                    node.name, runner, node.site, head=self._head, deadline_seconds=self._seconds
                )
        rendered = render_node(self._facts[node.name], node.site, ranks=len(part.own_ranks))
        values = overlaid(rendered.values, self._user, by="set in the shell burst was started from", origin="user")
        of_host = {value.name: value.value for value in values if not (alone and value.name.startswith(_ROUTES))}
        decided = {
            value.name
            for value in values
            if value.name in of_host and (value.origin in ("site", "user") or value.name.startswith(_ROUTES))
        }
        of_trial = {
            name: value
            for name, value in part.environment.items()
            if name not in decided and name not in _LAUNCHERS_OWN
        }
        return {**of_host, **of_trial}
