"""Predictions beside the committed records of H200, and what each lever does to them."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.checkpoint.planning.memory import memory_of
from engine.old_names import current_settings
from engine.settings import Checkpoint, ModelShape, TrialSettings, from_json
from harness.metrics.hardware import hardware_named
from harness.metrics.throughput import GIB
from harness.plan.predict import predict

PUBLISHED = Path(__file__).parents[2] / "results" / "published" / "h200x4"
H200 = hardware_named("h200")
SHAPE = ModelShape(name="s", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
LONG = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=1 << 20, cp_size=4)


@cache
def published() -> list[tuple[TrialSettings, dict[str, Any]]]:
    """Settings and measurement of every trial that gave a number."""
    records = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(PUBLISHED.glob("*/trials/*/record.json"))
    ]
    return [
        (from_json(TrialSettings, current_settings(record["settings"])), record["measurement"])
        for record in records
        if record["status"] == "ok"
    ]


def test_no_published_step_was_faster_than_predicted_and_long_ones_were_near_it() -> None:
    for settings, measured in published():
        if settings.emulate_nodes > 1:
            continue
        seconds = predict(settings, H200).seconds
        assert seconds is not None
        shortest = min(measured["step_seconds"])
        # A tile of an attention kernel alone was up to a tenth faster than the long ones that the ceiling is made of.
        assert seconds < shortest * (1.0 if settings.task == "train" else 1.1), settings
        if settings.task == "train" and settings.mask == "causal" and settings.seq_len >= 1 << 18:
            assert seconds > 0.85 * shortest, settings


def test_the_memory_page_shows_what_is_predicted_for_a_million_tokens() -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `\{(every: .*?)\}` \| (\d+) \| (\d+) \| (\w+) \|$", page, re.MULTILINE)
    assert len(found) == 6
    tiled = dataclasses.replace(LONG, projection_tiles=16, mlp_tiles=16)
    for checkpoint, seconds, size, fits in found:
        settings = dataclasses.replace(tiled, checkpoint=Checkpoint(**yaml.safe_load(f"{{{checkpoint}}}")))
        expected = predict(settings, H200)
        assert (f"{expected.seconds:.0f}", f"{expected.gpu_gib:.0f}") == (seconds, size), checkpoint
        assert expected.gpu_gib is not None
        assert fits == ("no" if expected.gpu_gib > 139 else "perhaps" if 1.11 * expected.gpu_gib > 139 else "yes")


def gib(**changes: Any) -> float:
    return memory_of(dataclasses.replace(LONG, **changes)).allocated / GIB


def test_every_lever_lowers_the_prediction() -> None:
    plain = gib()
    for changes in (
        {"mlp_tiles": 16},
        {"projection_tiles": 16, "mlp_tiles": 16},
        {"optimizer_offload": True},
        {"checkpoint": Checkpoint(tail=0.5)},
        {"checkpoint": Checkpoint(every=4)},
        {"checkpoint": Checkpoint(offload="inputs")},
        {"cp_size": 8, "world_size": 8},
        {"seq_len": 1 << 19},
    ):
        assert gib(**changes) < plain, changes
    assert gib(lm_head_fusion=False) > plain
    assert gib(checkpoint=Checkpoint(every=0)) > 2 * plain
    assert gib(checkpoint=Checkpoint(every=8, tail=0, replay="bisect")) < gib(checkpoint=Checkpoint(every=8, tail=0))
    assert gib(checkpoint=Checkpoint(offload="all")) < gib(checkpoint=Checkpoint(offload="inputs"))


def test_what_leaves_the_gpu_is_on_the_host() -> None:
    def host(**changes: Any) -> float:
        return memory_of(dataclasses.replace(LONG, **changes)).host / GIB

    state = (1 << 18) * 4096 * 2 / GIB  # a hidden state of the rank's tokens
    base = host()
    assert host(checkpoint=Checkpoint(offload="inputs")) - base == pytest.approx(32 * state)
    assert host(checkpoint=Checkpoint(offload="inputs", every=8)) - base == pytest.approx(4 * state)
    assert host(checkpoint=Checkpoint(offload="inputs", every=8, replay="bisect")) - base == pytest.approx(6 * state)
    assert host(optimizer_offload=True) - base == pytest.approx(8 * SHAPE.parameters / 4 / GIB)
    assert host(checkpoint=Checkpoint(every=0, offload="all")) == base  # nothing is offloaded where nothing is kept


def test_nothing_is_predicted_where_nothing_was_measured() -> None:
    fp32 = predict(dataclasses.replace(LONG, dtype="fp32"), H200)
    assert fp32.seconds is None
    assert fp32.gpu_gib is not None
    attention = predict(dataclasses.replace(LONG, task="attention"), H200)
    assert attention.gpu_gib is attention.host_gib is None
    assert attention.seconds is not None
    assert predict(LONG, hardware_named("a100")).seconds is None  # no kernel's speed is known there
    assert predict(dataclasses.replace(LONG, kernel="flex"), H200).seconds is None


def test_repeated_work_takes_its_time() -> None:
    def seconds(**changes: Any) -> float:
        found = predict(dataclasses.replace(LONG, checkpoint=Checkpoint(**changes)), H200).seconds
        assert found is not None
        return found

    assert seconds(every=0) < seconds(every=1) < seconds(every=4) < seconds(every=4, replay="bisect")
    forward = 4 * 32 * 128 * (1 << 20) * ((1 << 20) + 1) / 2 * 32 / 660e12 / 4  # attention's, of all layers
    assert seconds(tail=0) - seconds(tail=1) == pytest.approx(forward)
    assert seconds(tail=0.5) - seconds(tail=1) == pytest.approx(forward / 4, rel=1e-3)
