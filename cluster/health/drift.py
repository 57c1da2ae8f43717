"""Versions that differ between nodes: work that spans them may fail in ways no node shows alone."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from cluster.health.nodes import NodeReport
from cluster.probing.verdict import Action, Level, Verdict, merge

_VERSIONS = "gpu_versions"
# What is compared, how bad a difference is. Firmware needs hands, software an upgrade.
_COMPARED: tuple[tuple[str, str, Level, Action], ...] = (
    ("driver", "driver", "warn", "monitor"),
    ("cuda", "CUDA", "warn", "monitor"),
    ("vbios", "VBIOS", "fail", "isolate"),
)


def judge(reports: Sequence[NodeReport]) -> dict[str, Verdict]:
    """A verdict by node name, for nodes that have others with the same GPU models to be compared with.

    The value most nodes have is right, and those without it are told; with no such majority all of them are.
    """
    verdicts: dict[str, Verdict] = {}
    for group in _alike(reports):
        if len(group) > 1:
            for node in group:
                verdicts[node] = merge(_compare(node, group, *compared) for compared in _COMPARED)
    return verdicts


def _alike(reports: Sequence[NodeReport]) -> list[dict[str, Mapping[str, object]]]:
    """Facts by node, of nodes with the same GPU models together."""
    groups: dict[str, dict[str, Mapping[str, object]]] = defaultdict(dict)
    for report in reports:
        verdict = report.verdicts.get(_VERSIONS)
        vbios = verdict.facts.get("vbios") if verdict else None
        if verdict and isinstance(vbios, Mapping):
            groups[json.dumps(sorted(vbios))][report.host.name] = verdict.facts
    return list(groups.values())


def _compare(
    node: str, group: Mapping[str, Mapping[str, object]], fact: str, word: str, level: Level, action: Action
) -> Verdict:
    """One fact of one node beside those of its group."""
    told = {name: _text(facts.get(fact)) for name, facts in group.items()}
    counts = Counter(told.values())
    (common, times), *_ = counts.most_common(1)
    if len(counts) == 1 or (times > len(group) / 2 and told[node] == common):
        return Verdict(level="ok", summary=f"as {len(group) - 1} other nodes with the same GPUs")
    if times > len(group) / 2:
        others = f"{times} of {len(group)} nodes have {common}"
    else:
        others = "others have " + ", ".join(sorted(set(told.values()) - {told[node]}))
    return Verdict(level=level, summary=f"{word} {told[node]}, but {others}", action=action)


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(" and ".join(map(str, versions)) for _, versions in sorted(value.items()))
    return "unstated" if value is None else str(value)
