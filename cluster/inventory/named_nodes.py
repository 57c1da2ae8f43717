"""The nodes that a command line names, with the options of `node_arguments`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cluster.files.errors import UsageError
from cluster.inventory.file import read_inventory
from cluster.inventory.hosts import parse_hosts, this_machine
from cluster.inventory.nodes import Inventory, Node, from_hosts, opened_by
from cluster.inventory.site import Site, load_site


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
    return opened_by(inventory, arguments.key)


def _inventory(targets: Sequence[str], site_file: Path | None) -> Inventory:
    site = load_site(site_file) if site_file else Site()
    if not targets:
        return Inventory(name="this machine", nodes=(Node(host=this_machine(), site=site),))
    first, *others = targets
    if _is_file(first):
        inventory = read_inventory(Path(first), site_file)
        return inventory.select(others) if others else inventory
    if misplaced := next(filter(_is_file, others), None):
        raise UsageError(f"{misplaced} is a file behind hosts; give one inventory, then the names of nodes in it")
    return from_hosts([host for target in targets for host in parse_hosts(target)], site)


def _is_file(target: str) -> bool:
    return target.endswith((".yaml", ".yml")) or Path(target).is_file()
