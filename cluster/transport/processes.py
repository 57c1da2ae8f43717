"""A subprocess in a session of its own: fed, waited for and ended within a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence

from cluster.transport.streams import chunks


def start(command: Sequence[str], stderr: int, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a command with pipes; without `environment`, in this program's. Raises OSError for an absent program."""
    return subprocess.Popen(
        list(command),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )


def feed(process: subprocess.Popen[bytes], stdin: str | Iterable[bytes]) -> None:
    """Write the input from another thread, then close it."""
    threading.Thread(target=_feed, args=(process, stdin), daemon=True).start()


def wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit status; None when it did not end within so many seconds."""
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None


def end(process: subprocess.Popen[bytes]) -> None:
    """End the command's session: TERM, then KILL for what is left of it. A process stuck in the kernel remains."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if wait(process, 1.0) is not None and number == signal.SIGKILL:
            break


def _feed(process: subprocess.Popen[bytes], stdin: str | Iterable[bytes]) -> None:
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            for chunk in chunks(stdin):
                pipe.write(chunk)
    except BrokenPipeError:
        return  # the command ended without reading all of its input, which is no error
