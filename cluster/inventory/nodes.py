"""Nodes, each with its own connection and its own expectations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.files.errors import UsageError, nearest
from cluster.inventory.hosts import Host, distinct, expand, parse_jump
from cluster.inventory.site import Site


@dataclass(frozen=True, kw_only=True, slots=True)
class InventoryNode:
    """One node: how it is reached, and its site with the node's own sections laid over it."""

    host: Host
    site: Site

    @property
    def name(self) -> str:
        """Its name in tables and `--free`; unique in its inventory."""
        return self.host.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """Nodes in the order they were named, which is the order ranks are placed in."""

    name: str
    nodes: tuple[InventoryNode, ...]

    def select(self, patterns: Iterable[str]) -> Inventory:
        """Only the nodes these names or ranges stand for. Raises UsageError for a name that is no node of it."""
        by_name = {node.name: node for node in self.nodes}
        wanted = {name for pattern in patterns for name in ([pattern] if pattern in by_name else expand(pattern))}
        for name in sorted(wanted - by_name.keys()):
            raise UsageError(f"{name} is no node of the inventory {self.name}; {nearest(name, by_name)}")
        return replace(self, nodes=tuple(node for node in self.nodes if node.name in wanted))


def from_hosts(hosts: Iterable[Host], site: Site, name: str = "hosts") -> Inventory:
    """An inventory of targets with one site; each host once."""
    once = distinct(reached(host, site) for host in hosts)
    return Inventory(name=name, nodes=tuple(InventoryNode(host=host, site=site) for host in once))


def opened_by(inventory: Inventory, key: Path) -> Inventory:
    """The same nodes with this private key in place of each site's `ssh.key`: so it also opens jump hosts, unless
    `ssh.jump_key` does."""

    def with_key(node: InventoryNode) -> InventoryNode:
        site = replace(node.site, ssh=replace(node.site.ssh, key=key))
        return InventoryNode(host=reached(replace(node.host, key=None, jump=None), site), site=site)

    return replace(inventory, nodes=tuple(map(with_key, inventory.nodes)))


def reached(host: Host, site: Site) -> Host:
    """The host, with the site's `ssh` for the parts that its target left out."""
    if host.is_local:
        return host
    ssh = site.ssh
    jump = parse_jump(ssh.jump, ssh.jump_key or ssh.key, ssh.known_hosts) if ssh.jump is not None else None
    return host.with_defaults(user=ssh.user, port=ssh.port, key=ssh.key, known_hosts=ssh.known_hosts, jump=jump)
