"""Facts of a node before anything is started on it: address, description, and versions, which must match."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.inventory.hosts import Host
from cluster.ray_cluster.node import NodeError, ask
from cluster.ray_cluster.state import StartedNode
from cluster.transport.reach import LocalRunner, address_of
from cluster.transport.runner import Runner

THIS_MACHINE = "this machine"  # its versions count too: it drives the cluster
HEAD_PORTS = ("head_port", "dashboard_port")  # of the site's; 0 becomes a free one


@dataclass(frozen=True, kw_only=True, slots=True)
class Introduction:
    """The answer of a node."""

    address: str  # empty where only the head's could tell which
    login_address: str  # at which it was reached just now; empty for an IPv6 one
    interface: str
    interfaces: dict[str, str]  # IPv4 address by name
    versions: dict[str, str]
    free_ports: tuple[int, ...]  # as many as HEAD_PORTS
    description: str  # JSON


def introduce(
    runner: Runner,
    python: Sequence[str],
    node: StartedNode,
    interface: str | None,
    toward: str,
    describe: Sequence[str],
    seconds: float,
) -> Introduction:
    """Ask one node. `interface` is the site's choice, `toward` the head's address, empty while there is no head.

    Raises NodeError for a node that could not take part, Unreachable when the connection breaks.
    """
    answer = ask(
        runner,
        python,
        "facts",
        seconds=seconds,
        candidates=_resolved(node.host),
        toward=toward,
        interface=interface,
        describe=list(describe),
        folder=node.folder,
        ports=len(HEAD_PORTS),
    )
    versions = _versions(answer)
    others = {name: address for name, address in answer["interfaces"].items() if name != "lo"}
    if not answer["address"] and not others and not node.host.is_local:
        raise NodeError("has no IPv4 address, and Ray connects nodes over IPv4 here; give its interface one")
    if not answer["address"] and (toward or interface):
        found = ", ".join(f"{name} {address}" for name, address in answer["interfaces"].items()) or "none"
        raise NodeError(
            f"has no address that the others could use (interfaces: {found}); "
            "name one with network.interface in the site or inventory"
        )
    return Introduction(
        address=answer["address"],
        login_address=answer["login_address"],
        interface=answer["interface"],
        interfaces=answer["interfaces"],
        versions=versions,
        free_ports=tuple(answer["free_ports"]),
        description=answer["description"],
    )


def own_versions(folder: Path, describe: Sequence[str], seconds: float) -> dict[str, str]:
    """Versions of this machine. Raises NodeError where it could not drive a cluster."""
    try:
        answer = ask(
            LocalRunner(),
            [sys.executable],
            "facts",
            seconds=seconds,
            candidates=[],
            toward="",
            interface=None,
            describe=list(describe),
            folder=str(folder),
            ports=0,
        )
        return _versions(answer)
    except NodeError as error:
        raise NodeError(f"{THIS_MACHINE}: {error}") from error


def _versions(answer: dict[str, Any]) -> dict[str, str]:
    if lacks := absent(answer["versions"]):
        raise NodeError(f"lacks {', '.join(lacks)}; install the project there, or correct software.python")
    if problem := answer["description_problem"]:
        raise NodeError(f"cannot run this project ({problem}); correct software.folder or install it there")
    described: dict[str, Any] = json.loads(answer["description"])
    return {**answer["versions"], **described.get("versions", {})}


def _resolved(host: Host) -> list[str]:
    """IPv4 addresses of the host's name as seen from here; the node may or may not have one of them."""
    if host.is_local:
        return []
    with contextlib.suppress(socket.gaierror):
        found = socket.getaddrinfo(address_of(host), None, socket.AF_INET, socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return []


def difference(own: Mapping[str, str], found: Mapping[str, str]) -> str:
    """How a node's versions differ from this machine's, which drives the cluster; empty when they are equal."""
    parts = [
        f"{what} is {found.get(what, 'not known')} there but {own.get(what, 'not known')} on {THIS_MACHINE}"
        for what in dict.fromkeys((*own, *found))
        if own.get(what) != found.get(what)
    ]
    return f"{', '.join(parts)}; install the same there, or correct software in its site" if parts else ""


def mismatch(versions: Mapping[str, Mapping[str, str]]) -> str:
    """One sentence naming the versions that differ and their nodes, empty when all agree.

    `versions` is by node and then by package: python, ray, torch, code. The value most nodes have is taken for the
    right one; on a tie the first node's. Ray itself refuses another Python patch version late.
    """
    parts = []
    for what in dict.fromkeys(what for found in versions.values() for what in found):
        by_node = {node: found.get(what, "not known") for node, found in versions.items()}
        [(usual, count)] = Counter(by_node.values()).most_common(1)
        if count < len(by_node):
            others = ", ".join(f"{value} on {node}" for node, value in by_node.items() if value != usual)
            parts.append(f"{what} is {usual} on {count} of {len(by_node)} nodes but {others}")
    return "; ".join(parts) + "; install the same everywhere, or leave those nodes out" if parts else ""


def absent(versions: Mapping[str, str]) -> list[str]:
    """The packages that a node lacks."""
    return [what for what, version in versions.items() if version == "not installed"]
