"""Predictions beside the committed records of H200, and what each lever does to them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.planning.memory import memory_of
from engine.settings import Checkpoint, TrialSettings, hosted_fraction
from engine.shape import ModelShape
from harness.cli import main
from harness.metrics.hardware import hardware_named, speeds_of
from harness.metrics.throughput import GIB
from harness.plan.forecast import START_SECONDS, cost_of, forecast
from harness.plan.predict import predict
from harness.report.tables.table import significant

H200 = hardware_named("h200")
SHAPE = ModelShape(name="s", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
LONG = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=1 << 20, cp_size=4)


def test_what_a_plan_predicts_is_what_burst_predict_says_of_the_same_trial() -> None:
    for changes in ({}, {"cp_size": 8}, {"method": "megatron_cp", "cp_size": 16}, {"kernel": "cudnn"}):
        settings = dataclasses.replace(LONG, **changes, world_size=int(changes.get("cp_size", 4)))
        found = forecast(settings, H200)
        assert found.time is not None
        assert predict(settings, H200).seconds == found.time.seconds, changes
        cost = cost_of([settings], H200)
        steps = settings.steps.warmup + settings.steps.measured
        assert cost.seconds == pytest.approx(START_SECONDS + steps * found.time.seconds)


def test_the_memory_page_shows_what_is_planned_under_its_three_budgets(tmp_path, capsys):
    page = (Path(__file__).parents[3] / "docs" / "memory.md").read_text(encoding="utf-8")
    [experiment] = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "budgets.yaml").write_text(experiment, encoding="utf-8")
    assert main(["plan", str(tmp_path / "budgets.yaml"), "--hardware", "h200", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    cell = r" ([^|]+) \|"
    rows = re.findall(rf"^\| (\d+GiB) \|{6 * cell}$", page, re.MULTILINE)
    assert [row[0] for row in rows] == [trial["memory"] for trial in planned] == ["24GiB", "40GiB", "80GiB"]
    for (_, whole, others, also, *figures), trial in zip(rows, planned, strict=True):
        assert figures == [
            f"{trial['predicted_seconds']:.1f}",
            f"{trial['predicted_gpu_gib']:.1f}",
            f"{trial['predicted_host_gib']:.1f}",
        ]
        assert (whole, others, trial.get("checkpoint.every", 0)) == ("16", "-", 0)
        assert f"{trial['checkpoint.host_layers']} of them on the host" in also
        assert bool(re.search("MLP (and projections )?in 8 tiles", also)) == (trial.get("mlp_tiles", 1) == 8)
        assert ("projections in 8 tiles" in also) == (trial.get("projection_tiles", 1) == 8)
        assert bool(re.search("optimizer (and gradients )?on the host", also)) == bool(trial["optimizer_offload"])
        assert ("and gradients on" in also) == bool(trial.get("gradient_offload"))


def test_the_frontier_on_the_memory_page_is_what_is_planned_for_its_budgets(capsys):
    page = (Path(__file__).parents[3] / "docs" / "memory.md").read_text(encoding="utf-8")
    [(command, excerpt)] = re.findall(
        r"^`burst (plan [^`]*?) --frontier`[^`]*```\n(.*?)```", page, re.MULTILINE | re.DOTALL
    )
    shown = [line.split()[:6] for line in excerpt.splitlines()[1:]]
    budgets = ", ".join(f"{float(row[0]):g}GiB" for row in shown)
    assert main([*command.split(), "--set", f"sweep.memory=[{budgets}]", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    least = min(trial["predicted_seconds"] for trial in planned)
    three = significant(3)
    assert shown == [
        [
            three(float(trial["memory"].removesuffix("GiB"))),
            *(three(trial[f"predicted_{name}_gib"]) for name in ("gpu", "host")),
            three(trial["predicted_seconds"]),
            f"{trial['predicted_seconds'] / least - 1:.1%}",
            three(trial["seq_len"] / trial["predicted_seconds"]),
        ]
        for trial in planned
    ]


def test_no_more_is_reserved_than_the_gpu_has() -> None:
    for tokens, beyond in ((1 << 17, False), (1 << 20, True)):
        settings = dataclasses.replace(LONG, seq_len=tokens, checkpoint=Checkpoint(every=0))
        asked, expected = memory_of(settings).reserved / GIB, predict(settings, H200)
        assert (asked > H200.memory_gib) == beyond
        assert expected.reserved_gib == min(asked, H200.memory_gib)
        assert expected.gpu_gib == memory_of(settings).allocated / GIB


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


def test_moments_in_8_bits_are_counted_by_hand_in_memory_and_in_time() -> None:
    wide = ((2 * SHAPE.layers + 1) + SHAPE.vocab) * SHAPE.hidden  # norms and the embedding, in fp32
    narrow_ones = SHAPE.parameters - wide
    states = 2 * (narrow_ones + 4 * narrow_ones / 256 + 4 * wide)
    narrow = dataclasses.replace(LONG, optimizer_states="8bit")
    saved = memory_of(LONG).allocated - memory_of(narrow).allocated
    assert saved == pytest.approx((8 * SHAPE.parameters - states) / 4)
    hosted = memory_of(dataclasses.replace(narrow, optimizer_offload=0.5))
    half = hosted_fraction(LONG, 0.5)  # in whole parameters
    assert half == pytest.approx(0.5, abs=0.001)
    assert hosted.host - memory_of(narrow).host == pytest.approx(half * states / 4)

    def update_seconds(**changes: Any) -> float:
        time = forecast(dataclasses.replace(LONG, **changes), H200).time
        assert time is not None
        return time.phases["optimizer"]

    speeds = speeds_of(H200)
    memory, link = speeds.memory_gib * GIB, 0.855 * speeds.host_gib * GIB
    # The update: read and written: parameter and moments; read: the gradient. With 8 bits the kernel's time.
    update = 28 * wide + 111.5 * narrow_ones
    others = (4 + 8) * SHAPE.parameters  # the gradient's norm, and both ways again for clipping
    assert update_seconds(optimizer_states="8bit") == pytest.approx((update + others) / 4 / memory)
    hosted = update_seconds(optimizer_states="8bit", optimizer_offload=True)  # copies and updates at once
    assert hosted == pytest.approx(max(states / link, update / memory) / 4 + others / 4 / memory)
    part = update_seconds(optimizer_offload=0.5)  # whose copies the next forward hides
    assert part == pytest.approx(SHAPE.parameters / 4 * (28 + 12) / memory)
    whole = {"cp_size": 1, "world_size": 1, "seq_len": 1 << 14}
    update += (4 + 8 + 2 + 4) * SHAPE.parameters  # and the copies in bf16
    assert update_seconds(**whole, optimizer_states="8bit") == pytest.approx(update / memory)
    assert update_seconds(**whole) == pytest.approx(34 * SHAPE.parameters / memory)


def test_no_time_is_predicted_in_other_dtypes_and_no_memory_of_what_the_engine_does_not_hold() -> None:
    fp32 = predict(dataclasses.replace(LONG, dtype="fp32"), H200)
    assert fp32.seconds is None
    assert fp32.gpu_gib is not None
    assert "bf16" in forecast(dataclasses.replace(LONG, dtype="fp32"), H200).reason
    attention = predict(dataclasses.replace(LONG, task="attention"), H200)
    assert attention.gpu_gib is attention.host_gib is None
    assert attention.seconds is not None
    divided = dataclasses.replace(LONG, method="megatron_tp", cp_size=1, tp_size=4, layout="contiguous")
    assert predict(divided, H200).gpu_gib is None
    assert predict(divided, H200).seconds is not None


def test_no_time_is_predicted_of_kernels_whose_speed_on_gpus_is_not_known() -> None:
    reference = dataclasses.replace(LONG, kernel="reference")
    assert predict(reference, H200).seconds is None
    assert forecast(reference, H200).reason.startswith("the speed of kernel reference on GPUs is not known")
    wide = dataclasses.replace(LONG, model=dataclasses.replace(LONG.model, head_dim=512))
    assert "head dims up to 256 in multiples of 8, found 512" in forecast(wide, H200).reason
    assert predict(dataclasses.replace(wide, task="lm_head"), H200).seconds is not None


def test_repeated_work_takes_its_time() -> None:
    def seconds(**changes: Any) -> float:
        found = predict(dataclasses.replace(LONG, checkpoint=Checkpoint(**changes)), H200).seconds
        assert found is not None
        return found

    assert seconds(every=0) < seconds(every=1) < seconds(every=4) < seconds(every=4, replay="bisect")
    whole, half, kept = (seconds(tail=tail) for tail in (0, 0.5, 1))
    phases = forecast(LONG, H200).time
    assert phases is not None
    assert whole - kept == pytest.approx(phases.phases["attention forward"], rel=0.01)
    assert half - kept == pytest.approx((whole - kept) / 4, rel=1e-2)
