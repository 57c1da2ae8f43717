"""Reports as text: a table for people, JSON lines for programs, bare names for the next command."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cluster.health import NodeReport
from cluster.probe import printable
from cluster.verdict import LEVELS

_HEADER = ("NODE", "CHECK", "VERDICT", "ACTION", "FINDING")


def table(reports: Sequence[NodeReport]) -> str:
    """One row per node and check, then one line that counts."""
    rows = [_HEADER]
    for report in reports:
        for number, (name, verdict) in enumerate(report.verdicts.items()):
            node = report.host.name if number == 0 else ""
            rows.append((node, name, verdict.level, verdict.action, verdict.summary))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER) - 1)]
    lines = []
    for row in rows:
        cells = [printable(cell) for cell in row]
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
        lines.append("  ".join([*padded, cells[-1]]).rstrip())
    return "\n".join([*lines, "", summary_line(reports)])


def summary_line(reports: Sequence[NodeReport]) -> str:
    """`4 nodes: 2 ok, 1 warn, 1 unknown; 2 usable`."""
    levels = Counter(report.level for report in reports)
    counts = ", ".join(f"{levels[level]} {level}" for level in LEVELS if levels[level])
    nodes = "1 node" if len(reports) == 1 else f"{len(reports)} nodes"
    return f"{nodes}: {counts}; {sum(report.usable for report in reports)} usable"


def json_line(report: NodeReport) -> str:
    """One node as one line of JSON; keys are only ever added."""
    host = report.host
    node: dict[str, Any] = {
        "node": host.name,
        "target": host.target or None,
        "verdict": report.level,
        "action": report.action,
        "usable": report.usable,
        "seconds": round(report.seconds, 3),
        "checks": {
            name: {
                "verdict": verdict.level,
                "action": verdict.action,
                "busy": verdict.busy,
                "summary": verdict.summary,
                "facts": dict(verdict.facts),
            }
            for name, verdict in report.verdicts.items()
        },
    }
    return json.dumps(node, allow_nan=False)


def why_not(report: NodeReport) -> str:
    """One line that says why a node is not usable."""
    reasons = [
        f"{name} {verdict.level}: {verdict.summary}"
        for name, verdict in report.verdicts.items()
        if verdict.busy or verdict.level in ("fail", "unknown")
    ]
    return printable(f"{report.host.name} is not usable; " + "; ".join(reasons))
