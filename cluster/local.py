"""Running commands on this machine, with the deadline and the interface that SSH has."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from cluster.hosts import Host
from cluster.runner import MAX_OUTPUT_BYTES, Completed, Runner
from cluster.streams import Collector, drain_all


class LocalRunner:
    """Starts each command in a session of its own, so that its deadline ends its children too and nothing else."""

    def run(self, command: Sequence[str], *, stdin: str = "", deadline_seconds: float) -> Completed:
        ends_at = time.monotonic() + deadline_seconds
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        stdout = Collector(process.stdout.read1, MAX_OUTPUT_BYTES)  # type: ignore[attr-defined]
        stderr = Collector(process.stderr.read1, MAX_OUTPUT_BYTES)  # type: ignore[attr-defined]
        threading.Thread(target=_feed, args=(process.stdin, stdin.encode()), daemon=True).start()
        ended = drain_all([stdout, stderr], ends_at)
        status = _wait(process, ends_at - time.monotonic()) if ended else None
        if status is None:
            _end(process)
        return Completed(stdout=stdout.text, stderr=stderr.text, exit_status=status)


@contextmanager
def connect_local(host: Host, seconds: float) -> Iterator[Runner]:
    """`Connect` for this machine; there is nothing to open."""
    assert host.is_local, host
    yield LocalRunner()


def _feed(pipe: IO[bytes], content: bytes) -> None:
    try:
        with pipe:
            pipe.write(content)
    except BrokenPipeError:
        return  # the command ended without reading all of it, which is its right; its status tells the rest


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command's session: TERM, then KILL for what is left of it. A process stuck in the kernel stays behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if _wait(process, 1.0) is not None and number == signal.SIGKILL:
            break
