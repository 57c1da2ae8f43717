"""The streams of a command: read side by side up to a point in time, collected up to a size or handed on by lines."""

from __future__ import annotations

import codecs
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

_CHUNK_BYTES = 65536
MAX_LINE_CHARACTERS = 2**20  # a stream without line breaks is handed on in pieces of this length


class Reader(Protocol):
    """Reads one stream to its end in some thread."""

    def drain(self) -> bool:
        """Read until the stream ends; False when it was left before, because it is too long."""
        ...


class Collector:
    """Keeps what a stream said, while another thread may look at what has come so far."""

    def __init__(self, read: Callable[[int], bytes], limit_bytes: int) -> None:
        self._read = read
        self._limit_bytes = limit_bytes
        self._content = bytearray()

    def drain(self) -> bool:
        while chunk := self._read(_CHUNK_BYTES):
            self._content += chunk[: self._limit_bytes - len(self._content)]
            if len(self._content) >= self._limit_bytes:
                return False
        return True

    @property
    def text(self) -> str:
        """What was read, as UTF-8."""
        return bytes(self._content).decode("utf-8", errors="replace")


class LineReader:
    """Hands on each line as it comes, without its line break and however long the whole gets.

    Readers that share a receiver share a lock, so that it is called once at a time.
    """

    def __init__(self, read: Callable[[int], bytes], on_line: Callable[[str], None], lock: threading.Lock) -> None:
        self._read = read
        self._receiver = on_line
        self._lock = lock

    def drain(self) -> bool:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        rest = ""
        while chunk := self._read(_CHUNK_BYTES):
            *lines, rest = (rest + decoder.decode(chunk)).split("\n")
            for line in lines:
                self._on_line(line)
            if len(rest) > MAX_LINE_CHARACTERS:
                self._on_line(rest)
                rest = ""
        rest += decoder.decode(b"", final=True)
        if rest:
            self._on_line(rest)
        return True

    def _on_line(self, line: str) -> None:
        with self._lock:
            self._receiver(line.removesuffix("\r"))


def chunks(stdin: str | Iterable[bytes]) -> Iterator[bytes]:
    """What a command is fed: a text whole, or pieces as their source gives them."""
    if isinstance(stdin, str):
        yield stdin.encode()
    else:
        yield from stdin


def drain_all(readers: Sequence[Reader], ends_at: float) -> bool:
    """Drain all of them side by side; True when every stream ended before `ends_at` (monotonic) and within its limit.

    A command whose one stream is full and unread would block, hence a thread each. The threads of streams that do not
    end are left to end with their stream. What a reader raises, as a line's receiver may, is raised here.
    """
    finished: queue.SimpleQueue[bool | BaseException] = queue.SimpleQueue()

    def body(reader: Reader) -> None:
        try:
            finished.put(reader.drain())
        except BaseException as error:  # noqa: BLE001 - handed over, not hidden
            finished.put(error)

    for reader in readers:
        threading.Thread(target=body, args=(reader,), daemon=True).start()
    for _ in readers:
        try:
            ended = finished.get(timeout=max(0.0, ends_at - time.monotonic()))
        except queue.Empty:
            return False
        if isinstance(ended, BaseException):
            raise ended
        if not ended:
            return False
    return True
