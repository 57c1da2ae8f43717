"""The nodes a command line names, and how they are reached; its options are those of `node_arguments`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cluster.errors import UsageError
from cluster.hosts import Host, parse_hosts, this_machine
from cluster.inventory import Inventory, Node, from_hosts
from cluster.inventory_file import read_inventory
from cluster.local import connect_local
from cluster.runner import Connect
from cluster.site import Site, load_site


def named_nodes(arguments: argparse.Namespace) -> Inventory:
    """The nodes asked for; this machine when none is. Raises UsageError."""
    if not 0 < arguments.timeout <= 86400:
        raise UsageError(f"--timeout is {arguments.timeout:g}; expected seconds above 0 and at most 86400")
    try:
        inventory = _inventory(arguments.nodes, arguments.site)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if arguments.key is None:
        return inventory
    if not arguments.key.expanduser().is_file():
        raise UsageError(f"the private key {arguments.key} is no file; give the path of the key that opens the nodes")
    nodes = tuple(replace(node, host=replace(node.host, key=arguments.key)) for node in inventory.nodes)
    return replace(inventory, nodes=nodes)


def _inventory(targets: Sequence[str], site_file: Path | None) -> Inventory:
    files = [target for target in targets if Path(target).is_file() or target.endswith((".yaml", ".yml"))]
    if files and len(targets) > 1:
        raise UsageError(f"{files[0]} is a file among {len(targets)} targets; give one inventory file, or hosts alone")
    if files:
        return read_inventory(Path(files[0]), site_file)
    site = load_site(site_file) if site_file else Site()
    if not targets:
        return Inventory(name="this machine", nodes=(Node(host=this_machine(), site=site),))
    return from_hosts([host for target in targets for host in parse_hosts(target)], site)


def connection(arguments: argparse.Namespace, hosts: Sequence[Host]) -> Connect:
    """How these hosts are reached. paramiko is imported only when one of them is remote."""
    if all(host.is_local for host in hosts):
        return connect_local
    try:
        from cluster.ssh import SshOptions, connector
    except ModuleNotFoundError as error:
        raise UsageError(
            f"reaching other machines needs {error.name}, which is not installed; pip install paramiko"
        ) from None
    known_hosts = {"known_hosts": arguments.known_hosts} if arguments.known_hosts else {}
    return connector(SshOptions(accept_new_host_keys=arguments.accept_new_host_keys, **known_hosts))
