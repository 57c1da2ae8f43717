"""Findings of many nodes in few lines: nodes with the same finding together, faults first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cluster.health.nodes import NodeReport
from cluster.inventory.hosts import Host
from cluster.inventory.ranges import fold
from cluster.probing.verdict import LEVELS, Verdict

_NAMED = 4  # nodes whose names no range can express


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Nodes with the same faults, or with the same GPUs and no fault shown here."""

    nodes: tuple[str, ...]
    rows: tuple[tuple[str, Verdict], ...]  # name of a check, or number of checks, and the verdict

    @property
    def name(self) -> str:
        """`gpu[01-64]`; where no range can express them, some of the names."""
        folded = fold(self.nodes)
        if folded is not None:
            return folded
        more = len(self.nodes) - _NAMED
        return ", ".join(self.nodes[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def faults(reports: Iterable[NodeReport]) -> list[Group]:
    """Everything that is not ok, the worst first. A finding of many nodes is one row, whatever else each of them has;
    findings of the same nodes stand together. A node's own name in a sentence does not make it another finding."""
    found: dict[tuple[str, str, str, str], list[tuple[str, Verdict]]] = {}
    for report, verdicts in shown(reports, only_faults=True):
        for name, verdict in verdicts:
            key = (name, verdict.level, verdict.action, _nameless(verdict.summary, report.host))
            found.setdefault(key, []).append((report.host.name, verdict))
    groups: dict[tuple[str, ...], list[tuple[str, Verdict]]] = {}
    for (name, _, _, summary), cases in found.items():
        row = cases[0][1] if len(cases) == 1 else replace(cases[0][1], summary=summary)
        groups.setdefault(tuple(node for node, _ in cases), []).append((name, row))
    return [Group(nodes=nodes, rows=tuple(rows)) for nodes, rows in groups.items()]


def _nameless(summary: str, host: Host) -> str:
    """The sentence with `<node>` for the node's own name, address and target."""
    own = sorted({host.target, host.address, host.name} - {""}, key=len, reverse=True)
    return re.sub(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, own))})(?![\w-]|\.\w)", "<node>", summary)


def well(reports: Iterable[NodeReport]) -> list[Group]:
    """One row for all nodes with the same GPUs: how many of their checks are ok."""
    counts: dict[str, dict[str, int]] = {}
    for report in reports:
        good = sum(verdict.level == "ok" for verdict in report.verdicts.values())
        if good:
            gpus = report.verdicts.get("gpus")
            words = gpus.summary if gpus and gpus.level == "ok" else ""
            counts.setdefault(words, {})[report.host.name] = good
    groups = []
    for words, found in counts.items():
        least, most = min(found.values()), max(found.values())
        checks = f"{least if least == most else f'{least}-{most}'} check{'s' if most > 1 else ''}"
        groups.append(Group(nodes=tuple(found), rows=((checks, Verdict(level="ok", summary=words)),)))
    return groups


def shown(
    reports: Iterable[NodeReport], *, only_faults: bool = False
) -> list[tuple[NodeReport, list[tuple[str, Verdict]]]]:
    """Nodes with their verdicts, those with the worst first; without those that are ok where `only_faults`."""
    ranked = sorted(reports, key=lambda report: -LEVELS.index(report.level))
    found = [(report, worst_first(report, only_faults=only_faults)) for report in ranked]
    return [(report, verdicts) for report, verdicts in found if verdicts]


def worst_first(report: NodeReport, *, only_faults: bool = False) -> list[tuple[str, Verdict]]:
    """The verdicts of a node by how serious they are; equal ones stay in their order."""
    found = sorted(report.verdicts.items(), key=lambda item: -LEVELS.index(item[1].level))
    return [(name, verdict) for name, verdict in found if not only_faults or verdict.level != "ok"]


def of_sites(reports: Sequence[NodeReport]) -> str:
    """` of h200x8`, the names of the sites that the nodes were judged by; empty for a machine that has none."""
    names = sorted({report.site for report in reports if report.site})
    return f" of {' and '.join(names)}" if names else ""
