"""Which nodes exchange with which, which of them is broken when exchanges fail, and verdicts on measured speeds.

A speed stands beside the median of the fleet's devices, and beside the published figure of its model.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cluster.active.measurement import NodeSpeeds, Unavailable
from cluster.files.errors import counted, quantity
from cluster.probing.verdict import Verdict, fail, merge, ok, unknown, warn
from cluster.profiles import NodeLimits, Profile, Profiles

Pair = tuple[str, str]
Speed = float | str  # or the reason why there is none
MAX_ROUNDS = 15  # all pairs of 16 nodes; of more nodes, each exchanges with 15 others


def rounds(nodes: Sequence[str], most: int = MAX_ROUNDS) -> list[list[Pair]]:
    """Pairs that can run side by side, round by round: the circle method of tournaments.

    With up to `most` + 1 nodes every pair occurs exactly once.
    """
    circle: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    for _ in range(min(most, len(circle) - 1)):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(one, other) for one, other in pairs if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in found if pairs]


def suspects(worked: Mapping[Pair, bool]) -> list[str]:
    """Nodes that explain the failed exchanges, in the order they occur.

    A broken node fails with every other, a sound one only with broken ones: those with the most failures are suspected,
    their exchanges taken out, and so on until no failure is left. Equals are suspected together.
    """
    left = {pair for pair, good in worked.items() if not good}
    blamed: set[str] = set()
    while left:
        failures = Counter(node for pair in left for node in pair)
        most = max(failures.values())
        blamed |= {node for node, times in failures.items() if times == most}
        left = {pair for pair in left if not blamed & set(pair)}
    return [node for node in nodes_of(worked) if node in blamed]


def second_pass(worked: Mapping[Pair, bool]) -> list[list[Pair]]:
    """Rounds that pair every suspect with a node that is none: this separates two nodes that failed together.

    Empty when nothing failed, or when no node is beyond doubt.
    """
    doubted = suspects(worked)
    trusted = [node for node in nodes_of(worked) if node not in doubted]
    if not trusted:
        return []
    return [
        list(zip(doubted[at : at + len(trusted)], trusted, strict=False)) for at in range(0, len(doubted), len(trusted))
    ]


def culprits(worked: Mapping[Pair, bool], again: Mapping[Pair, bool]) -> dict[str, str]:
    """Suspects by the result of the second pass: `broken`, `cleared`, or `undecided` for a node without one."""
    verdict_by_good = {True: "cleared", False: "broken"}
    found = {pair[0]: verdict_by_good[good] for pair, good in again.items()}
    return {node: found.get(node, "undecided") for node in suspects(worked)}


def worked(speeds: Mapping[Pair, Speed]) -> dict[Pair, bool]:
    """Whether each exchange gave a speed."""
    return {pair: isinstance(speed, float) for pair, speed in speeds.items()}


def nodes_of(pairs: Iterable[Pair]) -> list[str]:
    """Every node of these pairs once, in their order."""
    return list(dict.fromkeys(node for pair in pairs for node in pair))


TESTS = ("active", "active_gemm", "active_copy", "active_peers", "active_all_reduce", "active_pairs", "active_rails")

Answers = Mapping[str, NodeSpeeds | Unavailable]


def judge_speeds(answers: Answers, profiles: Profiles) -> dict[str, dict[str, Verdict]]:
    """Verdicts by node, then by test."""
    measured = {node: speeds for node, speeds in answers.items() if isinstance(speeds, NodeSpeeds)}
    verdicts: dict[str, dict[str, Verdict]] = {
        node: {"active": unknown(speeds.reason)} for node, speeds in answers.items() if isinstance(speeds, Unavailable)
    }
    groups: dict[str, dict[str, NodeSpeeds]] = defaultdict(dict)
    for node, speeds in measured.items():
        groups[speeds.gpu][node] = speeds
    for gpu, group in groups.items():
        profile = profiles.find(gpu)
        for node, speeds in group.items():
            verdicts[node] = _judge_one(speeds, list(group.values()), profile, profiles.limits)
    return verdicts


def _judge_one(
    speeds: NodeSpeeds, alike: list[NodeSpeeds], profile: Profile | None, limits: NodeLimits
) -> dict[str, Verdict]:
    """The verdicts of one node beside those with the same GPUs, by test."""

    def beside(
        values: Callable[[NodeSpeeds], list[float]], below: float, unit: str, published: float | None = None
    ) -> Verdict:
        median = statistics.median(value for other in alike for value in values(other))
        return _beside(values(speeds), median, below, unit, published, limits.of_published)

    copies = {
        "device memory": beside(lambda one: one.hbm_gb_per_second, limits.device_below, "GB/s"),
        "from host": beside(lambda one: one.to_device_gb_per_second, limits.host_copy_below, "GB/s"),
        "to host": beside(lambda one: one.from_device_gb_per_second, limits.host_copy_below, "GB/s"),
    }
    gemm = profile.gemm.tflops if profile else None
    found = {
        "active_gemm": beside(lambda one: one.gemm_tflops, limits.device_below, "TFLOP/s", gemm),
        "active_copy": merge(
            replace(one, summary=f"{what} {one.summary}", facts={what.replace(" ", "_"): dict(one.facts)})
            for what, one in copies.items()
        ),
    }
    if speeds.peer_gb_per_second:
        found["active_peers"] = _peers(speeds, alike, limits.peer_copy_below)
    if speeds.all_reduce_gb_per_second is not None:
        of_eight = profile and len(speeds.gemm_tflops) == 8  # published for 8 GPUs
        published = profile.all_reduce.gb_per_second if profile and of_eight else None
        found["active_all_reduce"] = beside(_bus, limits.device_below, "GB/s", published)
    return found


def judge_pairs(speeds: Mapping[Pair, Speed], again: Mapping[Pair, Speed], limits: NodeLimits) -> dict[str, Verdict]:
    """A verdict by node; `again` is the second pass, suspects first in its pairs."""
    blamed = culprits(worked(speeds), worked(again))
    good = [speed for speed in speeds.values() if isinstance(speed, float)]
    median = statistics.median(good) if good else None
    return {
        node: _judge_pairs_of(node, speeds, again, blamed.get(node), median, limits.pair_below)
        for node in nodes_of(speeds)
    }


def _judge_pairs_of(
    node: str,
    speeds: Mapping[Pair, Speed],
    again: Mapping[Pair, Speed],
    blamed: str | None,
    median: float | None,
    below: float,
) -> Verdict:
    failed = {pair: why for pair, why in speeds.items() if node in pair and isinstance(why, str)}
    partners = ", ".join(other for pair in failed for other in pair if other != node)
    # Its own reason, as the second pass gave it or the first; else that of a partner.
    reasons = [why for pair, why in (*again.items(), *failed.items()) if node == pair[0] and isinstance(why, str)]
    why = next(iter([*reasons, *failed.values()]), "")
    if blamed == "broken":
        return fail(f"no exchange with {partners}, nor with a node that is beyond doubt ({why})")
    if blamed == "undecided":
        doubt = "and no node is beyond doubt to try again with"
        return fail(f"no exchange with {partners}, {doubt} ({why})", "monitor")
    own = _speeds_of(node, speeds) or _speeds_of(node, again)
    usual = statistics.median(own) if own else None
    facts = {"median_gb_per_second": usual, "pairs": len(own)}
    if usual is None or median is None:
        return unknown("no exchange was measured", facts=facts)
    if usual < median * (1 - below):
        summary = f"{quantity(usual)} GB/s with other nodes, the median of all pairs is {quantity(median)}"
        return warn(summary, facts=facts)
    but = f"; cleared of the failed exchange with {partners}" if blamed else f"; none with {partners}"
    return ok(f"{quantity(usual)} GB/s with {counted(len(own), 'other node')}{but if failed else ''}", facts=facts)


def _speeds_of(node: str, speeds: Mapping[Pair, Speed]) -> list[float]:
    return [speed for pair, speed in speeds.items() if node in pair and isinstance(speed, float)]


def _beside(
    values: list[float], median: float, below: float, unit: str, published: float | None, of_published: float
) -> Verdict:
    """The devices of one node beside the fleet's median and, where there is one, the published figure."""
    facts = {"values": [round(value, 3) for value in values], "fleet_median": round(median, 3), "published": published}
    slow = [f"GPU {index}: {quantity(value)}" for index, value in enumerate(values) if value < median * (1 - below)]
    known = f"; published is {published:g}" if published else ""
    if slow:
        usual = f"more than {below:.0%} below the fleet's median of {quantity(median)}"
        return warn(f"{', '.join(slow)} {unit}, {usual}{known}", facts=facts)
    lowest = f"{quantity(min(values))} {unit}"
    if published and min(values) < published * of_published:
        summary = f"{lowest}, less than {of_published:.0%} of the published {published:g}, as the fleet is"
        return warn(summary, facts=facts)
    return ok(f"{lowest} or more, fleet's median {quantity(median)}{known}", facts=facts)


def _peers(speeds: NodeSpeeds, alike: list[NodeSpeeds], below: float) -> Verdict:
    """Copies between devices, each beside the median of all of the fleet."""
    median = statistics.median(value for other in alike for value in other.peer_gb_per_second.values())
    found = speeds.peer_gb_per_second
    facts = {"gb_per_second": found, "fleet_median": median}
    slow = [f"{pair}: {quantity(speed)}" for pair, speed in found.items() if speed < median * (1 - below)]
    if slow:
        usual = f"more than {below:.0%} below the median of {quantity(median)}"
        return warn(f"copies between GPUs {', '.join(slow)} GB/s, {usual}", facts=facts)
    return ok(f"{quantity(min(found.values()))} GB/s or more between any two GPUs", facts=facts)


def _bus(speeds: NodeSpeeds) -> list[float]:
    return [] if speeds.all_reduce_gb_per_second is None else [speeds.all_reduce_gb_per_second]
