"""What differs between nodes that are to work together, said with the names of the nodes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from cluster.discovery.facts import NodeFacts
from cluster.discovery.hcas import HcaChoice
from cluster.discovery.interface import InterfaceChoice

_NAMES_SHOWN = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeNetwork:
    """One node, as far as it must match the others. Interface names are not part of that: each node has its own."""

    facts: NodeFacts
    interface: InterfaceChoice
    hcas: HcaChoice


def drift(nodes: Sequence[NodeNetwork]) -> list[str]:
    """One sentence for every kind of difference. A node that did not tell is not compared."""
    return [
        *_differ("HCA sets differ, with which NCCL can hang without a word", ((n, _hcas(n)) for n in nodes)),
        *_differ("HCA rates or link layers differ, so the slowest sets the pace", ((n, _rates(n)) for n in nodes)),
        *_differ("MTUs of the socket interfaces differ, so large packets can get lost", ((n, _mtu(n)) for n in nodes)),
        *_differ("GPUs differ", ((n, _gpus(n)) for n in nodes)),
        *_differ("NVIDIA drivers differ", ((n, n.facts.driver) for n in nodes)),
        *_differ("NCCL versions differ, which NCCL refuses or hangs on", ((n, n.facts.nccl) for n in nodes)),
    ]


def _differ(what: str, told: Iterable[tuple[NodeNetwork, str | None]]) -> list[str]:
    groups: dict[Hashable, list[str]] = {}
    for node, value in told:
        if value is not None:
            groups.setdefault(value, []).append(node.facts.node)
    if len(groups) < 2:
        return []
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))  # the majority first, else in the nodes' order
    return [f"{what}: " + "; ".join(f"{_names(names)} {value}" for value, names in ordered)]


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
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


def _gpus(node: NodeNetwork) -> str:
    names = sorted({gpu.name for gpu in node.facts.gpus if gpu.name})
    return f"{len(node.facts.gpus)}" + (f" ({', '.join(names)})" if names else "")
