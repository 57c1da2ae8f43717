"""Ending a cluster, and looking at it: the processes and containers we started on each node, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cluster.files.errors import last_line
from cluster.ray_cluster.commands import find_containers, remove_containers
from cluster.ray_cluster.node import NodeError, ask, on_all
from cluster.ray_cluster.state import ClusterState, StartedNode, StateDirectory
from cluster.transport.runner import Connect, Runner

STOP_SECONDS = 40.0  # TERM, KILL, and a process that takes its time in a driver call


def end_cluster(states: StateDirectory, state: ClusterState, connect: Connect, seconds: float) -> dict[str, str]:
    """End everything of this cluster that can be reached; returns one sentence for each node where that failed.

    Those nodes stay recorded as `left`, which hinders no new cluster: the next `up` or `down` tries again.
    """
    nodes = [*state.nodes, *state.left]
    problems = end_nodes(nodes, connect, seconds)
    if problems:
        left = tuple({node.name: node for node in nodes if node.name in problems}.values())
        states.save(dataclasses.replace(state, nodes=(), left=left))
        states.forget_token()
    else:
        states.clear()
    return problems


def end_nodes(nodes: Sequence[StartedNode], connect: Connect, seconds: float) -> dict[str, str]:
    """End our processes or containers on these nodes; one sentence, by name, for each where something may be left."""
    answers = on_all(nodes, lambda node: _end(node, connect, seconds))
    return {node.name: answer for node, answer in zip(nodes, answers, strict=True) if answer is not None}


def _end(node: StartedNode, connect: Connect, seconds: float) -> None:
    with connect(node.host, seconds) as runner:
        if node.engine:
            if ids := containers(runner, node, seconds):
                run_engine(runner, remove_containers(node.engine, ids), STOP_SECONDS + seconds)
            return
        fields = {"mark": node.mark, "directory": node.directory}
        left = ask(runner, [node.python], "stop", seconds=STOP_SECONDS + seconds, **fields)["left"]
    if left:
        raise NodeError(f"{', '.join(left)} could not be ended or removed; look for a stuck driver or mount there")


def containers(runner: Runner, node: StartedNode, seconds: float) -> list[str]:
    """Ids of the containers with exactly this node's mark; normally there is at most one."""
    return run_engine(runner, find_containers(node.engine, node.mark), seconds).split()


def run_engine(runner: Runner, command: Sequence[str], seconds: float) -> str:
    """Output of one command of docker or podman. Raises NodeError when it fails."""
    done = runner.run(command, deadline_seconds=seconds)
    if done.exit_status != 0:
        why = "did not answer in time" if done.exit_status is None else f"failed ({last_line(done.stderr)})"
        raise NodeError(f"{command[0]} {command[1]} {why}; look at the node's {command[0]}")
    return done.stdout


def interpreter(node: StartedNode) -> list[str]:
    """The command that runs the node's Python with our standard input, inside the container where there is one."""
    return [node.engine, "exec", "--interactive", node.container_id, node.python] if node.engine else [node.python]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """One node of a cluster. `unknown` is a node that did not answer."""

    name: str
    role: Literal["head", "worker"]
    address: str
    state: Literal["up", "down", "unknown"]
    finding: str


def cluster_status(state: ClusterState, connect: Connect, seconds: float) -> list[NodeStatus]:
    """Every node of the cluster, in order, as the nodes themselves show it. Without its head no node is up: the Ray of
    the others ends by itself some seconds later."""
    answers = on_all(state.nodes, lambda node: _look(state, node, connect, seconds))
    found = [_status(state, node, answer) for node, answer in zip(state.nodes, answers, strict=True)]
    if found and (head := found[0]).state != "up":
        lost = f"without its head {head.name}, which is not up"
        found[1:] = [
            dataclasses.replace(node, state="down", finding=lost) if node.state == "up" else node for node in found[1:]
        ]
    return found


def _look(state: ClusterState, node: StartedNode, connect: Connect, seconds: float) -> dict[str, Any]:
    with connect(node.host, seconds) as runner:
        if node.engine:
            ids = containers(runner, node, seconds)
            if not ids:
                return {"processes": 0, "raylet": False, "gcs": False, "reaches_head": False}
            node = dataclasses.replace(node, container_id=ids[0])
        return ask(runner, interpreter(node), "status", seconds=seconds, mark=node.mark, head=state.head_address)


def _status(state: ClusterState, node: StartedNode, answer: dict[str, Any] | str) -> NodeStatus:
    head = node.name == state.head.name
    shown: Literal["up", "down", "unknown"] = "down"
    if isinstance(answer, str):
        shown, finding = "unknown", answer
    elif not answer["raylet"] or (head and not answer["gcs"]):
        finding = f"Ray is not running, {answer['processes']} processes of ours are left"
    elif not answer["reaches_head"]:
        finding = f"does not reach the head at {state.head_address}"
    else:
        shown, finding = "up", f"{answer['processes']} processes"
    return NodeStatus(
        name=node.name, role="head" if head else "worker", address=node.address, state=shown, finding=finding
    )
