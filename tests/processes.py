"""Processes of this machine as /proc shows them, for tests that did not start them directly."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path


def content(pid: int, name: str) -> bytes:
    """A file of /proc/PID; empty for a process that has ended. A zombie's command line and environment are empty."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat_of(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty for a process that has ended."""
    # The name in field 2 may hold spaces and brackets; the state follows its last bracket.
    return content(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def parent_of(pid: int) -> int:
    return int(stat_of(pid)[1])


def command_of(pid: int) -> str:
    """Its program and arguments, each followed by a space; empty for a process that has ended."""
    return content(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")


def output_of(pid: int) -> str:
    """The file that is its standard output; empty for a process that has ended."""
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""


def with_variable(name: str, value: str) -> list[int]:
    """All processes that run, or are stopped, and were started with this variable in their environment."""
    return [pid for pid in all_pids() if f"{name}={value}".encode() in content(pid, "environ").split(b"\0")]


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each that has not ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
