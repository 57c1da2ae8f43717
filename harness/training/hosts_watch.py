"""Hosts of a run that torchrun started watch each other: torchrun itself notices no host that falls silent.

One rank per host, its leader, counts in the store and reads the other leaders' counts. The other ranks of a host look
whether their leader still runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.launch.ranks import has_ended

if TYPE_CHECKING:
    from torch.distributed import Store

BEAT_SECONDS = 2.0
LOST_SECONDS = 20.0  # a host whose count stands still for so long is lost
_LEADER_SECONDS = 1.0  # between looks at the leader


class HostsWatch:
    """Threads of a leader. `lost` is called there with a host's number and the reason, and ends the process."""

    def __init__(self, store: Callable[[], Store], node: int, nodes: int, lost: Callable[[int, str], None]) -> None:
        """`store` makes a connection of the thread's own."""
        self._connect, self._node, self._nodes, self._lost = store, node, nodes, lost
        self._over = threading.Event()
        self._answered_at = time.monotonic()  # when the store last did
        if nodes > 1:
            for target in (self._watch, self._guard):
                threading.Thread(target=target, daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        others = [node for node in range(self._nodes) if node != self._node]
        counts: dict[int, bytes] = {}
        changed = dict.fromkeys(others, time.monotonic())
        beats = 0
        try:
            store = self._connect()
            while not self._over.wait(BEAT_SECONDS):
                beats += 1
                self._answered_at = time.monotonic()
                store.set(beat_key(self._node), str(beats))
                for node in others:
                    if store.check([ended_key(node)]):  # it ends by itself, and says why
                        changed[node] = time.monotonic()
                        continue
                    count = store.get(beat_key(node))
                    if counts.get(node) != count:
                        counts[node], changed[node] = count, time.monotonic()
                    elif time.monotonic() - changed[node] > LOST_SECONDS and not self._over.is_set():
                        self._lost(node, f"no word for {LOST_SECONDS:g} s")
        except RuntimeError:  # the store is on the first host
            if not self._over.is_set():
                self._lost(0, "its torchrun has ended")

    def _guard(self) -> None:
        """The store's host may fall silent: a question to the store then waits without end."""
        while not self._over.wait(BEAT_SECONDS):
            if time.monotonic() - self._answered_at > LOST_SECONDS:
                self._lost(0, f"no word for {LOST_SECONDS:g} s")


def beat_key(node: int) -> str:
    return f"beat{node}"


def ended_key(node: int) -> str:
    return f"ended{node}"


def follow(leader: int, over: threading.Event) -> None:
    """End this process, from a thread, when the process `leader` of the same host has ended before `over`."""

    def look() -> None:
        while not over.wait(_LEADER_SECONDS):
            if has_ended(leader):
                os._exit(1)

    threading.Thread(target=look, daemon=True).start()
