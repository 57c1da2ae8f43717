"""A table on the terminal that fills as the nodes answer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from cluster.health.nodes import NodeReport
from cluster.inventory.nodes import InventoryNode
from cluster.probing.verdict import Level
from cluster.render.text import headline

if TYPE_CHECKING:
    from rich.table import Table

Show = Callable[[NodeReport], None]
_STYLES: dict[Level, str] = {"ok": "green", "warn": "yellow", "unknown": "magenta", "fail": "bold red"}


@contextlib.contextmanager
def live_table(nodes: Sequence[InventoryNode]) -> Iterator[Show]:
    """Yields a function to call with each report. It shows nothing where stdout is no terminal or rich is not
    installed.

    The live table is removed at the end; the caller then prints the plain one.
    """
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError:
        yield lambda report: None
        return
    console = Console(file=sys.stdout, emoji=False)
    if not console.is_terminal:
        yield lambda report: None
        return
    reports: dict[str, NodeReport] = {}
    with Live(progress_table(nodes, reports), console=console, transient=True, refresh_per_second=8) as live:

        def show(report: NodeReport) -> None:
            reports[report.host.name] = report
            live.update(progress_table(nodes, reports))

        yield show


def progress_table(nodes: Sequence[InventoryNode], reports: dict[str, NodeReport]) -> Table:
    """One row per node: its verdict when it has answered, a placeholder until then."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("node", "verdict", "action"):
        table.add_column(heading, no_wrap=True)
    table.add_column("finding", overflow="ellipsis", no_wrap=True)
    table.caption = f"{len(reports)} of {len(nodes)} nodes have answered"
    for node in nodes:
        report = reports.get(node.name)
        if report is None:
            table.add_row(Text(node.name), Text("...", style="dim"), "", "")
        else:
            level = Text(report.level, style=_STYLES[report.level])
            table.add_row(Text(node.name), level, Text(report.action), Text(headline(report)))
    return table
