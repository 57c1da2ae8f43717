"""A trial over several nodes measures the link before, between and after its steps, outside of them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from engine.attention.context import ContextParallel
from engine.distributed import arrange
from engine.measurement import Measurement
from engine.settings import ModelShape, Steps, TrialSettings
from engine.tasks.speeds import MOMENTS, LinkProbes
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)


def settings_of(task: str, steps: Steps) -> TrialSettings:
    return TrialSettings(
        task=task, method="burst", model=SHAPE, seq_len=64, cp_size=2, dtype="fp32", emulate_nodes=2, steps=steps
    )


def measured_on_two_nodes(task: str, steps: Steps, same_host: bool) -> tuple[Measurement, list[str]]:
    """(measurement, order of steps and measurements of the link) of this rank's trial."""
    from engine.burst import METHOD
    from engine.worker import TASKS

    if not same_host:
        os.environ["NCCL_HOSTID"] = f"node{dist.get_rank()}"
    settings, events = settings_of(task, steps), []
    world = arrange(settings, torch.device("cpu"))
    measure = ContextParallel.measure_link

    def watched(self: ContextParallel, message: torch.Tensor, *, spread: bool) -> float | None:
        events.append("link to all peers" if spread else "link")
        return measure(self, message, spread=spread)

    with mock.patch.object(ContextParallel, "measure_link", watched):
        measurement = TASKS[task](settings, METHOD, world).run(lambda step: events.append(f"step {step['step']}"))
    return measurement, events


@pytest.mark.parametrize("task", ["attention", "train"])
def test_the_link_is_measured_before_between_and_after_the_measured_steps(task) -> None:
    ranks = run_on_ranks(2, measured_on_two_nodes, task, Steps(warmup=1, measured=3), False)
    for measurement, events in ranks:
        # The last two are of the speed and of the latency.
        assert events == ["link", "step 1", "step 2", "link", "step 3", "step 4", "link", "link"]
        speeds = measurement.extra["link_gib_per_second"]
        assert tuple(speeds) == MOMENTS
        assert min(speeds.values()) > 0
        assert measurement.extra["across_gib_per_second"] == speeds["after"]
        assert 0 < measurement.extra["link_latency_seconds"] < 1
    assert ranks[0][0].extra["link_gib_per_second"] == ranks[1][0].extra["link_gib_per_second"]


def test_with_one_measured_step_the_link_is_measured_after_the_warm_up() -> None:
    ((_, events), _) = run_on_ranks(2, measured_on_two_nodes, "attention", Steps(warmup=1, measured=1), False)
    assert events == ["link", "step 1", "link", "step 2", "link", "link"]


def test_the_bytes_between_nodes_are_recorded_beside_all_bytes() -> None:
    for measurement, _ in run_on_ranks(2, measured_on_two_nodes, "attention", Steps(warmup=0, measured=1), False):
        extra = measurement.extra
        assert extra["computed_sent_between_nodes_bytes"] == extra["computed_sent_bytes"] == measurement.sent_bytes
        assert min(measurement.sent_bytes) > 0


def test_ranks_of_one_node_measure_no_link() -> None:
    for measurement, events in run_on_ranks(2, measured_on_two_nodes, "train", Steps(warmup=1, measured=2), True):
        assert events == ["step 1", "step 2", "step 3"]
        assert not {"link_gib_per_second", "across_gib_per_second", "link_latency_seconds"} & measurement.extra.keys()


def sizes_of_messages(message_bytes: int) -> list[Any]:
    """Bytes of every message that probes of that size measure with."""
    world = arrange(settings_of("train", Steps()), torch.device("cpu"))
    probes = LinkProbes(world, ContextParallel(node_size=1), Steps(warmup=1, measured=2), message_bytes=message_bytes)
    sizes = []

    def sized(message: torch.Tensor, *, spread: bool) -> float:
        sizes.append(message.nbytes)
        return 2.0

    with mock.patch.object(probes._cp, "measure_link", sized):
        probes.before_step(0)
    return sizes


def fastest_patterns() -> tuple[list[bool], dict[str, Any]]:
    """(patterns in the order they were measured, figures) of four ranks on two nodes, where the first measurement of a
    pattern finds 1 GiB/s, or 2 to all peers, and each later one a tenth more."""
    settings = replace(settings_of("train", Steps()), cp_size=4, world_size=4)
    world, asked = arrange(settings, torch.device("cpu")), []

    def found(message: torch.Tensor, *, spread: bool) -> float:
        asked.append(spread)
        return (2.0 if spread else 1.0) + 0.1 * (asked.count(spread) - 1)

    probes = LinkProbes(world, ContextParallel(node_size=2), Steps(warmup=1, measured=2), message_bytes=64)
    with mock.patch.object(probes._cp, "measure_link", found):
        for step in range(3):
            probes.before_step(step)
        return asked, probes.figures()


def test_the_faster_of_both_patterns_is_the_link() -> None:
    for asked, figures in run_on_ranks(4, fastest_patterns):
        assert asked == [False, True] * 3 + [False]  # the last: the latency
        assert figures["link_gib_per_second"] == pytest.approx({"before": 2.0, "between": 2.1, "after": 2.2})
        assert figures["link_by_pattern"] == pytest.approx({"one_peer": 1.2, "all_peers": 2.2})


def test_a_message_is_no_larger_than_queries_and_than_a_link_needs() -> None:
    [large, _] = run_on_ranks(2, sizes_of_messages, 1 << 40)
    [small, _] = run_on_ranks(2, sizes_of_messages, 4096)
    assert (large, small) == ([64 << 20], [4096])
