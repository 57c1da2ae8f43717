"""The environments of many nodes: every node asked at once, and what differs between them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.discovery.drift import drift
from cluster.discovery.read import read_node
from cluster.environment.install import Installed, install
from cluster.environment.processes import DEFAULT_METHOD
from cluster.environment.rendering import NodeEnvironment, render_node
from cluster.files.errors import UsageError
from cluster.inventory.nodes import Node
from cluster.transport.fleet import on_each
from cluster.transport.runner import Connect, Unreachable


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is asked for, the same on all nodes."""

    head: str | None = None  # IPv4 address of the head node; None: this machine alone
    method: str = DEFAULT_METHOD
    ranks: int | None = None  # per node; None: the site's number, else one per GPU
    logs: str | None = None  # folder on the nodes for NCCL's and the flight recorder's files
    install: str | None = None  # path on the nodes to write env.sh to; None: nothing is written


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What came of it, in the order of the nodes."""

    environments: tuple[NodeEnvironment, ...]
    installed: dict[str, Installed]  # by node
    silent: dict[str, str]  # nodes that could not be asked, or written to, and why

    @property
    def drift(self) -> list[str]:
        """Differences between the nodes that answered."""
        return drift([environment.network for environment in self.environments])


def survey(nodes: Sequence[Node], connect: Connect, wish: Wish, seconds: float) -> Survey:
    """Ask every node, within `seconds` each, and write to it when that is wished."""

    def work(node: Node) -> tuple[NodeEnvironment, Installed | Unreachable | None]:
        with connect(node.host, seconds) as runner:
            facts = read_node(node.name, runner, node.site, head=wish.head, deadline_seconds=seconds)
            rendered = render_node(facts, node.site, method=wish.method, ranks=wish.ranks, logs=wish.logs)
            if wish.install is None:
                return rendered, None
            try:
                return rendered, install(runner, rendered, wish.install, deadline_seconds=seconds)
            except Unreachable as error:
                return rendered, error

    answers = {node.name: answer for node, answer in on_each(nodes, work, seconds)}
    environments, installed, silent = [], {}, {}
    for node in nodes:
        answer = answers[node.name]
        if isinstance(answer, Unreachable):
            silent[node.name] = str(answer)
            continue
        environments.append(answer[0])
        if isinstance(answer[1], Unreachable):
            silent[node.name] = str(answer[1])
        elif answer[1] is not None:
            installed[node.name] = answer[1]
    return Survey(environments=tuple(environments), installed=installed, silent=silent)


def head_address(named: str | None, nodes: Sequence[Node]) -> str | None:
    """IPv4 address of the head: `named`, else the first node's; None on this machine alone. Raises UsageError."""
    name = named if named is not None else nodes[0].host.address
    if not name:
        return None
    try:
        found = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
        return str(ipaddress.IPv4Address(found[0][4][0]))
    except (OSError, ValueError):
        raise UsageError(
            f"the head {name} has no IPv4 address known here; give --head the address the other nodes reach it at"
        ) from None
