"""Differences between nodes that are to work together: versions as a verdict on each node, networks as sentences."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.discovery.facts import NodeFacts
from cluster.discovery.hcas import HcaChoice, InterfaceChoice
from cluster.files.errors import counted
from cluster.probing.verdict import Action, Level, Verdict, merge

_VERSIONS = "gpu_versions"  # the check whose facts name the GPUs of a node
_GPUS = "gpus"  # the check whose facts have their UUIDs
# Check, its fact, the fact's name in a sentence, and the verdict on a difference.
_COMPARED: tuple[tuple[str, str, str, Level, Action], ...] = (
    (_VERSIONS, "driver", "driver", "warn", "monitor"),
    (_VERSIONS, "cuda", "CUDA", "warn", "monitor"),
    (_VERSIONS, "vbios", "VBIOS", "fail", "isolate"),
    ("host_versions", "kernel", "kernel", "warn", "monitor"),
    ("host_versions", "ofed", "OFED", "warn", "monitor"),
    ("adapters", "firmware", "adapter firmware", "warn", "monitor"),
    ("adapters", "mtu", "MTU of the adapters", "warn", "monitor"),
    ("interface", "mtu", "MTU of the interface", "warn", "monitor"),
    ("pkey", "pkeys", "partition keys", "warn", "monitor"),
)
READS = tuple(dict.fromkeys([*(check for check, *_ in _COMPARED), _GPUS]))  # the checks that must have run
_MAX_NAMES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeNetwork:
    """One node, as far as it must match the others. Interface names are not part of that: each node has its own."""

    facts: NodeFacts
    interface: InterfaceChoice
    hcas: HcaChoice


def version_drift(checked: Mapping[str, Mapping[str, Verdict]]) -> dict[str, Verdict]:
    """A verdict by node name, from the verdicts of every node by check; nodes with the same GPU models are compared.

    The value most nodes have is right, and nodes with another one are reported; without a majority all of them are.
    A node that has GPUs of an earlier one fails: it is the same host.
    """
    verdicts: dict[str, Verdict] = {}
    for gpus, group in _same_gpus(checked):
        compared = [_compare(group, *fact) for fact in _COMPARED]
        for node in group if len(group) > 1 else ():
            like = f"as {counted(len(group) - 1, 'other node')} {gpus}"
            found = [verdict[node] for verdict in compared if node in verdict]
            verdicts[node] = merge(found) if found else Verdict(level="ok", summary=like)
    return verdicts | named_twice(checked)


def named_twice(checked: Mapping[str, Mapping[str, Verdict]]) -> dict[str, Verdict]:
    """A failure for every node that has GPUs of an earlier one, from the verdicts of every node by check.

    The UUIDs of GPUs tell, because containers of one host have names and addresses of their own.
    """
    owner: dict[str, str] = {}
    found: dict[str, Verdict] = {}
    for node, verdicts in checked.items():
        gpus = verdicts[_GPUS].facts.get("uuids") if _GPUS in verdicts else None
        uuids = gpus if isinstance(gpus, list) else []
        if first := next((owner[uuid] for uuid in uuids if uuid in owner), None):
            summary = f"has the same GPUs as {first}, so both are one host; name it once"
            found[node] = Verdict(level="fail", summary=summary, action="isolate")
        owner |= {uuid: node for uuid in uuids if uuid not in owner}
    return found


def network_drift(nodes: Sequence[NodeNetwork]) -> list[str]:
    """One sentence for every kind of difference. A node without the value is not compared."""

    def differ(problem: str, value_of: Callable[[NodeNetwork], str | None]) -> list[str]:
        groups = _by_value({node.facts.node: value_of(node) for node in nodes})
        if len(groups) < 2:
            return []
        return [f"{problem}: " + "; ".join(f"{_names(names)} {value}" for value, names in groups.items())]

    return [
        *differ("HCA sets differ, with which NCCL can hang without an error", _hcas),
        *differ("HCA rates or link layers differ, so the slowest sets the pace", _rates),
        *differ("MTUs of the socket interfaces differ, so large packets can get lost", _mtu),
        *differ("GPUs differ", _gpus),
        *differ("NVIDIA drivers differ", lambda node: node.facts.driver),
        *differ("settings in nccl.conf differ", _nccl_conf),
        *differ("NCCL versions differ, which NCCL refuses or hangs on", lambda node: node.facts.nccl),
    ]


def _by_value(found: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Names of nodes by their value, the most frequent value first, equals in the nodes' order. None is left out."""
    groups: dict[str, list[str]] = defaultdict(list)
    for node, value in found.items():
        if value is not None:
            groups[value].append(node)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _same_gpus(checked: Mapping[str, Mapping[str, Verdict]]) -> list[tuple[str, dict[str, Mapping[str, Verdict]]]]:
    """The GPUs in words, and the verdicts by node, of nodes with the same GPU models together; those without as well.

    A node whose versions could not be read is in no group.
    """
    groups: dict[str, dict[str, Mapping[str, Verdict]]] = defaultdict(dict)
    for node, verdicts in checked.items():
        versions = verdicts.get(_VERSIONS)
        vbios = versions.facts.get("vbios") if versions else None
        if isinstance(vbios, Mapping):
            groups[json.dumps(sorted(vbios))][node] = verdicts
        elif versions is not None and versions.level == "ok":
            groups[""][node] = verdicts
    return [("with the same GPUs" if gpus else "without GPUs", group) for gpus, group in groups.items()]


def _compare(
    group: Mapping[str, Mapping[str, Verdict]], check: str, fact: str, word: str, level: Level, action: Action
) -> dict[str, Verdict]:
    """A verdict for each node of a group whose value of this fact is not that of most. No value is no difference."""
    values = {name: verdicts[check].facts.get(fact) for name, verdicts in group.items() if check in verdicts}
    found = {name: _version(value) for name, value in values.items() if value is not None}
    groups = _by_value(found)
    if len(groups) < 2:
        return {}
    common, names = next(iter(groups.items()))
    majority = len(names) > len(found) / 2
    verdicts = {}
    for node, value in found.items():
        if majority and value == common:
            continue
        others = f"{len(names)} of {len(found)} nodes have {common}"
        if not majority:
            others = "others have " + ", ".join(sorted(groups.keys() - {value}))
        verdicts[node] = Verdict(level=level, summary=f"{word} {value}, but {others}", action=action)
    return verdicts


def _version(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(" and ".join(map(str, versions)) for _, versions in sorted(value.items()))
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{shown}{more} {'has' if len(names) == 1 else 'have'}"


def _hcas(node: NodeNetwork) -> str:
    kept = node.hcas.kept
    return f"{len(kept)} ({', '.join(sorted(kept))})" if kept else "none"


def _rates(node: NodeNetwork) -> str | None:
    ports = [port for port in node.facts.ports if port.name in node.hcas.kept or port.hca in node.hcas.kept]
    kinds = {f"{port.link_layer} at {port.rate_gbps:g} Gb/s" for port in ports if port.rate_gbps is not None}
    return " and ".join(sorted(kinds)) or None


def _mtu(node: NodeNetwork) -> str | None:
    interface = node.facts.interface(node.interface.name)
    return str(interface.mtu) if interface is not None and interface.mtu is not None else None


def _nccl_conf(node: NodeNetwork) -> str:
    """The first value of each name, which is the one that counts."""
    settings = {setting.name: setting.value for setting in reversed(node.facts.nccl_conf)}
    return ", ".join(f"{name}={value}" for name, value in sorted(settings.items())) or "none"


def _gpus(node: NodeNetwork) -> str:
    names = sorted({gpu.name for gpu in node.facts.gpus if gpu.name})
    return f"{len(node.facts.gpus)}" + (f" ({', '.join(names)})" if names else "")
