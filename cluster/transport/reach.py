"""How hosts are reached: this machine by subprocesses, all others over SSH."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from cluster.files.errors import UsageError
from cluster.inventory.hosts import Host
from cluster.transport.runner import Connect, LocalProcess, Reader, Runner, RunningCommand, StreamRunner, drain_all


class LocalRunner(StreamRunner):
    """Runs commands on this machine."""

    @contextmanager
    def started(self, command: Sequence[str], stdin: str | Iterable[bytes], seconds: float) -> Iterator[RunningCommand]:
        ends_at = time.monotonic() + seconds
        process = LocalProcess(command)
        status: int | None = None

        def finish(readers: Sequence[Reader]) -> int | None:
            nonlocal status
            if drain_all(readers, ends_at):
                status = process.wait(ends_at - time.monotonic())
            return status

        process.feed(stdin)
        try:
            yield RunningCommand(process.stdout, process.stderr, finish)
        finally:
            if status is None:
                process.end()


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
