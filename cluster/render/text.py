"""Reports as text: a table for people, JSON lines for programs, one line as a Nagios plugin prints it.

Source: Nagios plugin development guidelines, "Plugin Output" and "Performance data".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cluster.files.errors import counted
from cluster.health.nodes import NodeReport
from cluster.probing.probe import printable
from cluster.probing.verdict import LEVELS, Level, worst_level
from cluster.render.grouping import Group, faults, of_sites, shown, well, worst_first

SCHEMA = 1  # of a line of JSON; keys may be added to a version, another meaning or a lost key is a new one
_HEADER = ("NODE", "CHECK", "VERDICT", "ACTION", "FINDING")


def table(reports: Sequence[NodeReport], *, only_faults: bool = False, every_check: bool = False) -> str:
    """Faults first, nodes with the same ones together; then one row for what is well, and one line that counts.

    `only_faults`: nothing that is ok but in the count. `every_check`: a row for each check of each node instead.
    """
    rows = [_HEADER]
    if every_check:
        groups = [
            Group(nodes=(report.host.name,), rows=tuple(verdicts))
            for report, verdicts in shown(reports, only_faults=only_faults)
        ]
    else:
        groups = [*faults(reports), *([] if only_faults else well(reports))]
    for group in groups:
        for number, (name, verdict) in enumerate(group.rows):
            rows.append((group.name if number == 0 else "", name, verdict.level, verdict.action, verdict.summary))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER) - 1)]
    lines = []
    for row in rows if groups else ():
        cells = [printable(cell) for cell in row]
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
        lines.append("  ".join([*padded, cells[-1]]).rstrip())
    return "\n".join([*lines, *([""] if lines else []), summary_line(reports)])


def summary_line(reports: Sequence[NodeReport]) -> str:
    """`4 nodes of h200x8: 2 ok, 1 warn, 1 unknown; 2 usable`."""
    levels = Counter(report.level for report in reports)
    counts = ", ".join(f"{levels[level]} {level}" for level in LEVELS if levels[level])
    nodes = counted(len(reports), "node")
    return printable(f"{nodes}{of_sites(reports)}: {counts}; {sum(report.usable for report in reports)} usable")


def headline(report: NodeReport) -> str:
    """The most serious finding of a node in one line, busy before other warnings."""
    _, verdict = max(report.verdicts.items(), key=lambda item: (LEVELS.index(item[1].level), item[1].busy))
    if verdict.level == "ok":
        return f"{len(report.verdicts)} checks ok"
    others = sum(other.level != "ok" for other in report.verdicts.values()) - 1
    name = next(name for name, other in report.verdicts.items() if other is verdict)
    return printable(f"{name}: {verdict.summary}" + (f" (and {others} more)" if others else ""))


def why_not(report: NodeReport) -> str:
    """One line with the reasons why a node is not usable, the worst first."""
    reasons = [
        f"{name} {verdict.level}: {verdict.summary}"
        for name, verdict in worst_first(report)
        if verdict.busy or report.decides(name)
    ]
    return printable(f"{report.host.name} is not usable; " + "; ".join(reasons))


def json_line(report: NodeReport, *, only_faults: bool = False) -> str:
    """One node as one line of JSON, with all checks or those that are not ok: node.schema.json, whose version `schema`
    names."""
    host = report.host
    node: dict[str, Any] = {
        "schema": SCHEMA,
        "node": host.name,
        "target": host.target or None,
        "site": report.site or None,
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
            if not only_faults or verdict.level != "ok"
        },
    }
    return json.dumps(node, allow_nan=False)


_WORDS: dict[Level, str] = {"ok": "OK", "warn": "WARNING", "fail": "CRITICAL", "unknown": "UNKNOWN"}
_NODES_NAMED = 3  # a pager shows little more


def nagios_line(reports: Sequence[NodeReport]) -> str:
    """`NODES CRITICAL - 3 of 4 usable; gpu02: gpus: 7 x NVIDIA H200, ... | usable=3;;;0;4 ok=3 ...`."""
    usable = sum(report.usable for report in reports)
    bad = sorted((report for report in reports if report.level != "ok"), key=lambda one: -LEVELS.index(one.level))
    words = [f"{usable} of {len(reports)} usable"]
    words += [f"{report.host.name}: {headline(report)}" for report in bad[:_NODES_NAMED]]
    if len(bad) > _NODES_NAMED:
        words.append(f"and {len(bad) - _NODES_NAMED} more nodes")
    text = "; ".join(words).replace("|", "/")  # a bar begins the performance data
    levels = Counter(report.level for report in reports)
    data = [f"usable={usable};;;0;{len(reports)}"]
    data += [f"{level}={levels[level]};;;0;{len(reports)}" for level in LEVELS]
    data.append(f"busy={sum(report.busy for report in reports)};;;0;{len(reports)}")
    data.append(f"seconds={max((report.seconds for report in reports), default=0.0):.3f}s;;;0")
    return f"NODES {_WORDS[worst_level(report.level for report in reports)]} - {text} | {' '.join(data)}"
