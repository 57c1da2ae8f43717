"""The rails of free nodes: the adapters that NCCL would use, each with the GPU nearest to it."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.active.rails import Rail
from cluster.discovery.facts import NodeFacts, Port
from cluster.discovery.hcas import choose_hcas, common_depth
from cluster.discovery.read import read_node
from cluster.inventory.nodes import Node
from cluster.inventory.site import Site
from cluster.transport.fleet import on_each
from cluster.transport.runner import Connect, Unreachable


def find_rails(nodes: Sequence[Node], connect: Connect, seconds: float) -> dict[str, tuple[Rail, ...]]:
    """Rails by node; a node that does not answer has none."""

    def work(node: Node) -> tuple[Rail, ...]:
        with connect(node.host, seconds) as runner:
            facts = read_node(node.name, runner, node.site, head=None, deadline_seconds=seconds)
        return rails_of(facts, node.site)

    answers = {node.name: answer for node, answer in on_each(nodes, work, seconds)}
    return {name: answer for name, answer in answers.items() if not isinstance(answer, Unreachable)}


def rails_of(facts: NodeFacts, site: Site) -> tuple[Rail, ...]:
    """Rails in natural order of their ports. GPUs equally near to several ports are shared out evenly."""
    kept = choose_hcas(facts, wanted=site.network.hcas, rate_gbps=site.network.port_rate_gbps).kept
    rails: list[Rail] = []
    for name in kept:
        for port in (port for port in facts.ports if name in (port.name, port.hca)):
            gpu = _nearest_gpu(facts, port, [rail.gpu for rail in rails])
            rails.append(Rail(port=port.name, gpu=gpu, rate_gbps=port.rate_gbps))
    return tuple(rails)


def _nearest_gpu(facts: NodeFacts, port: Port, taken: Sequence[int | None]) -> int | None:
    """Of the nearest GPUs, the one that the fewest rails have; None on a node without any."""

    def farness(index: int) -> tuple[int, bool, int, int]:
        device = facts.gpus[index].device
        other_socket = device.numa_node != port.device.numa_node
        return -common_depth(device, port.device), other_socket, taken.count(index), index

    return min(range(len(facts.gpus)), key=farness, default=None)
