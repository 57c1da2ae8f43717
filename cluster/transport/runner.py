"""Running a command somewhere: one interface for this machine and for a host over SSH."""

from __future__ import annotations

import codecs
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from cluster.inventory.hosts import Host

MAX_OUTPUT_BYTES = 8 * 2**20  # per stream; a node that prints without end must not fill our memory
MAX_LINE_CHARACTERS = 2**20  # a stream without line breaks is passed on in pieces of this length
_CHUNK_BYTES = 65536


class Unreachable(Exception):
    """A host that gave no answer: one sentence with the cause and the next step. It says nothing of its health."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """The result of a command. Output is text decoded as UTF-8, wrong bytes replaced, cut at MAX_OUTPUT_BYTES."""

    stdout: str
    stderr: str
    exit_status: int | None  # None: the deadline passed or the output was cut; output until then is kept


class Reader(Protocol):
    """Reads one stream to its end in some thread."""

    def drain(self) -> bool:
        """Read until the stream ends; False when it was too long and was not read to its end."""
        ...


@dataclass(frozen=True, slots=True)
class RunningCommand:
    """A command that runs. `finish` reads to the end: the exit status, or None when the deadline or a limit came."""

    stdout: Callable[[int], bytes]
    stderr: Callable[[int], bytes]
    finish: Callable[[Sequence[Reader]], int | None]


class Runner(ABC):
    """One host, ready to run commands: program and arguments, no shell unless the program is one.

    `stdin` is a text, or pieces of bytes; a second thread writes it to the command. Both methods raise Unreachable when
    the connection breaks. `cluster.transport.transfer.put` sends files.
    """

    @abstractmethod
    def started(
        self, command: Sequence[str], stdin: str | Iterable[bytes], seconds: float
    ) -> AbstractContextManager[RunningCommand]:
        """Start a command that ends within so many seconds, and feed it; leaving the context ends what is left."""

    def run(self, command: Sequence[str], *, stdin: str | Iterable[bytes] = "", deadline_seconds: float) -> Completed:
        """Wait for both streams and the status."""
        with self.started(command, stdin, deadline_seconds) as running:
            stdout, stderr = (Collector(read, MAX_OUTPUT_BYTES) for read in (running.stdout, running.stderr))
            status = running.finish([stdout, stderr])
        return Completed(stdout=stdout.text, stderr=stderr.text, exit_status=status)

    def stream(
        self,
        command: Sequence[str],
        on_line: Callable[[str], None],
        *,
        stdin: str | Iterable[bytes] = "",
        deadline_seconds: float,
    ) -> int | None:
        """Call `on_line` with each line of both streams as it arrives; the exit status, None when the deadline passed.

        Lines of one stream come in their order. `on_line` is called from other threads, once at a time; its exception
        closes the streams and is raised here.
        """
        one_at_a_time = threading.Lock()
        with self.started(command, stdin, deadline_seconds) as running:
            return running.finish(
                [LineReader(read, on_line, one_at_a_time) for read in (running.stdout, running.stderr)]
            )


# Opens a host within so many seconds, raising Unreachable; leaving the context closes the connection.
Connect = Callable[[Host, float], AbstractContextManager[Runner]]


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
