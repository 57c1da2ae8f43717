"""Which nodes must not be used now, and why: the checks of `burst check`, each node by its own site."""

from __future__ import annotations

from collections.abc import Sequence

from cluster import checks, render
from cluster.health.nodes import check_nodes
from cluster.inventory.nodes import Node
from cluster.transport.runner import Connect


def unfit_nodes(nodes: Sequence[Node], connect: Connect, timeout_seconds: float) -> dict[str, str]:
    """One sentence for every node that is not usable, by name. A node that cannot be asked is one of them."""
    reports = check_nodes(nodes, connect, checks.discover(), timeout_seconds)
    return {report.host.name: render.why_not(report) for report in reports if not report.usable}
