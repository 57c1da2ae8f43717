"""What the ranks on each host of a cluster get: as `burst env` renders it there, the trial's own values over it."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.discovery.facts import NodeFacts
from cluster.discovery.read import read_node
from cluster.environment.rendering import render_node
from cluster.environment.value import overlaid
from cluster.inventory.nodes import Node
from cluster.transport.runner import Connect
from harness.launch import Job
from harness.launch.environment import RECORDED_PREFIXES

# Which way traffic goes: the trial's rendering knows one machine, so each host's own word counts.
_ROUTES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_")
# GPUs that the launching shell sees say nothing about another host's.
_LAUNCHERS_OWN = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


class HostEnvironments:
    """Environments of the hosts; each host is asked about its network once."""

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
