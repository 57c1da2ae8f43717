"""The same work on many nodes at once, with an answer for every one of them whatever happened."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from cluster.runner import Unreachable

Node = TypeVar("Node")
Answer = TypeVar("Answer")

GRACE_SECONDS = 2.0  # for a node's own deadline to be noticed before ours


def on_each(
    nodes: Sequence[Node], work: Callable[[Node], Answer], seconds: float
) -> Iterator[tuple[Node, Answer | Unreachable]]:
    """Answers as they come; after `seconds` and a little grace, `Unreachable` for the nodes that gave none.

    Each node has a thread that nothing waits for at exit: a name server or a kernel that hangs holds up nobody.
    `work` may raise Unreachable, which is an answer; anything else it raises is raised here.
    """
    answers: queue.SimpleQueue[tuple[int, Answer | BaseException]] = queue.SimpleQueue()

    def body(number: int) -> None:
        try:
            answers.put((number, work(nodes[number])))
        except BaseException as error:  # noqa: BLE001 - handed over, not hidden
            answers.put((number, error))

    waiting = set(range(len(nodes)))
    for number in waiting:
        threading.Thread(target=body, args=(number,), daemon=True).start()
    ends_at = time.monotonic() + seconds + GRACE_SECONDS
    while waiting:
        try:
            number, answer = answers.get(timeout=max(0.0, ends_at - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(answer, BaseException) and not isinstance(answer, Unreachable):
            raise answer
        waiting.discard(number)
        yield nodes[number], answer
    for number in sorted(waiting):
        yield (
            nodes[number],
            Unreachable(f"no answer within {seconds:g} s; check that the node is up, or raise --timeout"),
        )
