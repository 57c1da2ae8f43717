"""`burst nodes`: an inventory with its ranges, exclusions and overrides expanded; or a hosts file as an inventory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.inventory.hosts import Host
    from cluster.inventory.nodes import Inventory, InventoryNode


class NodesCommand:
    help = "expand an inventory, or turn an /etc/hosts style file or a plain list into one"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("inventory", nargs="?", type=Path, metavar="INVENTORY", help="YAML, or a plain list")
        parser.add_argument("nodes", nargs="*", metavar="NODE", help="only these of it, ranges as gpu[01-04]")
        parser.add_argument("--site", type=Path, metavar="FILE", help="a site file instead of the one it names")
        parser.add_argument(
            "--import", dest="source", type=Path, metavar="FILE", help="print the inventory of a hosts file instead"
        )
        output = parser.add_mutually_exclusive_group()
        output.add_argument("--json", action="store_true", help="one JSON list instead of a table")
        output.add_argument("--names", action="store_true", help="only the names, one per line")

    def run(self, arguments: argparse.Namespace) -> int:
        from cluster.files.errors import UsageError

        if (arguments.inventory is None) == (arguments.source is None):
            raise UsageError("burst nodes takes one file; give an INVENTORY to expand or --import FILE to convert")
        try:
            if arguments.source:
                self._import(arguments)
                return 0
            from cluster.inventory.file import read_inventory

            inventory = read_inventory(arguments.inventory, arguments.site)
            inventory = inventory.select(arguments.nodes) if arguments.nodes else inventory
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(str(error)) from None
        if arguments.names:
            print("\n".join(node.name for node in inventory.nodes))
        elif arguments.json:
            print(json.dumps([_as_json(node) for node in inventory.nodes], indent=1, default=str))
        else:
            _print_table(inventory)
        return 0

    def _import(self, arguments: argparse.Namespace) -> None:
        from cluster.files.errors import UsageError
        from cluster.inventory.hosts_file import import_hosts, render_inventory

        if arguments.json or arguments.names or arguments.site:
            raise UsageError("--import prints an inventory file; give it alone, then expand what it printed")
        print(render_inventory(import_hosts(arguments.source), str(arguments.source)), end="")


def _as_json(node: InventoryNode) -> dict[str, Any]:
    """All fields of a node. Of the environment only the names: values may be secrets."""
    from dataclasses import asdict

    site = asdict(node.site)
    login = site.pop("ssh")
    site["environment"] = sorted(site["environment"])
    host = node.host
    return {
        "name": node.name,
        "address": host.address,
        "user": host.user,
        "port": host.port,
        "key": str(host.key) if host.key else None,
        "jump": login["jump"],
        "site": site,
    }


def _route(host: Host) -> str:
    """The jump hosts, first to last."""
    return f"{_route(host.jump)} > {host.jump.target}".removeprefix(" > ") if host.jump else ""


def _print_table(inventory: Inventory) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from cluster.files.errors import counted
    from harness.base.terminal import stdout_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows = [_row(node) for node in inventory.nodes]
    headings = ("node", "target", "through", "GPUs", "network", "image", "variables")
    used = [
        at
        for at, heading in enumerate(headings)
        if heading in ("node", "target", "GPUs") or any(row[at] for row in rows)
    ]
    for at in used:
        table.add_column(headings[at], overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[at]) for at in used))
    console = stdout_console()
    console.print(table)
    sites = sorted({node.site.name for node in inventory.nodes})
    console.print(Text(f"{inventory.name}: {counted(len(inventory.nodes), 'node')}, site {', '.join(sites)}"))


def _row(node: InventoryNode) -> tuple[str, ...]:
    """One line of the table; a cell without a value is empty."""
    site = node.site
    count = "any" if site.gpus.count is None else str(site.gpus.count)
    adapters = "" if site.network.hcas is None else ",".join(site.network.hcas) or "no HCA"
    return (
        node.name,
        node.host.target,
        _route(node.host),
        f"{count} x {site.gpus.model}" if site.gpus.model else count,
        " ".join(filter(None, [site.network.interface, adapters])),
        (site.container.image or "") if site.container.engine != "none" else "",
        ", ".join(sorted(site.environment)),
    )


COMMAND = NodesCommand()
