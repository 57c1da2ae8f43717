"""Inventory files: nodes, how each is reached and what its checks expect; and the nodes that a command line names.

```yaml
name: lab
site: h200x8.yaml                      # a site file, relative to this one; or its sections as a mapping
ssh: {user: ops, jump: bastion}        # any section of a site file, laid over it
exclude: [gpu07]
nodes:
  - gpu[01-08]
  - hosts: old[1-4]
    address: 10.0.0.[11-14]
    gpus: {count: 4, model: A800}      # sections for this group
overrides:
  gpu03: {network: {interface: eth1}}  # and for single nodes
```

Mappings merge key by key, lists replace: the site, then the file's own sections, then the group's, then the overrides
in their order. A setting in the target itself, as in `root@gpu01:2222`, wins over `ssh`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cluster.files import reader
from cluster.files.errors import UsageError, nearest
from cluster.files.reader import Node, merge, read_yaml
from cluster.inventory.hosts import SSH_PORT, Host, expand, expand_addresses, parse_hosts, read_hosts, this_machine
from cluster.inventory.nodes import Inventory, InventoryNode, from_hosts, opened_by, reached
from cluster.inventory.site import Site, load_site

T = TypeVar("T")

_SECTIONS = tuple(field.name for field in dataclasses.fields(Site) if field.name != "name")


@dataclass(kw_only=True, slots=True)
class _NodeDraft:
    """One node while its file is read: its target, and the site sections given for it so far."""

    host: Host
    place: str
    layers: list[Node]


def read_inventory(path: Path, site_file: Path | None = None) -> Inventory:
    """An inventory of either form: YAML by its ending, any other file is a plain list of targets.

    `site_file` replaces the site that the file names. Raises ValueError with file and line.
    """
    if path.suffix in (".yaml", ".yml"):
        return load_inventory(path, site_file)
    return from_hosts(read_hosts(path), load_site(site_file) if site_file else Site(), path.name)


def load_inventory(path: Path, site_file: Path | None = None) -> Inventory:
    """Read a YAML inventory; `site_file` replaces the site it names. Raises UsageError with file and line."""
    root = read_yaml(path, "inventory")
    top = root.mapping("the inventory")
    _check_keys(top, ("name", "site", "exclude", "nodes", "overrides"), "")
    if "nodes" not in top:
        raise UsageError(f"{path}: the inventory lacks nodes; add a list such as nodes: ['gpu[01-04]']")
    name = _text(top["name"], "name") if "name" in top else path.stem
    members: dict[str, _NodeDraft] = {}
    for group in top["nodes"].items():
        for member in _members(group):
            earlier = members.setdefault(member.host.name, member)
            if earlier is not member:
                where = f"{member.place}: {member.host.name} was already named at {earlier.place}"
                raise UsageError(f"{where}; name every node once")
    _exclude(members, top)
    for pattern, override in top["overrides"].mapping("overrides").items() if "overrides" in top else ():
        _override(members, pattern, override)
    if not members:
        raise UsageError(f"{path}: the inventory has no node left; name some under nodes, or exclude fewer")
    nodes = _nodes(_base(top, root, path, name, site_file), members.values())
    _check_different(nodes, members)
    return Inventory(name=name, nodes=nodes)


def _base(top: Mapping[str, Node], root: Node, path: Path, name: str, site_file: Path | None) -> Node:
    """The sections of all nodes: those of the site file or mapping, with the inventory's own over them."""
    base = Node({"name": Node(name, root.place)}, root.place)
    site = top.get("site")
    if site_file:
        base = merge(base, read_yaml(site_file, "site file"))
    elif site is not None and isinstance(site.value, str):
        file = path.parent / Path(site.value).expanduser()
        if not file.is_file():
            raise UsageError(f"{site.place}: there is no site file {file}; give its path relative to the inventory")
        base = merge(base, read_yaml(file, "site file"))
    elif site is not None:
        site.mapping("site")
        base = merge(base, site)
    return merge(base, _sections(top, root.place))


def _members(group: Node) -> list[_NodeDraft]:
    """The nodes of one item of `nodes`: a target, or a mapping with hosts and their sections."""
    if not isinstance(group.value, dict):
        return [_NodeDraft(host=host, place=group.place, layers=[]) for host in _hosts(group)]
    entries = group.value
    _check_keys(entries, ("hosts", "exclude", "address"), "")
    if "hosts" not in entries:
        raise UsageError(f"{group.place}: a group of nodes lacks hosts; add them, such as hosts: gpu[01-04]")
    hosts = [host for target in entries["hosts"].items() for host in _hosts(target)]
    if "address" in entries:
        addresses = _at(entries["address"], expand_addresses, "address")
        if len(addresses) != len(hosts):
            raise UsageError(
                f"{entries['address'].place}: address stands for {len(addresses)} addresses "
                f"but hosts for {len(hosts)} hosts; give one for each, before any are excluded"
            )
        hosts = [dataclasses.replace(host, address=address) for host, address in zip(hosts, addresses, strict=True)]
    layers = [_sections(entries, group.place)]
    members = {host.name: _NodeDraft(host=host, place=group.place, layers=list(layers)) for host in hosts}
    if len(members) < len(hosts):
        raise UsageError(f"{entries['hosts'].place}: hosts names a node twice; name every node once")
    _exclude(members, entries)
    return list(members.values())


def _override(members: Mapping[str, _NodeDraft], pattern: str, override: Node) -> None:
    """Lay the sections of one override over those its nodes have so far."""
    entries = override.mapping(f"overrides.{pattern}")
    _check_keys(entries, ("address",), f"overrides.{pattern}.")
    layer = _sections(entries, override.place)
    names = _names(pattern, override.place, members)
    addresses = _at(entries["address"], expand_addresses, "address") if "address" in entries else []
    if addresses and len(addresses) != len(names):
        raise UsageError(
            f"{entries['address'].place}: address stands for {len(addresses)} addresses "
            f"but {pattern} for {len(names)} nodes; give one for each"
        )
    for at, name in enumerate(names):
        members[name].layers.append(layer)
        if addresses:
            members[name].host = dataclasses.replace(members[name].host, address=addresses[at])


def _exclude(members: dict[str, _NodeDraft], entries: Mapping[str, Node]) -> None:
    """Remove the nodes that `exclude` names. An unknown name is an error: a mistyped one would leave a node in."""
    if "exclude" in entries:
        for item in entries["exclude"].items():
            for name in _names(_text(item, "exclude"), item.place, members):
                del members[name]


def _nodes(base: Node, members: Iterable[_NodeDraft]) -> tuple[InventoryNode, ...]:
    """Finished nodes; those with the same sections share one site."""
    sites: dict[tuple[int, ...], Site] = {}
    nodes = []
    for member in members:
        said = tuple(id(layer) for layer in member.layers)
        if said not in sites:
            merged = base
            for layer in member.layers:
                merged = merge(merged, layer)
            sites[said] = reader.build(Site, merged)
        nodes.append(InventoryNode(host=reached(member.host, sites[said]), site=sites[said]))
    return tuple(nodes)


def _check_different(nodes: Iterable[InventoryNode], members: Mapping[str, _NodeDraft]) -> None:
    """Two names for one machine would give it twice the ranks."""
    seen: dict[tuple[object, ...], str] = {}
    for node in nodes:
        host = node.host
        first = seen.setdefault((host.address.lower(), host.port or SSH_PORT, host.jump), node.name)
        if first != node.name:
            raise UsageError(
                f"{members[node.name].place}: {node.name} and {first} are both {host.address} "
                f"port {host.port or SSH_PORT}; give every node an address of its own"
            )


def _sections(entries: Mapping[str, Node], place: str) -> Node:
    """The entries that are sections of a site."""
    return Node({key: entry for key, entry in entries.items() if key in _SECTIONS}, place)


def _check_keys(entries: Mapping[str, Node], own: Collection[str], prefix: str) -> None:
    known = (*own, *_SECTIONS)
    for key, entry in entries.items():
        if key not in known:
            raise UsageError(f"{entry.place}: unknown key {prefix}{key}; {nearest(key, known)}")


def _names(pattern: str, place: str, members: Mapping[str, _NodeDraft]) -> list[str]:
    """Names of the nodes a pattern stands for. Raises UsageError for a wrong range and for an unknown name."""
    names = [pattern] if pattern in members else _at(Node(pattern, place), expand, "the name")
    for name in names:
        if name not in members:
            raise UsageError(f"{place}: {name} is no node named above; {nearest(name, members)}")
    return names


def _hosts(target: Node) -> list[Host]:
    return _at(target, parse_hosts, "a node")


def _at(node: Node, read: Callable[[str], T], what: str) -> T:
    """A text parsed by `read`; an error names the text's place."""
    text = _text(node, what)
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{node.place}: {error}") from None


def _text(node: Node, what: str) -> str:
    if isinstance(node.value, str):
        return node.value
    hint = "; a range in a list is written in quotes, 'gpu[01-04]'" if isinstance(node.value, list) else ""
    raise UsageError(f"{node.place}: {what} is {node.describe()}; expected text{hint}")


def named_nodes(arguments: argparse.Namespace) -> Inventory:
    """The nodes that the options of `node_arguments` name; this machine when they name none. Raises UsageError."""
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
    return opened_by(inventory, arguments.key)


def _inventory(targets: Sequence[str], site_file: Path | None) -> Inventory:
    site = load_site(site_file) if site_file else Site()
    if not targets:
        return Inventory(name="this machine", nodes=(InventoryNode(host=this_machine(), site=site),))
    first, *others = targets
    if _is_inventory(first):
        inventory = read_inventory(Path(first), site_file)
        return inventory.select(others) if others else inventory
    if misplaced := next(filter(_is_inventory, others), None):
        raise UsageError(f"{misplaced} is a file behind hosts; give one inventory, then the names of nodes in it")
    return from_hosts([host for target in targets for host in parse_hosts(target)], site)


def _is_inventory(target: str) -> bool:
    return target.endswith((".yaml", ".yml")) or Path(target).is_file()
