"""Verdicts on measured speeds: each device beside the median of the fleet's devices, and the published figure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping

from cluster.active.measurement import NodeSpeeds, Unavailable
from cluster.active.pairing import Pair, culprits, nodes_of, speeds_of
from cluster.files.errors import counted, quantity
from cluster.probing.verdict import Verdict, merge
from cluster.profiles import Profiles

# Shares below the fleet's median that are worth a warning, by this project's judgement; copies to the host and between
# nodes vary more with placement.
_DEVICE_TOLERANCE = 0.05
_HOST_TOLERANCE = 0.20
_PEER_TOLERANCE = 0.10
_PAIR_TOLERANCE = 0.10
# A fleet that is slow as a whole has a slow median: a speed below this share of the published one is a warning too.
_OF_PUBLISHED = 0.80

TESTS = ("active", "active_gemm", "active_copy", "active_peers", "active_all_reduce", "active_pairs", "active_rails")

Answers = Mapping[str, NodeSpeeds | Unavailable]


def judge_speeds(answers: Answers, profiles: Profiles) -> dict[str, dict[str, Verdict]]:
    """Verdicts by node, then by test."""
    measured = {node: speeds for node, speeds in answers.items() if isinstance(speeds, NodeSpeeds)}
    verdicts: dict[str, dict[str, Verdict]] = {
        node: {"active": Verdict(level="unknown", summary=speeds.reason)}
        for node, speeds in answers.items()
        if isinstance(speeds, Unavailable)
    }
    groups: dict[str, dict[str, NodeSpeeds]] = defaultdict(dict)
    for node, speeds in measured.items():
        groups[speeds.gpu][node] = speeds
    for gpu, group in groups.items():
        profile = profiles.find(gpu)
        published_gemm = profile.gemm.tflops if profile else None
        published_bus = profile.all_reduce.gb_per_second if profile else None
        for node, speeds in group.items():

            def beside(
                values: Callable[[NodeSpeeds], list[float]],
                tolerance: float,
                unit: str,
                published: float | None = None,
                speeds: NodeSpeeds = speeds,
                group: Mapping[str, NodeSpeeds] = group,
            ) -> Verdict:
                median = statistics.median(value for other in group.values() for value in values(other))
                return _beside(values(speeds), median, tolerance, unit, published)

            verdicts[node] = {
                "active_gemm": beside(lambda one: one.gemm_tflops, _DEVICE_TOLERANCE, "TFLOP/s", published_gemm),
                "active_copy": merge(
                    [
                        _named("device memory", beside(lambda one: one.hbm_gb_per_second, _DEVICE_TOLERANCE, "GB/s")),
                        _named("from host", beside(lambda one: one.to_device_gb_per_second, _HOST_TOLERANCE, "GB/s")),
                        _named("to host", beside(lambda one: one.from_device_gb_per_second, _HOST_TOLERANCE, "GB/s")),
                    ]
                ),
            }
            if speeds.peer_gb_per_second:
                verdicts[node]["active_peers"] = _peers(speeds, group)
            if speeds.all_reduce_gb_per_second is not None:
                published = published_bus if len(speeds.gemm_tflops) == 8 else None  # published for 8 GPUs
                verdicts[node]["active_all_reduce"] = beside(_bus, _DEVICE_TOLERANCE, "GB/s", published)
    return verdicts


def judge_pairs(
    speeds: Mapping[Pair, float | None], again: Mapping[Pair, float | None], reasons: Mapping[Pair, str]
) -> dict[str, Verdict]:
    """A verdict by node. None is an exchange that failed; `again` is the second pass, suspects first in its pairs."""
    blamed = culprits(_worked(speeds), _worked(again))
    good = [speed for speed in speeds.values() if speed is not None]
    median = statistics.median(good) if good else None
    return {node: _judge_node(node, speeds, again, reasons, blamed, median) for node in nodes_of(speeds)}


def _judge_node(
    node: str,
    speeds: Mapping[Pair, float | None],
    again: Mapping[Pair, float | None],
    reasons: Mapping[Pair, str],
    blamed: Mapping[str, str],
    median: float | None,
) -> Verdict:
    failed = [pair for pair, speed in speeds.items() if node in pair and speed is None]
    partners = ", ".join(other for pair in failed for other in pair if other != node)
    why = next((reasons[pair] for pair in [*again, *failed] if node == pair[0] and pair in reasons), None)
    why = why or next((reasons[pair] for pair in failed if pair in reasons), "no reason given")
    if blamed.get(node) == "broken":
        return Verdict(
            level="fail",
            summary=f"no exchange with {partners}, nor with a node that is beyond doubt ({why})",
            action="isolate",
        )
    if blamed.get(node) == "undecided":
        return Verdict(
            level="fail",
            summary=f"no exchange with {partners}, and no node is beyond doubt to try again with ({why})",
            action="monitor",
        )
    own = speeds_of(node, speeds) or speeds_of(node, again)
    usual = statistics.median(own) if own else None
    facts = {"median_gb_per_second": usual, "pairs": len(own)}
    if usual is None or median is None:
        return Verdict(level="unknown", summary="no exchange was measured", facts=facts)
    if usual < median * (1 - _PAIR_TOLERANCE):
        summary = f"{quantity(usual)} GB/s with other nodes, the median of all pairs is {quantity(median)}"
        return Verdict(level="warn", summary=summary, action="monitor", facts=facts)
    but = f"; cleared of the failed exchange with {partners}" if node in blamed else f"; none with {partners}"
    summary = f"{quantity(usual)} GB/s with {counted(len(own), 'other node')}{but if failed else ''}"
    return Verdict(level="ok", summary=summary, facts=facts)


def _beside(values: list[float], median: float, tolerance: float, unit: str, published: float | None) -> Verdict:
    """The devices of one node beside the fleet's median and, where there is one, the published figure."""
    facts = {"values": [round(value, 3) for value in values], "fleet_median": round(median, 3), "published": published}
    slow = {index: value for index, value in enumerate(values) if value < median * (1 - tolerance)}
    known = f"; published is {published:g}" if published else ""
    if slow:
        named = ", ".join(f"GPU {index}: {quantity(value)}" for index, value in slow.items())
        return Verdict(
            level="warn",
            summary=f"{named} {unit}, more than {tolerance:.0%} below the fleet's median of {quantity(median)}{known}",
            action="monitor",
            facts=facts,
        )
    lowest = min(values)
    if published and lowest < published * _OF_PUBLISHED:
        summary = (
            f"{quantity(lowest)} {unit}, less than {_OF_PUBLISHED:.0%} of the published {published:g}, as the fleet is"
        )
        return Verdict(level="warn", summary=summary, action="monitor", facts=facts)
    return Verdict(
        level="ok", summary=f"{quantity(lowest)} {unit} or more, fleet's median {quantity(median)}{known}", facts=facts
    )


def _peers(speeds: NodeSpeeds, group: Mapping[str, NodeSpeeds]) -> Verdict:
    """Copies between devices, each beside the median of all of the fleet."""
    median = statistics.median(value for other in group.values() for value in other.peer_gb_per_second.values())
    slow = {pair: speed for pair, speed in speeds.peer_gb_per_second.items() if speed < median * (1 - _PEER_TOLERANCE)}
    facts = {"gb_per_second": speeds.peer_gb_per_second, "fleet_median": median}
    if slow:
        named = ", ".join(f"{pair}: {quantity(speed)}" for pair, speed in slow.items())
        summary = (
            f"copies between GPUs {named} GB/s, more than {_PEER_TOLERANCE:.0%} below the median of {quantity(median)}"
        )
        return Verdict(level="warn", summary=summary, action="monitor", facts=facts)
    lowest = min(speeds.peer_gb_per_second.values())
    return Verdict(level="ok", summary=f"{quantity(lowest)} GB/s or more between any two GPUs", facts=facts)


def _bus(speeds: NodeSpeeds) -> list[float]:
    return [] if speeds.all_reduce_gb_per_second is None else [speeds.all_reduce_gb_per_second]


def _named(label: str, verdict: Verdict) -> Verdict:
    return Verdict(
        level=verdict.level,
        summary=f"{label} {verdict.summary}",
        action=verdict.action,
        facts={label.replace(" ", "_"): dict(verdict.facts)},
    )


def _worked(speeds: Mapping[Pair, float | None]) -> dict[Pair, bool]:
    return {pair: speed is not None for pair, speed in speeds.items()}
