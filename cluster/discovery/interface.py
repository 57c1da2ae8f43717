"""The interface for a node's socket traffic: the one with the route to the head node.

NCCL by itself may choose a docker bridge or a veth, and Gloo loopback; the route determines the right one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.discovery.facts import NodeFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class InterfaceChoice:
    """The interface, and why. An empty name means that none was found; a warning then states the next step."""

    name: str
    reason: str
    origin: Literal["discovered", "site", "default"] = "discovered"
    warnings: tuple[str, ...] = ()


def choose_interface(facts: NodeFacts, *, wanted: str | None = None, mtu: int | None = None) -> InterfaceChoice:
    """The site's own choice `wanted` wins, then the route to the head; without a head the node works alone.

    `mtu` is the one that the site expects, None accepts any.
    """
    if wanted is not None:
        return _checked(facts, InterfaceChoice(name=wanted, reason="named by the site file", origin="site"), mtu)
    route = facts.head_route
    if route is None:
        return InterfaceChoice(name="lo", reason="no other node takes part", origin="default")
    if not route.interface:
        return InterfaceChoice(
            name="",
            reason="",
            warnings=(
                f"no route to the head {route.target}: check the address, or name network.interface in the site",
            ),
        )
    source = f", as {route.source}" if route.source and route.source != route.target else ""
    if route.interface == "lo":
        reason = f"the head {route.target} is a loopback address: only this machine can take part"
        return InterfaceChoice(name="lo", reason=reason)
    own = facts.interface(route.interface)
    if own is not None and route.target in own.addresses:
        reason = f"holds the head's own address {route.target}"
    else:
        reason = f"carries the route to the head {route.target}{source}"
    return _checked(facts, InterfaceChoice(name=route.interface, reason=reason), mtu)


def _checked(facts: NodeFacts, choice: InterfaceChoice, mtu: int | None) -> InterfaceChoice:
    """The same choice, with a warning for each problem of the interface."""
    interface = facts.interface(choice.name)
    warnings = []
    if interface is None:
        names = ", ".join(sorted(found.name for found in facts.interfaces)) or "none that could be read"
        warnings.append(f"interface {choice.name} is not on this node, which has {names}")
    else:
        if not interface.up:
            warnings.append(f"interface {choice.name} is down")
        if mtu is not None and interface.mtu is not None and interface.mtu != mtu:
            warnings.append(f"interface {choice.name} has an MTU of {interface.mtu}, but the site expects {mtu}")
    return InterfaceChoice(name=choice.name, reason=choice.reason, origin=choice.origin, warnings=tuple(warnings))
