"""How hosts are reached: over SSH, and this machine without it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from cluster.files.errors import UsageError
from cluster.inventory.hosts import Host
from cluster.transport.local import connect_local
from cluster.transport.runner import Connect, Runner


def connection(
    hosts: Iterable[Host], *, known_hosts: Path | None = None, accept_new_host_keys: bool = False
) -> Connect:
    """`Connect` for these hosts: one for all of them, because those behind a jump host share its connection.

    `known_hosts` None is SSH's default. paramiko is imported only when a host is remote; raises UsageError when it is
    not installed.
    """
    if all(host.is_local for host in hosts):
        return connect_local
    try:
        from cluster.transport.ssh import SshOptions, connector
    except ModuleNotFoundError as error:
        raise UsageError(
            f"reaching other machines needs {error.name}, which is not installed; pip install paramiko"
        ) from None
    named = {"known_hosts": known_hosts} if known_hosts else {}
    over_ssh = connector(SshOptions(accept_new_host_keys=accept_new_host_keys, **named))

    def connect(host: Host, seconds: float) -> AbstractContextManager[Runner]:
        return (connect_local if host.is_local else over_ssh)(host, seconds)

    return connect
