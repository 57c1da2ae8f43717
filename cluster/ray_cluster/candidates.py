"""The nodes a cluster would have, found without starting anything: healthy ones, with the same software."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import checks
from cluster.files.errors import UsageError
from cluster.health.nodes import check_nodes
from cluster.inventory.nodes import Inventory, Node
from cluster.ray_cluster.container import uses_container
from cluster.ray_cluster.introduction import THIS_MACHINE, Introduction, introduce, mismatch, own_versions
from cluster.ray_cluster.node import NodeError, named, on_all
from cluster.ray_cluster.ray_commands import MAX_DIRECTORY_CHARACTERS
from cluster.ray_cluster.state import StartedNode
from cluster.render.text import why_not
from cluster.transport.runner import Connect


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A node that `up` would start."""

    name: str
    ranks: int  # of one trial that fit there
    description: str  # JSON: output of the describing program


def candidates(inventory: Inventory, means: Means) -> list[Candidate]:
    """The nodes that `start_cluster` would start now, found in the same way.

    Raises UsageError where it would refuse, and for nodes whose software is in a container that must run first.
    """
    nodes = healthy(inventory, means)
    if inside := next((node.name for node in nodes if uses_container(node.site)), None):
        raise UsageError(
            f"{inside} runs everything in a container, which cannot be read before it runs; "
            "start it with burst cluster up"
        )
    head, *others = nodes
    answers = _introductions([head], means, toward="")
    answers |= _introductions(others, means, toward=answers[head.name].address)
    try:
        own = {THIS_MACHINE: own_versions(means.folder, means.describe, means.seconds)}
    except NodeError as error:
        raise UsageError(str(error)) from error
    if problem := mismatch(own | {name: answer.versions for name, answer in answers.items()}):
        raise UsageError(problem)
    return [
        Candidate(
            name=node.name,
            ranks=ranks_of(node, answers[node.name].description, means),
            description=answers[node.name].description,
        )
        for node in nodes
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
    )


def ranks_of(node: Node, description: str, means: Means) -> int:
    """Ranks of one trial that fit on a node, by its description. Raises UsageError with the reason where none do."""
    try:
        return means.ranks(node, json.loads(description))
    except ValueError as error:
        raise UsageError(f"{node.name}: {error}") from error


def _introductions(nodes: Sequence[Node], means: Means, *, toward: str) -> dict[str, Introduction]:
    """Introductions of nodes, by name. Raises UsageError with the sentences of those that cannot take part."""

    def introduced(node: Node) -> Introduction:
        unstarted = intended(node, "", 0, means)
        interface = node.site.network.interface
        with means.connect(node.host, means.seconds) as runner:
            return introduce(runner, [unstarted.python], unstarted, interface, toward, means.describe, means.seconds)

    answers = on_all(nodes, introduced)
    if problems := named(nodes, answers):
        raise UsageError(problems)
    return {node.name: answer for node, answer in zip(nodes, answers, strict=True) if not isinstance(answer, str)}


def unfit_nodes(nodes: Sequence[Node], connect: Connect, timeout_seconds: float) -> dict[str, str]:
    """One sentence for every node that is not usable, by name. A node that does not answer is one of them."""
    reports = check_nodes(nodes, connect, checks.discover(), timeout_seconds)
    return {report.host.name: why_not(report) for report in reports if not report.usable}
