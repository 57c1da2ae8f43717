"""The nodes a cluster would have, found without starting anything: healthy ones, with the same software."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster import checks
from cluster.files.errors import UsageError
from cluster.health.nodes import check_nodes
from cluster.inventory.nodes import Inventory, Node
from cluster.ray_cluster.container import uses_container
from cluster.ray_cluster.introduction import (
    THIS_MACHINE,
    Introduction,
    difference,
    introduce,
    mismatch,
    own_versions,
)
from cluster.ray_cluster.node import NodeError, on_all
from cluster.ray_cluster.quarantine import Quarantine
from cluster.ray_cluster.ray_commands import MAX_DIRECTORY_CHARACTERS
from cluster.ray_cluster.state import StartedNode
from cluster.render.text import why_not
from cluster.transport.runner import Connect


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A node that `up` would start."""

    name: str
    ranks: int  # of one trial that fit there
    description: str  # JSON: output of the describing program


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """The caller's part: how nodes are reached, checked and described, and how many ranks fit on one."""

    connect: Connect
    unfit: Callable[[Sequence[Node]], dict[str, str]]  # reasons by node name
    # Arguments for the node's Python, run in its checkout: prints one JSON object, of which `versions` (text by name)
    # must be equal on all nodes. Everything it prints is kept in the state.
    describe: Sequence[str]
    ranks: Callable[[Node, dict[str, Any]], int]  # that fit on a node, by its description; raises ValueError
    folder: Path  # our own checkout: where a site names none, the nodes have it at the same path
    say: Callable[[str], None]
    known_hosts: Path | None = None
    seconds: float = 60.0  # for one answer of one node
    # Why a cluster of these nodes is not worth starting; None when it is. Asked before the first process is started.
    pointless: Callable[[Sequence[Candidate]], str | None] = lambda candidates: None


def candidates(inventory: Inventory, means: Means) -> list[Candidate]:
    """The nodes that `start_cluster` would start now, found in the same way; one sentence is printed for each other.

    Raises UsageError where it would refuse, and for nodes whose software is in a container that must run first.
    """
    nodes = healthy(inventory, means)
    if inside := next((node.name for node in nodes if uses_container(node.site)), None):
        raise UsageError(
            f"{inside} runs everything in a container, which cannot be read before it runs; "
            "start it with burst cluster up"
        )

    def introduced(node: Node, toward: str) -> Introduction:
        unstarted = intended(node, "", 0, means)
        interface = node.site.network.interface
        with means.connect(node.host, means.seconds) as runner:
            return introduce(runner, [unstarted.python], unstarted, interface, toward, means.describe, means.seconds)

    met, left_out = meet(nodes, introduced, means)
    for name, why in left_out.items():
        means.say(f"left out: {name}: {why}")
    return as_candidates(nodes, met, means)


def as_candidates(nodes: Sequence[Node], met: Mapping[str, Introduction], means: Means) -> list[Candidate]:
    """The nodes that were met, in the inventory's order."""
    return [
        Candidate(
            name=node.name,
            ranks=means.ranks(node, json.loads(met[node.name].description)),
            description=met[node.name].description,
        )
        for node in nodes
        if node.name in met
    ]


def healthy(inventory: Inventory, means: Means) -> list[Node]:
    """Its usable nodes; one sentence is printed for each other one. Raises UsageError for none."""
    unfit = means.unfit(inventory.nodes)
    for sentence in (unfit[node.name] for node in inventory.nodes if node.name in unfit):
        means.say(f"left out: {sentence}")
    nodes = [node for node in inventory.nodes if node.name not in unfit]
    if not nodes:
        raise UsageError(f"none of the {len(inventory.nodes)} nodes is usable; see burst check for each one's findings")
    return nodes


def meet(
    nodes: Sequence[Node], introduced: Callable[[Node, str], Introduction], means: Means
) -> tuple[dict[str, Introduction], dict[str, str]]:
    """Introductions of the nodes that can form a cluster, each with an address, in order; the first is its head. And
    the reason for each other node, which costs the others nothing: all are asked at once.

    `introduced` asks one node, with the head's address where that is needed to find the node's own. Raises UsageError
    when no node, or this machine, can take part.
    """
    try:
        own = own_versions(means.folder, means.describe, means.seconds)
    except NodeError as error:
        raise UsageError(str(error)) from error
    answers: dict[str, Introduction | str] = dict(
        zip([node.name for node in nodes], on_all(nodes, lambda node: introduced(node, "")), strict=True)
    )
    left_out = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    met = {name: answer for name, answer in answers.items() if not isinstance(answer, str)}
    if met and all(difference(own, answer.versions) for answer in met.values()):
        raise UsageError(mismatch({THIS_MACHINE: own} | {name: answer.versions for name, answer in met.items()}))
    for node in nodes:
        if node.name in met and (why := _unsuited(node, met[node.name], own, means)):
            left_out[node.name] = why
            del met[node.name]
    met, lost = _with_addresses([node for node in nodes if node.name in met], met, introduced)
    left_out |= lost
    if not met:
        raise UsageError("; ".join(f"{name}: {why}" for name, why in left_out.items()))
    return met, left_out


def _unsuited(node: Node, met: Introduction, own: dict[str, str], means: Means) -> str:
    """Why a node that has answered cannot take part; empty when it can."""
    if why := difference(own, met.versions):
        return why
    try:
        means.ranks(node, json.loads(met.description))
    except ValueError as error:
        return str(error)
    return ""


def _with_addresses(
    nodes: Sequence[Node], met: dict[str, Introduction], introduced: Callable[[Node, str], Introduction]
) -> tuple[dict[str, Introduction], dict[str, str]]:
    """The introductions with an address each, and the reason for each node without one of its own.

    A node whose name gives none, as an IPv6 address does not, has the one from which it reaches the head.
    """
    head = next((node for node in nodes if _own_address(met[node.name])), None)
    if head is None:
        return {}, {node.name: f"{_NO_ADDRESS} ({_listed(met[node.name])})" for node in nodes}
    first = met[head.name]
    if not first.address:
        own = _own_address(first)
        interface = next(name for name, address in first.interfaces.items() if address == own)
        met = met | {head.name: replace(first, address=own, interface=interface)}
    unknown = [node for node in nodes if not met[node.name].address]
    toward = met[head.name].address
    again = dict(
        zip([node.name for node in unknown], on_all(unknown, lambda node: introduced(node, toward)), strict=True)
    )
    left_out = {name: answer for name, answer in again.items() if isinstance(answer, str)}
    met = met | {name: answer for name, answer in again.items() if not isinstance(answer, str)}
    first_at: dict[str, str] = {}
    for node in (head, *(node for node in nodes if node is not head)):
        if node.name in left_out:
            continue
        same = first_at.setdefault(met[node.name].address, node.name)
        if same != node.name:
            left_out[node.name] = f"is the same machine as {same} ({met[node.name].address}); name it once"
    ordered = (head, *(node for node in nodes if node is not head))
    return {node.name: met[node.name] for node in ordered if node.name not in left_out}, left_out


def _own_address(met: Introduction) -> str:
    """The address of a node that no other one tells: of its name, or at which it was reached, or its only one."""
    others = [address for name, address in met.interfaces.items() if name != "lo"]
    return met.address or met.login_address or (others[0] if len(others) == 1 else "")


_NO_ADDRESS = "has no address that the others could use; name one with network.interface in the site or inventory"


def _listed(met: Introduction) -> str:
    return "interfaces: " + (", ".join(f"{name} {address}" for name, address in met.interfaces.items()) or "none")


def intended(node: Node, session: str, number: int, means: Means) -> StartedNode:
    """The record of a node before anything is read from it."""
    base = node.site.ray.temp_dir or "/tmp"  # noqa: S108 - a new folder of mode 0700 is made in it
    directory = f"{base.rstrip('/')}/burst-ray-{session}-{number}"
    if len(directory) > MAX_DIRECTORY_CHARACTERS:
        raise UsageError(
            f"{node.name}: ray.temp_dir {base} is too long for Ray's Unix sockets; "
            f"give one of at most {MAX_DIRECTORY_CHARACTERS - len(directory) + len(base)} characters"
        )
    return StartedNode(
        name=node.name,
        host=node.host,
        address="",
        interface="",
        mark=f"{session}/{number}",
        directory=directory,
        python=node.site.software.python or sys.executable,
        folder=node.site.software.folder or str(means.folder),
        begun=False,
        container=uses_container(node.site),
        engine=node.site.container.engine,
    )


def unfit_nodes(
    nodes: Sequence[Node], connect: Connect, timeout_seconds: float, quarantine: Quarantine | None = None
) -> dict[str, str]:
    """One sentence for every node that is not usable, by name. A node that does not answer is one of them.

    The others leave the quarantine: a passed check lets a node in again.
    """
    reports = check_nodes(nodes, connect, checks.discover(), timeout_seconds)
    unfit = {report.host.name: why_not(report) for report in reports if not report.usable}
    if quarantine is not None:
        quarantine.release(*(node.name for node in nodes if node.name not in unfit))
    return unfit
