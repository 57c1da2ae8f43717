"""Processes of this machine as /proc shows them, for tests that did not start them directly."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import struct
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


def listens_on(pid: int) -> set[str]:
    """The addresses at which a process waits for connections of TCP."""
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in content(pid, f"net/{table}").decode().splitlines()[1:]:
            _, local, _, state, *others = line.split()
            if state == "0A" and f"socket:[{others[5]}]" in own:  # TCP_LISTEN; the inode
                words = bytes.fromhex(local.partition(":")[0])  # of 32 bits, in the byte order of this machine
                address = b"".join(struct.pack(">I", word) for (word,) in struct.iter_unpack("=I", words))
                found.add(str(ipaddress.ip_address(address)))
    return found
