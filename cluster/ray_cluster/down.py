"""Ending a cluster: the processes and containers we started on each node, and no others."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from cluster.ray_cluster.container import find_command, remove_command
from cluster.ray_cluster.node import NodeError, ask, on_all
from cluster.ray_cluster.quarantine import Quarantine
from cluster.ray_cluster.state import ClusterState, StartedNode, StateDirectory
from cluster.transport.runner import Completed, Connect, Runner

LATE_START_SECONDS = 2.0
STOP_SECONDS = 40.0  # TERM, KILL, and a process that takes its time in a driver call


def end_cluster(states: StateDirectory, state: ClusterState, connect: Connect, seconds: float) -> dict[str, str]:
    """End everything of this cluster that can be reached; returns one sentence for each node where that failed.

    Nodes where nothing was started are skipped, because they may be the ones that do not answer. Nodes where nothing is
    left are removed from the state, and let in again if they were in quarantine: the next start checks them. The
    others stay in it for the next attempt.
    """
    begun = [node for node in state.nodes if node.begun]
    answers = on_all(begun, lambda node: end_node(node, connect, seconds))
    if begun and not state.complete:
        # A start that was under way when its launcher died may have begun on a node after we had looked there.
        time.sleep(LATE_START_SECONDS)
        again = on_all(begun, lambda node: end_node(node, connect, seconds))
        answers = [second if isinstance(second, str) else first for first, second in zip(answers, again, strict=True)]
    problems = {node.name: answer for node, answer in zip(begun, answers, strict=True) if isinstance(answer, str)}
    if problems:
        left = tuple(node for node in state.nodes if node.name in problems)
        head = state.head_name or state.head.name
        states.save(dataclasses.replace(state, complete=False, ending=True, head_name=head, nodes=left))
    else:
        states.clear()
    Quarantine(states.path).release(*(node.name for node in state.nodes if node.name not in problems))
    return problems


def end_node(node: StartedNode, connect: Connect, seconds: float) -> int:
    """End our processes or containers on one node; returns their number. Raises NodeError and Unreachable."""
    with connect(node.host, seconds) as runner:
        if node.container:
            return remove_containers(runner, node, seconds)
        answer = ask(runner, [node.python], "stop", seconds=STOP_SECONDS + seconds, **identity(node))
    if left := answer["left"]:
        listed = ", ".join(map(str, left))
        raise NodeError(f"processes {listed} did not end after SIGKILL; look for a stuck driver there")
    return int(answer["ended"])


def identity(node: StartedNode) -> dict[str, Any]:
    """The fields by which the node program recognises our processes."""
    processes = [dataclasses.asdict(process) for process in node.processes]
    return {"mark": node.mark, "directory": node.directory, "session": node.session, "processes": processes}


def remove_containers(runner: Runner, node: StartedNode, seconds: float) -> int:
    """Remove the containers labelled with exactly this node's mark; normally there is at most one."""
    found = run_engine(runner, find_command(node.engine, node.mark), seconds)
    ids = found.stdout.split()
    if ids:
        run_engine(runner, remove_command(node.engine, ids), STOP_SECONDS + seconds)
    return len(ids)


def run_engine(runner: Runner, command: Sequence[str], seconds: float) -> Completed:
    """Run one command of docker or podman. Raises NodeError when it fails."""
    done = runner.run(command, deadline_seconds=seconds)
    if done.exit_status != 0:
        said = done.stderr.strip().splitlines()
        why = "did not answer in time" if done.exit_status is None else f"failed ({said[-1][:200] if said else '?'})"
        raise NodeError(f"{command[0]} {command[1]} {why}; look at the node's {command[0]}")
    return done
