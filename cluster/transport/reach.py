"""How hosts are reached: this machine by subprocesses, the nodes of a Slurm job by its steps, all others over SSH."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from cluster.files.errors import UsageError
from cluster.inventory.hosts import Host
from cluster.transport import processes
from cluster.transport.runner import MAX_OUTPUT_BYTES, Completed, Connect, Runner
from cluster.transport.slurm import connect_steps
from cluster.transport.streams import Collector, LineReader, Reader, drain_all


class LocalRunner:
    """Starts each command in a session of its own, so that its deadline ends its children too and nothing else."""

    def run(self, command: Sequence[str], *, stdin: str | Iterable[bytes] = "", deadline_seconds: float) -> Completed:
        ends_at = time.monotonic() + deadline_seconds
        process = processes.start(command, subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        stdout = Collector(process.stdout.read1, MAX_OUTPUT_BYTES)  # type: ignore[attr-defined]
        stderr = Collector(process.stderr.read1, MAX_OUTPUT_BYTES)  # type: ignore[attr-defined]
        status = _finish(process, stdin, [stdout, stderr], ends_at)
        return Completed(stdout=stdout.text, stderr=stderr.text, exit_status=status)

    def stream(
        self,
        command: Sequence[str],
        on_line: Callable[[str], None],
        *,
        stdin: str | Iterable[bytes] = "",
        deadline_seconds: float,
    ) -> int | None:
        ends_at = time.monotonic() + deadline_seconds
        process = processes.start(command, subprocess.STDOUT)
        assert process.stdout is not None
        lines = LineReader(process.stdout.read1, on_line, threading.Lock())  # type: ignore[attr-defined]
        return _finish(process, stdin, [lines], ends_at)


@contextmanager
def connect_local(host: Host, seconds: float) -> Iterator[Runner]:
    """`Connect` for this machine; there is nothing to open."""
    assert host.is_local, host
    yield LocalRunner()


def _finish(
    process: subprocess.Popen[bytes], stdin: str | Iterable[bytes], readers: Sequence[Reader], ends_at: float
) -> int | None:
    """Feed and read to the end; the exit status, or None when the deadline or a limit came first."""
    processes.feed(process, stdin)
    status = None
    try:
        if drain_all(readers, ends_at):
            status = processes.wait(process, ends_at - time.monotonic())
    finally:
        if status is None:
            processes.end(process)
    return status


def address_of(host: Host) -> str:
    """The name or address behind a remote host's, which `~/.ssh/config` may give. Raises Unreachable for a bad one."""
    if host.slurm_job:
        return host.address
    try:
        from cluster.transport.ssh.config import SshConfig
    except ModuleNotFoundError:  # paramiko, without which nothing is reached over SSH
        return host.address
    return SshConfig().way(host).address


def connection(
    hosts: Iterable[Host], *, known_hosts: Path | None = None, accept_new_host_keys: bool = False
) -> Connect:
    """`Connect` for these hosts: one for all of them, because those behind a jump host share its connection.

    `known_hosts` None is SSH's default. paramiko is imported only for a host that SSH reaches; raises UsageError when
    it is not installed.
    """
    if not any(_over_ssh(host) for host in hosts):
        return _without_ssh
    try:
        from cluster.transport.ssh import SshOptions, connector
    except ModuleNotFoundError as error:
        raise UsageError(
            f"reaching other machines needs {error.name}, which is not installed; pip install paramiko"
        ) from None
    options = SshOptions(accept_new_host_keys=accept_new_host_keys)
    over_ssh = connector(replace(options, known_hosts=known_hosts) if known_hosts else options)

    def connect(host: Host, seconds: float) -> AbstractContextManager[Runner]:
        return (over_ssh if _over_ssh(host) else _without_ssh)(host, seconds)

    return connect


def _over_ssh(host: Host) -> bool:
    return not host.is_local and host.slurm_job is None


def _without_ssh(host: Host, seconds: float) -> AbstractContextManager[Runner]:
    return (connect_local if host.is_local else connect_steps)(host, seconds)
