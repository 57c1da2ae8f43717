"""How the nodes of a cluster are reached: over SSH, and this machine without it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from cluster.hosts import Host
from cluster.local import connect_local
from cluster.runner import Connect, Runner


def node_connect(known_hosts: Path | None, accept_new_host_keys: bool = False) -> Connect:
    """`Connect` for any node. `known_hosts` None is SSH's default. paramiko is imported when a node is remote."""
    over_ssh: list[Connect] = []

    def connect(host: Host, seconds: float) -> AbstractContextManager[Runner]:
        if host.is_local:
            return connect_local(host, seconds)
        if not over_ssh:  # one for all: connections through one jump host share it
            from cluster.ssh import SshOptions, connector

            named = {"known_hosts": known_hosts} if known_hosts else {}
            over_ssh.append(connector(SshOptions(accept_new_host_keys=accept_new_host_keys, **named)))
        return over_ssh[0](host, seconds)

    return connect
