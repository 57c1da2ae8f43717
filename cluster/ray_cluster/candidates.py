"""Which nodes a cluster would be of, found without starting anything: healthy ones, with the same software."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.files.errors import UsageError
from cluster.inventory.nodes import Inventory, Node
from cluster.ray_cluster.container import uses_container
from cluster.ray_cluster.introduction import THIS_MACHINE, Introduction, introduce, own_versions
from cluster.ray_cluster.means import Means
from cluster.ray_cluster.node import NodeError, named, on_all
from cluster.ray_cluster.ray_commands import MAX_DIRECTORY_CHARACTERS
from cluster.ray_cluster.state import StartedNode
from cluster.ray_cluster.versions import mismatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A node that `up` would start."""

    name: str
    ranks: int  # of one trial that fit there
    description: str  # JSON: what the describing program said


def candidates(inventory: Inventory, means: Means) -> list[Candidate]:
    """The nodes that `start_cluster` would start now, each asked as it would be asked.

    Raises UsageError where it would refuse, and for nodes whose software is in a container that must run first.
    """
    nodes = healthy(inventory, means)
    if inside := next((node.name for node in nodes if uses_container(node.site)), None):
        raise UsageError(
            f"{inside} runs everything in a container, which can be asked once it runs; start it with burst cluster up"
        )
    head, *others = nodes
    met = _meet([head], means, toward="")
    met |= _meet(others, means, toward=met[head.name].address)
    try:
        own = {THIS_MACHINE: own_versions(means.folder, means.describe, means.seconds)}
    except NodeError as error:
        raise UsageError(str(error)) from error
    if problem := mismatch(own | {name: answer.versions for name, answer in met.items()}):
        raise UsageError(problem)
    return [
        Candidate(
            name=node.name,
            ranks=ranks_of(node, met[node.name].description, means),
            description=met[node.name].description,
        )
        for node in nodes
    ]


def healthy(inventory: Inventory, means: Means) -> list[Node]:
    """Its nodes without those that are not usable now, of which one sentence is said. Raises UsageError for none."""
    unfit = means.unfit(inventory.nodes)
    for sentence in (unfit[node.name] for node in inventory.nodes if node.name in unfit):
        means.say(f"left out: {sentence}")
    nodes = [node for node in inventory.nodes if node.name not in unfit]
    if not nodes:
        raise UsageError(f"none of the {len(inventory.nodes)} nodes is usable; see burst check for each one's findings")
    return nodes


def intended(node: Node, session: str, number: int, means: Means) -> StartedNode:
    """What is known of a node before it is asked anything."""
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
    """Ranks of one trial that a node takes, by what it said of itself. Raises UsageError where that cannot be."""
    try:
        return means.ranks(node, json.loads(description))
    except ValueError as error:
        raise UsageError(f"{node.name}: {error}") from error


def _meet(nodes: Sequence[Node], means: Means, *, toward: str) -> dict[str, Introduction]:
    """What nodes say, by name. Raises UsageError with the sentences of those that cannot take part."""

    def meet(node: Node) -> Introduction:
        unstarted = intended(node, "", 0, means)
        interface = node.site.network.interface
        with means.connect(node.host, means.seconds) as runner:
            return introduce(runner, [unstarted.python], unstarted, interface, toward, means.describe, means.seconds)

    answers = on_all(nodes, meet)
    if problems := named(nodes, answers):
        raise UsageError(problems)
    return {node.name: answer for node, answer in zip(nodes, answers, strict=True) if not isinstance(answer, str)}
