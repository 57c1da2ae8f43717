"""How hosts are reached: this machine by subprocesses, all others over SSH."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from cluster.files.errors import UsageError
from cluster.inventory.hosts import Host
from cluster.transport.runner import Connect, Reader, Runner, RunningCommand, chunks, drain_all


class LocalRunner(Runner):
    """Runs commands on this machine, each in a session of its own: its deadline ends its children too, no others."""

    @contextmanager
    def started(self, command: Sequence[str], stdin: str | Iterable[bytes], seconds: float) -> Iterator[RunningCommand]:
        ends_at = time.monotonic() + seconds
        pipe = subprocess.PIPE
        process = subprocess.Popen(list(command), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        status: int | None = None

        def finish(readers: Sequence[Reader]) -> int | None:
            nonlocal status
            if drain_all(readers, ends_at):
                status = _status(process, ends_at - time.monotonic())
            return status

        threading.Thread(target=_feed, args=(process, stdin), daemon=True).start()
        try:
            yield RunningCommand(process.stdout.read1, process.stderr.read1, finish)  # type: ignore[union-attr]
        finally:
            if status is None:
                _end(process)


def _feed(process: subprocess.Popen[bytes], stdin: str | Iterable[bytes]) -> None:
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            for chunk in chunks(stdin):
                pipe.write(chunk)
    except BrokenPipeError:
        return  # the command ended without reading all of its input, which is no error


def _status(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit status; None when it did not end within so many seconds."""
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command's session: TERM, then KILL for what is left of it. A process stuck in the kernel remains."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        _status(process, 1.0)


@contextmanager
def connect_local(host: Host, seconds: float) -> Iterator[Runner]:
    """`Connect` for this machine; there is nothing to open."""
    assert host.is_local, host
    yield LocalRunner()


def address_of(host: Host) -> str:
    """The name or address behind a remote host's, which `~/.ssh/config` may give. Raises Unreachable for a bad one."""
    try:
        from cluster.transport.ssh_files import SshConfig
    except ModuleNotFoundError:  # paramiko, without which nothing is reached over SSH
        return host.address
    return SshConfig().settings(host).address


def connection(
    hosts: Iterable[Host], *, known_hosts: Path | None = None, accept_new_host_keys: bool = False
) -> Connect:
    """`Connect` for these hosts: one for all of them, because those behind a jump host share its connection.

    `known_hosts` None is each host's own, or SSH's default. paramiko is imported only for a host that SSH reaches;
    raises UsageError when it is not installed.
    """
    if all(host.is_local for host in hosts):
        return connect_local
    try:
        from cluster.transport.ssh import SshOptions, connector
    except ModuleNotFoundError as error:
        raise UsageError(
            f"reaching other machines needs {error.name}, which is not installed; pip install paramiko"
        ) from None
    over_ssh = connector(SshOptions(known_hosts=known_hosts, accept_new_host_keys=accept_new_host_keys))

    def connect(host: Host, seconds: float) -> AbstractContextManager[Runner]:
        return (connect_local if host.is_local else over_ssh)(host, seconds)

    return connect
