"""How near two devices are in the PCI tree, and which ports each GPU lies nearest to.

Nearness is the depth of the nearest common ancestor: two devices below one PCIe switch meet deeper in the tree than two
below one root bus. Devices of different root buses meet only in the CPU, where at least the NUMA node may be common.
Source: the distances NCCL and `nvidia-smi topo -m` tell apart (PIX, PXB, PHB, NODE, SYS).
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.discovery.facts import Device, Gpu, Port


def common_depth(one: Device, other: Device) -> int:
    """How many steps from the root their paths share; 0 when they meet in the CPU alone, or nothing is known."""
    depth = 0
    for ours, theirs in zip(one.path, other.path, strict=False):
        if ours != theirs:
            break
        depth += 1
    return depth


def nearest(gpus: Sequence[Gpu], ports: Sequence[Port]) -> dict[str, str]:
    """Names of the ports that some GPU lies nearest to, each with the reason. All of them where nothing tells."""
    reasons: dict[str, list[tuple[int, str]]] = {}
    for number, gpu in enumerate(gpus):
        depth = max((common_depth(gpu.device, port.device) for port in ports), default=0)
        for port in ports:
            if depth and common_depth(gpu.device, port.device) == depth:
                reasons.setdefault(port.name, []).append((number, gpu.device.path[depth - 1]))
            elif not depth and gpu.device.numa_node is not None and gpu.device.numa_node == port.device.numa_node:
                reasons.setdefault(port.name, []).append((number, f"NUMA node {gpu.device.numa_node}"))
    if not reasons:
        why = (
            "active, and the PCI tree names no GPU nearer to another" if gpus else "active; there is no GPU to be near"
        )
        return {port.name: why for port in ports}
    return {port.name: _reason(reasons[port.name]) for port in ports if port.name in reasons}


def _reason(served: Sequence[tuple[int, str]]) -> str:
    numbers = ", ".join(str(number) for number, _ in served)
    return f"nearest to GPU{'s' if len(served) > 1 else ''} {numbers} (they meet at {served[0][1]})"
