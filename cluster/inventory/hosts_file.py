"""An inventory from an /etc/hosts style file, or from a plain list of hosts."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cluster.files.errors import UsageError
from cluster.files.filesystem import read_text
from cluster.inventory.hosts import Host, distinct, parse_hosts, read_hosts
from cluster.inventory.ranges import fold

_HEADER = """\
# Imported from {source}: {count} nodes. docs/cluster.md lists every key of this file. site: a site file beside this
# one, or its sections; without it nothing is expected of the nodes.
"""


def import_hosts(path: Path) -> list[Host]:
    """Hosts of an /etc/hosts style file (address, name, aliases) or of a plain list (see `read_hosts`).

    A file is of the first kind when each of its lines begins with an IP address and goes on with a name. Of that kind,
    the entries every system has are left out: loopback, link-local and multicast addresses. Raises ValueError.
    """
    lines = read_text(path, "hosts file").splitlines()
    entries = [(number, fields) for number, line in enumerate(lines, 1) if (fields := line.partition("#")[0].split())]
    if not entries or not all(len(fields) > 1 and _is_address(fields[0]) for _, fields in entries):
        return [replace(host, name=_called(host)) for host in distinct(read_hosts(path))]
    hosts: dict[str, Host] = {}
    for number, (address, name, *_) in entries:
        parsed = ipaddress.ip_address(address)
        if parsed.is_loopback or parsed.is_link_local or parsed.is_multicast or parsed.is_unspecified:
            continue
        if name in hosts and hosts[name].address != address:
            raise UsageError(
                f"{path}:{number}: {name} has the address {address}, but {hosts[name].address} before; "
                "keep the one that SSH listens on"
            )
        try:
            parse_hosts(name)
        except ValueError as error:
            raise UsageError(f"{path}:{number}: {error}") from None
        hosts[name] = Host(name=name, address=address)
    if not hosts:
        raise UsageError(f"{path} names no node: its addresses are all this machine's own; add the nodes' lines")
    return list(hosts.values())


def render_inventory(hosts: Sequence[Host], source: str) -> str:
    """An inventory file of these hosts, numbered names written as ranges; `source` is named in its comment."""
    nodes = [_group(group) for group in _groups(hosts)]
    text = yaml.safe_dump({"nodes": nodes}, sort_keys=False, width=120, allow_unicode=True)
    return _HEADER.format(source=" ".join(source.split()), count=len(hosts)) + text


def _groups(hosts: Sequence[Host]) -> list[list[Host]]:
    """Runs of hosts that one item of `nodes` can express."""
    groups: list[list[Host]] = []
    for host in hosts:
        if groups and _folded([*groups[-1], host]):
            groups[-1].append(host)
        else:
            groups.append([host])
    return groups


def _folded(group: Sequence[Host]) -> tuple[str, str] | None:
    """One pattern for the names and one for the addresses; None when there are none, or the logins differ."""
    if len({(host.user, host.port) for host in group}) > 1:
        return None
    names, addresses = fold([host.name for host in group]), fold([host.address for host in group])
    return (names, addresses) if names and addresses else None


def _group(group: Sequence[Host]) -> Any:
    """One item of `nodes`: a target, or a mapping where the address is not the name."""
    folded = _folded(group)
    assert folded is not None, group
    names, addresses = folded
    ssh = {key: value for key, value in (("user", group[0].user), ("port", group[0].port)) if value}
    if names == addresses and not ssh:
        return names
    item: dict[str, Any] = {"hosts": names}
    if names != addresses:
        item["address"] = addresses
    return {**item, "ssh": ssh} if ssh else item


def _called(host: Host) -> str:
    """A name that an inventory can hold: where hosts share one, `distinct` replaced it by the whole target."""
    return host.name if host.name == host.address else re.sub(r"[^A-Za-z0-9_.]+", "-", host.name)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
