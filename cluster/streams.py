"""Collecting the output of a command: both streams at once, up to a size and a point in time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

_CHUNK_BYTES = 65536


class Collector:
    """Reads a stream to its end in some thread, while another may look at what has come so far."""

    def __init__(self, read: Callable[[int], bytes], limit_bytes: int) -> None:
        self._read = read
        self._limit_bytes = limit_bytes
        self._content = bytearray()
        self.overflowed = False

    def drain(self) -> None:
        """Read until the stream ends or the limit is reached."""
        while chunk := self._read(_CHUNK_BYTES):
            self._content += chunk[: self._limit_bytes - len(self._content)]
            if len(self._content) >= self._limit_bytes:
                self.overflowed = True
                return

    @property
    def text(self) -> str:
        """What was read, as UTF-8."""
        return bytes(self._content).decode("utf-8", errors="replace")


def drain_all(collectors: Sequence[Collector], ends_at: float) -> bool:
    """Drain all of them side by side; True when every stream ended before `ends_at` (monotonic) and within its limit.

    A command whose one stream is full and unread would block, hence a thread each. The threads of streams that do not
    end are left to end with their stream.
    """
    finished: queue.SimpleQueue[Collector] = queue.SimpleQueue()

    def body(collector: Collector) -> None:
        collector.drain()
        finished.put(collector)

    for collector in collectors:
        threading.Thread(target=body, args=(collector,), daemon=True).start()
    for _ in collectors:
        try:
            if finished.get(timeout=max(0.0, ends_at - time.monotonic())).overflowed:
                return False
        except queue.Empty:
            return False
    return True
