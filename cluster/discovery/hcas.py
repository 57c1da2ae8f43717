"""The choice of a node's network: the ports of RDMA adapters (HCAs) that NCCL uses, and the interface for sockets.

The adapters are those near GPUs, not those that carry storage traffic. By default NCCL takes every active port, and a
slower or a storage adapter among them slows down every ring through it. Every port is returned with the reason why it
was kept or dropped. Nearness is the depth of the nearest common ancestor in the PCI tree: devices below one PCIe switch
share more of their path than devices below one root bus, and devices of different root buses share at most a NUMA node.
Source: the distances that NCCL and `nvidia-smi topo -m` distinguish (PIX, PXB, PHB, NODE, SYS).

The interface is the one with the route to the head node: NCCL by itself may choose a docker bridge or a veth, and Gloo
loopback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.discovery.facts import Device, Gpu, Interface, NodeFacts, Port


@dataclass(frozen=True, kw_only=True, slots=True)
class PortChoice:
    """One port, and why it is used or not."""

    name: str  # mlx5_2:1; in the site's spelling where the site names it
    kept: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HcaChoice:
    """All ports of a node in the kernel's order."""

    ports: tuple[PortChoice, ...]
    origin: Literal["discovered", "site"] = "discovered"
    warnings: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the ports NCCL uses, in natural order: mlx5_2 before mlx5_10."""
        return tuple(port.name for port in self.ports if port.kept)


def choose_hcas(facts: NodeFacts, *, wanted: Sequence[str] | None = None, rate_gbps: float | None = None) -> HcaChoice:
    """The site's own list `wanted` wins (empty: none). `rate_gbps` is the least rate the site expects of a port."""
    ports = sorted(facts.ports, key=_natural)
    if wanted is not None:
        return _as_the_site_says(ports, wanted)
    dropped: dict[str, str] = {}
    candidates = ports
    for reason in (_not_active, _not_verbs, _not_infiniband, _carries_storage(facts), _slower):
        found = {port.name: why for port in candidates if (why := reason(port, candidates))}
        left = [port for port in candidates if port.name not in found]
        if not left and reason not in (_not_active, _not_verbs):
            continue  # the only adapters of a node are used, even if they carry storage traffic
        dropped |= found
        candidates = left
    serves = nearest(facts.gpus, candidates)
    dropped |= {port.name: "no GPU is nearest to it" for port in candidates if port.name not in serves}
    choices = tuple(
        PortChoice(name=port.name, kept=port.name in serves, reason=dropped.get(port.name) or serves[port.name])
        for port in ports
    )
    kept = [port for port in candidates if port.name in serves]
    return HcaChoice(
        ports=choices,
        warnings=(*_too_slow(kept, rate_gbps), *_only_ethernet(kept, ports), *_farther(facts, kept, dropped)),
    )


def _natural(port: Port) -> tuple[str, int, int, str]:
    stem = port.hca.rstrip("0123456789")
    digits = port.hca[len(stem) :]
    return stem, int(digits or 0), port.number, digits


def _as_the_site_says(ports: Sequence[Port], wanted: Sequence[str]) -> HcaChoice:
    named = [PortChoice(name=name, kept=True, reason="named by the site file") for name in wanted]
    others = [
        PortChoice(name=port.name, kept=False, reason="the site file names others" if wanted else "the site names none")
        for port in ports
        if port.name not in wanted and port.hca not in wanted
    ]
    warnings = []
    for name in wanted:
        meant = [port for port in ports if name in (port.name, port.hca)]
        if not meant:
            warnings.append(f"the site names the adapter {name}, which this node lacks; correct network.hcas")
        warnings += [f"the site names {port.name}, which {bad}" for port in meant if (bad := _not_active(port, ports))]
    return HcaChoice(ports=(*named, *others), origin="site", warnings=tuple(warnings))


# Each returns the reason why a port is not for NCCL, or "", given the candidates left by those before it.
_Reason = Callable[[Port, Sequence[Port]], str]


def _not_active(port: Port, _: Sequence[Port]) -> str:
    good = port.state == "ACTIVE" and port.phys_state in ("LinkUp", "")
    return "" if good else f"is {port.state or 'in no known state'} with its link {port.phys_state or 'unknown'}"


def _not_verbs(port: Port, _: Sequence[Port]) -> str:
    # Amazon's EFA reports a link layer of its own; NCCL reaches it through a plugin that finds it by itself.
    return "needs a network plugin: its link layer is not one of verbs" if port.link_layer == "other" else ""


def _not_infiniband(port: Port, candidates: Sequence[Port]) -> str:
    if port.link_layer == "InfiniBand" or all(other.link_layer != "InfiniBand" for other in candidates):
        return ""
    return f"is {'a bond of ' if 'bond' in port.hca else ''}Ethernet, and this node has InfiniBand"


def _carries_storage(facts: NodeFacts) -> _Reason:
    serving: dict[str, str] = {}
    for route in facts.storage_routes:
        for interface in _physical(facts, route.interface):
            for port in facts.ports:
                if _is_port_of(interface, port):
                    serving.setdefault(port.name, f"carries the route to storage {route.target} ({route.interface})")

    def reason(port: Port, _: Sequence[Port]) -> str:
        return serving.get(port.name, "")

    return reason


def _physical(facts: NodeFacts, name: str, depth: int = 4) -> Iterable[Interface]:
    """The interfaces of hardware behind one that may be a VLAN on a bond on a bridge."""
    interface = facts.interface(name)
    if interface is None:
        return
    if interface.device.path:
        yield interface
    if depth:
        for lower in interface.lower:
            yield from _physical(facts, lower, depth - 1)


def _is_port_of(interface: Interface, port: Port) -> bool:
    return interface.device.path == port.device.path != () and interface.dev_port == port.number - 1


def _slower(port: Port, candidates: Sequence[Port]) -> str:
    fastest = max((other.rate_gbps or 0.0 for other in candidates), default=0.0)
    if port.rate_gbps is None or port.rate_gbps >= fastest:
        return ""
    return f"runs at {port.rate_gbps:g} Gb/s, others at {fastest:g}"


def _too_slow(kept: Sequence[Port], rate_gbps: float | None) -> list[str]:
    slow = [port for port in kept if rate_gbps and port.rate_gbps is not None and port.rate_gbps < rate_gbps]
    return [f"{port.name} runs at {port.rate_gbps:g} Gb/s, but the site expects {rate_gbps:g}" for port in slow]


def _only_ethernet(kept: Sequence[Port], ports: Sequence[Port]) -> list[str]:
    lost = [port.name for port in ports if port.link_layer == "InfiniBand"]
    if not lost or any(port.link_layer == "InfiniBand" for port in kept):
        return []
    instead = "Ethernet adapters are used" if kept else "no adapter is used"
    return [f"no InfiniBand port is active ({', '.join(lost)}), so {instead}"]


def _farther(facts: NodeFacts, kept: Sequence[Port], dropped: dict[str, str]) -> list[str]:
    """A sentence for each GPU that is nearer to a dropped port of the same kind than to any kept one."""
    if not kept:
        return []
    rivals = [port for port in facts.ports if port.name in dropped and port.link_layer == kept[0].link_layer]
    warnings = []
    for number, gpu in enumerate(facts.gpus):
        reached = max(common_depth(gpu.device, port.device) for port in kept)
        closest = max(rivals, key=lambda port: common_depth(gpu.device, port.device), default=None)
        if closest is not None and common_depth(gpu.device, closest.device) > reached:
            warnings.append(
                f"GPU {number} reaches the network through a distant adapter: "
                f"the nearest, {closest.name}, {dropped[closest.name]}"
            )
    return warnings


def common_depth(one: Device, other: Device) -> int:
    """How many steps from the root their paths share; 0 when they share the CPU alone, or a path is unknown."""
    depth = 0
    for ours, theirs in zip(one.path, other.path, strict=False):
        if ours != theirs:
            break
        depth += 1
    return depth


def nearest(gpus: Sequence[Gpu], ports: Sequence[Port]) -> dict[str, str]:
    """Names of the ports nearest to some GPU, each with the reason; all ports where the distances are unknown."""
    reasons: dict[str, list[tuple[int, str]]] = {}
    for number, gpu in enumerate(gpus):
        depth = max((common_depth(gpu.device, port.device) for port in ports), default=0)
        for port in ports:
            if depth and common_depth(gpu.device, port.device) == depth:
                reasons.setdefault(port.name, []).append((number, gpu.device.path[depth - 1]))
            elif not depth and gpu.device.numa_node is not None and gpu.device.numa_node == port.device.numa_node:
                reasons.setdefault(port.name, []).append((number, f"NUMA node {gpu.device.numa_node}"))
    if not reasons:
        why = "active, and the PCI tree shows no nearer port for any GPU" if gpus else "active; the node has no GPU"
        return {port.name: why for port in ports}
    return {port.name: _reason(reasons[port.name]) for port in ports if port.name in reasons}


def _reason(served: Sequence[tuple[int, str]]) -> str:
    numbers = ", ".join(str(number) for number, _ in served)
    return f"nearest to GPU{'s' if len(served) > 1 else ''} {numbers} (they share {served[0][1]})"


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
