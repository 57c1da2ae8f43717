"""Rails of a fleet, the adapters that NCCL would use: found, measured between two nodes or within one, and judged."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.active import rails as node_rails
from cluster.active.fleet import Conversation, Plan, converse
from cluster.active.judge import Pair, Speed, rounds
from cluster.active.rails import Rail
from cluster.discovery.facts import NodeFacts, Port
from cluster.discovery.hcas import choose_hcas, common_depth
from cluster.discovery.read import read_node
from cluster.files.errors import counted
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import Site
from cluster.probing.verdict import Verdict, ok, unknown, warn
from cluster.profiles import NodeLimits
from cluster.transport.fleet import on_each
from cluster.transport.runner import Connect, Unreachable

TEST = "active_rails"


@dataclass(frozen=True, kw_only=True, slots=True)
class RailSpeed:
    """One rail of a node."""

    rail: Rail
    other: str  # the node, and its port
    speed: Speed | None  # None: that node has no adapter to measure it with


def find_rails(nodes: Sequence[InventoryNode], connect: Connect, seconds: float) -> dict[str, tuple[Rail, ...]]:
    """Rails by node; a node that does not answer has none."""

    def work(node: InventoryNode) -> tuple[Rail, ...]:
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


def run_rails(nodes: Sequence[InventoryNode], rails: Mapping[str, Sequence[Rail]], plan: Plan) -> dict[str, Verdict]:
    """A verdict for each of these nodes that has rails. They must be free."""
    able = [node.name for node in nodes if rails.get(node.name)]
    if not able:
        return {}
    plan.say(f"active tests: the adapters of {counted(len(able), 'node')}, one after the other")
    pairs = rounds(able, most=1)[0] if len(able) > 1 else []
    alone = [name for name in able if not any(name in pair for pair in pairs)]
    group: list[Pair] = [*pairs, *((name, name) for name in alone)]
    by_name = {node.name: node for node in nodes}
    # Each rail adds the seconds of its measurement and a reserve; the two workers start once.
    seconds = plan.pair_seconds + max(len(rails[name]) for name in able) * (node_rails.SECONDS + 5.0)
    work = partial(_measure_pair, plan, by_name, rails, seconds)
    speeds: dict[str, list[RailSpeed]] = {}
    missing: dict[str, str] = {}
    for pair, answer in on_each(group, work, seconds):
        if isinstance(answer, list):
            for node, speed in answer:
                speeds.setdefault(node, []).append(speed)
        else:
            missing |= dict.fromkeys(pair, str(answer))
    return judge_rails(speeds, missing, plan.profiles.limits)


def _measure_pair(
    plan: Plan, by_name: Mapping[str, InventoryNode], rails: Mapping[str, Sequence[Rail]], seconds: float, pair: Pair
) -> list[tuple[str, RailSpeed]] | str:
    """Speeds of the rails of two nodes, each with its node's name; or the reason why there are none."""
    one, other = pair
    facing, left = facing_rails(rails[one], rails[other])
    conversation = Conversation(
        opener=("rails", "--rails", ",".join(rail.argument for rail, _ in facing)),
        caller=lambda ports: ("rails", "--rails", ",".join(rail.argument for _, rail in facing), "--ports", ports),
        answer="rails",
        both_answer=False,
        seconds=seconds,
    )
    answer = converse(plan, by_name[one], by_name[other], conversation)
    if isinstance(answer, str):
        return answer
    speeds: list[tuple[str, RailSpeed]] = []
    for (ours, theirs), speed in zip(facing, answer["speeds"], strict=False):
        speeds.append((one, RailSpeed(rail=ours, other=f"{other} {theirs.port}", speed=speed)))
        if other != one:
            speeds.append((other, RailSpeed(rail=theirs, other=f"{one} {ours.port}", speed=speed)))
    for (node, lacks), unmatched in zip(((one, other), (other, one)), left, strict=True):
        speeds += [(node, RailSpeed(rail=rail, other=lacks, speed=None)) for rail in unmatched]
    return speeds


def facing_rails(
    ours: Sequence[Rail], theirs: Sequence[Rail]
) -> tuple[list[tuple[Rail, Rail]], tuple[list[Rail], list[Rail]]]:
    """Pairs of rails to measure, one of each node, and the rails of each node that have no partner.

    Rails of one name are a pair. By position alone, all rails after a missing adapter would be measured across another
    switch. The rails whose names only one node has are paired in order.
    """
    named = {rail.port: rail for rail in theirs}
    names = {rail.port for rail in ours}
    own, others = [rail for rail in ours if rail.port not in named], [rail for rail in theirs if rail.port not in names]
    same = [(rail, named[rail.port]) for rail in ours if rail.port in named]
    return [*same, *zip(own, others, strict=False)], (own[len(others) :], others[len(own) :])


def judge_rails(
    speeds: Mapping[str, Sequence[RailSpeed]], missing: Mapping[str, str], limits: NodeLimits
) -> dict[str, Verdict]:
    """Warns on rails far below the fleet's median or their own rate, and on those without a result.

    `missing`: nodes without a measured rail, with the reason; a program that is not installed is no fault.
    """
    good = [one.speed for rails in speeds.values() for one in rails if isinstance(one.speed, float)]
    median = statistics.median(good) if good else None
    verdicts = {node: _judge_node(rails, median, limits) for node, rails in speeds.items()}
    for node, reason in missing.items():
        summary = f"adapters were not measured one by one ({reason})"
        verdicts[node] = ok(summary) if node_rails.ABSENT in reason else warn(summary)
    return verdicts


def _judge_node(rails: Sequence[RailSpeed], median: float | None, limits: NodeLimits) -> Verdict:
    facts = {
        "gbps": {one.rail.port: one.speed if isinstance(one.speed, float) else None for one in rails},
        "fleet_median": median,
    }
    silent = [f"{one.rail.port} with {one.other} ({one.speed})" for one in rails if isinstance(one.speed, str)]
    slow = [
        f"{one.rail.port} {one.speed:.4g} with {one.other}"
        for one in rails
        if isinstance(one.speed, float) and median is not None and _is_slow(one.speed, median, one.rail, limits)
    ]
    parts = [f"slow: {', '.join(slow)} Gb/s; the fleet's median is {median:.4g}"] if slow and median else []
    parts += [f"no result: {', '.join(silent)}"] if silent else []
    lacking = [f"{one.rail.port}, which {one.other} lacks" for one in rails if one.speed is None]
    without = f"; not measured: {'; '.join(lacking)}" if lacking else ""
    if parts:
        return warn("; ".join(parts) + without, facts=facts)
    measured = [one.speed for one in rails if isinstance(one.speed, float)]
    if not measured:
        return unknown(f"no adapter was measured{without}", facts=facts)
    least = f"{min(measured):.4g} Gb/s or more over each of {counted(len(measured), 'adapter')}"
    return ok(f"{least}{without}", facts=facts)


def _is_slow(speed: float, median: float, rail: Rail, limits: NodeLimits) -> bool:
    rate = rail.rate_gbps
    return speed < median * (1 - limits.rail_below) or (rate is not None and speed < rate * limits.of_rate)
