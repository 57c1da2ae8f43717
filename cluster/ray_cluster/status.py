"""The live processes of a cluster, read from the nodes themselves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from cluster.ray_cluster.container import find_command, interpreter
from cluster.ray_cluster.down import identity, run_engine
from cluster.ray_cluster.node import ask, on_all
from cluster.ray_cluster.state import ClusterState, StartedNode
from cluster.transport.runner import Connect


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """One node of a cluster. `unknown` is a node that did not answer."""

    name: str
    role: Literal["head", "worker"]
    address: str
    state: Literal["up", "down", "unknown"]
    finding: str


def cluster_status(
    state: ClusterState, connect: Connect, seconds: float, only: Collection[str] | None = None
) -> list[NodeStatus]:
    """Every node of the cluster, or those named, in order."""
    nodes = [node for node in state.nodes if only is None or node.name in only]
    answers = on_all(nodes, lambda node: _look(node, connect, seconds))
    return [_status(state, node, answer) for node, answer in zip(nodes, answers, strict=True)]


def _look(node: StartedNode, connect: Connect, seconds: float) -> tuple[bool, str]:
    """Whether Ray runs there, and one sentence."""
    python = [node.python]
    with connect(node.host, seconds) as runner:
        if node.container:
            ids = run_engine(runner, find_command(node.engine, node.mark), seconds).stdout.split()
            if not ids:
                return False, "no container of ours"
            python = interpreter(replace(node, container_id=ids[0]))
        wanted = {name: value for name, value in identity(node).items() if name != "directory"}
        answer = ask(runner, python, "status", seconds=seconds, **wanted)
    if answer["raylet"]:
        return True, f"{answer['processes']} processes"
    if not node.ran:
        return False, f"it never joined the cluster, {answer['processes']} processes of ours are left"
    return False, f"Ray is not running, {answer['processes']} processes of ours are left"


def _status(state: ClusterState, node: StartedNode, answer: tuple[bool, str] | str) -> NodeStatus:
    runs, finding = (None, answer) if isinstance(answer, str) else answer
    return NodeStatus(
        name=node.name,
        role="head" if state.is_head(node) else "worker",
        address=node.address,
        state="unknown" if runs is None else "up" if runs else "down",
        finding=finding,
    )
