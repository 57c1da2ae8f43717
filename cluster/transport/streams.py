"""The streams of a command: read side by side until a deadline, collected up to a size or passed on by lines."""

from __future__ import annotations

import codecs
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

_CHUNK_BYTES = 65536
MAX_LINE_CHARACTERS = 2**20  # a stream without line breaks is passed on in pieces of this length


class Reader(Protocol):
    """Reads one stream to its end in some thread."""

    def drain(self) -> bool:
        """Read until the stream ends; False when it was too long and was not read to its end."""
        ...


class Collector:
    """Collects the bytes of a stream; another thread may read those that have arrived."""

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
        """The bytes so far, decoded as UTF-8."""
        return bytes(self._content).decode("utf-8", errors="replace")


class LineReader:
    """Passes on each line as it arrives, without its line break. The stream may be of any length.

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
    """The input of a command as bytes: a text whole, or the pieces of an iterable."""
    if isinstance(stdin, str):
        yield stdin.encode()
    else:
        yield from stdin


def drain_all(readers: Sequence[Reader], ends_at: float) -> bool:
    """Drain all of them side by side; True when every stream ended before `ends_at` (monotonic) and within its limit.

    Each stream has a thread, because a command blocks when one of its streams is full and unread. The thread of a
    stream that does not end is not waited for. An exception of a reader, or of its receiver, is raised here.
    """
    finished: queue.SimpleQueue[bool | BaseException] = queue.SimpleQueue()

    def body(reader: Reader) -> None:
        try:
            finished.put(reader.drain())
        except BaseException as error:  # noqa: BLE001 - raised in the caller, not hidden
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
