"""Running a command somewhere: the interface that this machine and a host over SSH share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from cluster.inventory.hosts import Host

MAX_OUTPUT_BYTES = 8 * 2**20  # per stream; a node that prints without end must not fill our memory


class Unreachable(Exception):
    """A host that gave no answer: one sentence with the cause and the next step. It says nothing of its health."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """The result of a command. Output is text decoded as UTF-8, wrong bytes replaced, cut at MAX_OUTPUT_BYTES."""

    stdout: str
    stderr: str
    exit_status: int | None  # None: the deadline passed or the output was cut; output until then is kept


class Runner(Protocol):
    """One host, ready to run commands: program and arguments, no shell unless the program is one.

    `stdin` is a text, or pieces of bytes; a second thread writes it to the command. Both methods raise Unreachable when
    the connection breaks. `cluster.transport.transfer.put` sends files.
    """

    def run(self, command: Sequence[str], *, stdin: str | Iterable[bytes] = "", deadline_seconds: float) -> Completed:
        """Wait for both streams and the status."""
        ...

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
        ...


# Opens a host within so many seconds, raising Unreachable; leaving the context closes the connection.
Connect = Callable[[Host, float], AbstractContextManager[Runner]]
