"""Findings of many nodes in few lines: the part to show, nodes with the same finding together, faults first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cluster.health.nodes import NodeReport
from cluster.inventory.hosts import Host
from cluster.inventory.ranges import fold
from cluster.probing.verdict import LEVELS, Verdict, worst_level

_NAMED = 4  # nodes whose names no range can express


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The part of the findings that is shown. Counts and exit codes are of everything that was looked at."""

    nodes: frozenset[str] = frozenset()  # empty: all
    checks: frozenset[str] = frozenset()  # empty: all
    only_faults: bool = False

    def verdicts(self, report: NodeReport) -> list[tuple[str, Verdict]]:
        """The verdicts of a node that are shown, the worst first."""
        if self.nodes and report.host.name not in self.nodes:
            return []
        return [
            (name, verdict)
            for name, verdict in worst_first(report)
            if (not self.checks or name in self.checks) and not (self.only_faults and verdict.level == "ok")
        ]

    def holds(self, report: NodeReport) -> bool:
        """True for a node of which at least the name is shown."""
        return bool(self.verdicts(report)) or not (self.only_faults or self.nodes)

    def shown(self, reports: Iterable[NodeReport]) -> list[tuple[NodeReport, list[tuple[str, Verdict]]]]:
        """Nodes of which something is shown, those with the worst first, and what is shown of each."""
        found = [(report, verdicts) for report in reports if (verdicts := self.verdicts(report))]
        return sorted(found, key=lambda one: -LEVELS.index(worst_level(verdict.level for _, verdict in one[1])))


EVERYTHING = Selection()


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


def faults(reports: Iterable[NodeReport], selection: Selection = EVERYTHING) -> list[Group]:
    """Everything that is not ok, the worst first. A finding of many nodes is one row, whatever else each of them has;
    findings of the same nodes stand together. A node's own name in a sentence does not make it another finding."""
    found: dict[tuple[str, str, str, str], list[tuple[str, Verdict]]] = {}
    for report, verdicts in selection.shown(reports):
        for name, verdict in verdicts:
            if verdict.level != "ok":
                key = (name, verdict.level, verdict.action, _nameless(verdict.summary, report.host))
                found.setdefault(key, []).append((report.host.name, verdict))
    groups: dict[tuple[str, ...], list[tuple[str, Verdict]]] = {}
    for (name, _, _, summary), cases in found.items():
        shown = cases[0][1] if len(cases) == 1 else replace(cases[0][1], summary=summary)
        groups.setdefault(tuple(node for node, _ in cases), []).append((name, shown))
    return [Group(nodes=nodes, rows=tuple(rows)) for nodes, rows in groups.items()]


def _nameless(summary: str, host: Host) -> str:
    """The sentence with `<node>` for the node's own name, address and target."""
    own = sorted({host.target, host.address, host.name} - {""}, key=len, reverse=True)
    return re.sub(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, own))})(?![\w-]|\.\w)", "<node>", summary)


def well(reports: Iterable[NodeReport], selection: Selection = EVERYTHING) -> list[Group]:
    """One row for all nodes with the same GPUs: how many of their checks are ok."""
    counts: dict[str, dict[str, int]] = {}
    for report in reports:
        good = [name for name, verdict in selection.verdicts(report) if verdict.level == "ok"]
        if good:
            gpus = report.verdicts.get("gpus")
            words = gpus.summary if gpus and gpus.level == "ok" else ""
            counts.setdefault(words, {})[report.host.name] = len(good)
    groups = []
    for words, found in counts.items():
        least, most = min(found.values()), max(found.values())
        checks = f"{least if least == most else f'{least}-{most}'} check{'s' if most > 1 else ''}"
        groups.append(Group(nodes=tuple(found), rows=((checks, Verdict(level="ok", summary=words)),)))
    return groups


def worst_first(report: NodeReport) -> list[tuple[str, Verdict]]:
    """The verdicts of a node by how serious they are; equal ones stay in their order."""
    return sorted(report.verdicts.items(), key=lambda item: -LEVELS.index(item[1].level))


def of_sites(reports: Sequence[NodeReport]) -> str:
    """` of h200x8`, the names of the sites that the nodes were judged by; empty for a machine that has none."""
    names = sorted({report.site for report in reports if report.site})
    return f" of {' and '.join(names)}" if names else ""
