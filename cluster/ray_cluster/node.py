"""Requests to a node: the node program, a request, one answer. A node is a host, a container on it, or this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any, TypeVar

from cluster.files.errors import last_line
from cluster.ray_cluster.node_program import MARK, REPLY
from cluster.transport.runner import Runner, Unreachable

MAX_NODES_AT_ONCE = 64

T = TypeVar("T")
R = TypeVar("R")


class NodeError(Exception):
    """A node whose answer is an error; one sentence. `log` is what the node's programs printed, where they did."""

    def __init__(self, sentence: str, log: str = "") -> None:
        super().__init__(sentence)
        self.log = log


def ask(runner: Runner, python: Sequence[str], action: str, *, seconds: float, **fields: Any) -> dict[str, Any]:
    """Run one action of the node program on the node and return its answer.

    `python` is the interpreter's command there, such as ["/opt/burst/bin/python"] or one inside a container. Program
    and request, which may hold a token, are sent through standard input alone. A `start` carries its mark itself, so
    that `stop` also ends one whose caller has died. Raises NodeError for anything but an answer, Unreachable when the
    connection breaks.
    """
    if action == "start":
        python = ["env", f"{MARK}={fields['mark']}", *python]
    source = resources.files(__package__).joinpath("node_program.py").read_text(encoding="utf-8")
    request = json.dumps({"action": action, **fields})
    try:
        done = runner.run([*python, "-"], stdin=f"{source}\nmain({request!r})\n", deadline_seconds=seconds)
    except FileNotFoundError:  # on this machine, where no shell stands between
        raise NodeError(f"{python[0]} does not exist; check software.python in the site") from None
    for line in done.stdout.splitlines():
        if line.startswith(REPLY):
            answer: dict[str, Any] = json.loads(line.removeprefix(REPLY))
            if "error" in answer:
                raise NodeError(answer["error"], answer.get("log", ""))
            return answer
    if done.exit_status is None:
        raise NodeError(f"{action} was not done within {seconds:g} s; look at the node's load and storage")
    raise NodeError(
        f"{' '.join(python)} exited with {done.exit_status} ({last_line(done.stderr)}); "
        "check software.python in the site"
    )


def on_all(items: Sequence[T], work: Callable[[T], R]) -> list[R | str]:
    """`work` for all items at once, in their order; where a node could not do it, one sentence instead of a result."""

    def attempt(item: T) -> R | str:
        try:
            return work(item)
        except (NodeError, Unreachable) as error:
            return str(error)

    if not items:
        return []
    with ThreadPoolExecutor(min(len(items), MAX_NODES_AT_ONCE)) as pool:
        return list(pool.map(attempt, items))
