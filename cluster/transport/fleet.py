"""The same work on many nodes at once, with an answer for every node."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from cluster.transport.runner import Unreachable

Item = TypeVar("Item")
Answer = TypeVar("Answer")

GRACE_SECONDS = 2.0  # so that a node's own deadline passes before ours


# Each active node has a few threads here. More nodes at once are no faster when all of them answer.
AT_ONCE = 256


def on_each(
    nodes: Sequence[Item], work: Callable[[Item], Answer], seconds: float, at_once: int = AT_ONCE
) -> Iterator[tuple[Item, Answer | Unreachable]]:
    """Answers as they arrive; `Unreachable` for a node without one `seconds`, and a little grace, after its start.

    At most `at_once` nodes are active; a node's time begins with its turn. Each has a daemon thread, so a name server
    or a kernel that hangs does not delay the exit. Unreachable raised by `work` is an answer; any other exception is
    raised here.
    """
    answers: queue.SimpleQueue[tuple[int, Answer | BaseException]] = queue.SimpleQueue()

    def body(number: int) -> None:
        try:
            answers.put((number, work(nodes[number])))
        except BaseException as error:  # noqa: BLE001 - raised in the caller, not hidden
            answers.put((number, error))

    queued = deque(range(len(nodes)))
    ends_at: dict[int, float] = {}  # of the nodes at work, in the order they started: the first is the next to be late
    while queued or ends_at:
        while queued and len(ends_at) < at_once:
            number = queued.popleft()
            ends_at[number] = time.monotonic() + seconds + GRACE_SECONDS
            threading.Thread(target=body, args=(number,), daemon=True).start()
        late = next(iter(ends_at))
        try:
            number, answer = answers.get(timeout=max(0.0, ends_at[late] - time.monotonic()))
        except queue.Empty:
            del ends_at[late]
            problem = f"no answer within {seconds:g} s; check that the node is up, or raise --timeout"
            yield nodes[late], Unreachable(problem)
            continue
        if number not in ends_at:  # it was given up before it answered
            continue
        if isinstance(answer, BaseException) and not isinstance(answer, Unreachable):
            raise answer
        del ends_at[number]
        yield nodes[number], answer
