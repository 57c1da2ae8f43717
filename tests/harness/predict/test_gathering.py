"""Gathered attention and tensor parallelism: as many transfers and bytes as the engine's own runs count."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from engine.attention.comm_volume import gather_bytes
from engine.attention.geometry.layout import layout_named
from engine.attention.masks import parse_mask
from engine.attention.problem import Problem
from engine.attention.resolve import Choices, HardwareModel, resolve
from engine.settings import BYTES_OF, Checkpoint, TrialSettings
from harness.cli import main
from harness.metrics.hardware import HardwareSpeeds, Tiles, hardware_named
from harness.metrics.throughput import GIB
from harness.plan.forecast import forecast
from harness.predict.attention import LayerAttention, RankGroup, attention_passes, tensor_parallel_transfers
from harness.records.stored import read_records
from harness.spec.models import named_model

SLOW = HardwareSpeeds(
    gemm_tflops=1e6, attention_forward_tflops=1e6, attention_backward_tflops=1e6, memory_gib=1e9, inside_gib=0.5,
    across_gib=0.01, across_default_gib=0.01, ring_step_seconds=1e-9,
)  # fmt: skip
PROBLEM = Problem(
    mask=parse_mask("causal"), layout=layout_named("zigzag"), seq_len=1 << 12, batch=1, heads=16, kv_heads=8,
    head_dim=64, input_bytes=2, cp_size=8, node_size=8,
)  # fmt: skip


def attention(schedule: str, problem: Problem = PROBLEM, **choices: str) -> LayerAttention:
    return LayerAttention(resolved=resolve(problem, HardwareModel(), Choices(schedule=schedule, **choices)))


def test_inside_a_node_gathered_attention_waits_for_the_bytes_that_the_engine_counts() -> None:
    gathered = attention("all_gather")
    counted = gather_bytes(8, 8, gathered.resolved.shards)
    for call, found in zip((counted.forward, counted.backward), attention_passes(gathered, SLOW), strict=True):
        assert found.inside == pytest.approx(call.near / (0.5 * GIB))
        assert found.across == 0
        assert found.inside > 0.99 * found.seconds


def test_over_nodes_keys_cross_once_and_gradients_from_each_rank_to_each() -> None:
    gathered = attention("all_gather", dataclasses.replace(PROBLEM, node_size=4))
    forward, backward = attention_passes(gathered, SLOW)
    part = gathered.resolved.shards
    keys = part.key_side * part.tokens
    assert forward.across == pytest.approx(keys / (0.01 * GIB))  # one other node's, over all links of this one
    assert backward.across == pytest.approx((keys + 4 * part.gradient(False, 4) * part.tokens) / (0.01 * GIB))


def test_gathered_attention_computes_what_its_tiles_show() -> None:
    slow = dataclasses.replace(
        SLOW, attention_forward_tflops=1.0, attention_backward_tflops=1.0, inside_gib=1e9, across_gib=1e9
    )
    long = dataclasses.replace(PROBLEM, seq_len=1 << 18)  # of tiles on which kernels have their full speed
    forward, _ = attention_passes(attention("all_gather", long), slow)
    assert forward.kernels == pytest.approx(long.pair_flops * long.mask.area(long.seq_len) / 8 / 1e12, rel=0.01)


def test_a_group_on_one_node_sends_nothing_between_nodes() -> None:
    group = RankGroup(ranks=4, node_ranks=4, inside=1.0, across=1e-9)
    assert group.gather(GIB) == (3.0, 0.0)
    assert group.reduce(GIB) == (3.0, 0.0)


def test_tensor_parallel_ranks_send_as_often_as_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = tmp_path / "divided.yaml"
    experiment.write_text(
        "title: two ranks\nmodel: tiny\ntask: train\nsweep: {seq_len: [512]}\nsteps: {warmup: 1, measured: 1}\n"
        "fixed: {method: megatron_tp, tp_size: 2, world_size: 2, dtype: fp32, checkpoint: {every: 1, tail: 1.0}}\n"
    )
    assert main(["run", str(experiment), "--out", str(tmp_path / "run"), "--launcher", "local"]) == 0
    capsys.readouterr()
    [record] = read_records(tmp_path / "run")
    assert record.measurement is not None
    settings = record.settings
    state = BYTES_OF["fp32"] * settings.seq_len / 2 * settings.model.hidden  # of one rank's tokens
    transfers = sum(tensor_parallel_transfers(settings))
    sent = max(record.measurement.sent_bytes) / state
    assert transfers <= sent < transfers + 0.2  # labels and the loss's row sums are small messages


def test_tensor_parallel_steps_are_predicted_with_memory_left_out() -> None:
    divided = TrialSettings(
        task="train", method="megatron_tp", model=named_model("7b"), seq_len=1 << 17, tp_size=8, world_size=8,
        checkpoint=Checkpoint(every=1, tail=0.0),
    )  # fmt: skip
    found = forecast(divided, hardware_named("a800"))
    assert found.time is not None
    assert found.time.attention.schedule == "tensor_parallel"
    assert found.time.phases["waiting inside nodes"] > 0
    assert found.gpu_gib is None
    over = forecast(divided, hardware_named("a800"), node_ranks=4)
    assert over.time is not None
    assert over.time.phases["waiting between nodes"] > 0
    assert over.time.seconds > found.time.seconds


def test_a_tile_has_the_speed_between_those_measured() -> None:
    tiles = Tiles(tokens=(1024, 4096), forward=(100, 300), backward=(50, 90))
    assert tiles.tflops(512, backward=False) == 100
    assert tiles.tflops(2048, backward=False) == pytest.approx(200)
    assert tiles.tflops(2048, backward=True) == pytest.approx(70)
    assert tiles.tflops(1 << 20, backward=True) == 90
    assert tiles.in_step() == tiles
    slower = dataclasses.replace(tiles, backward_in_step=(40, 80)).in_step()
    assert [slower.tflops(2048, backward=backward) for backward in (True, False)] == pytest.approx([60, 200])


def test_short_tiles_of_a_ring_are_slower_where_the_hardware_file_says_so() -> None:
    ring = attention("ring", backward="key_value", grad_comm_dtype="input")
    free = dataclasses.replace(SLOW, inside_gib=1e9, across_gib=1e9)
    tiles = Tiles(tokens=(256, 4096), forward=(1.0, 2.0), backward=(1.0, 2.0))
    whole = dataclasses.replace(free, attention_forward_tflops=2.0, attention_backward_tflops=2.0)
    fast, slow = (attention_passes(ring, each)[0] for each in (whole, dataclasses.replace(whole, tiles=tiles)))
    assert 1.2 < slow.kernels / fast.kernels < 2


@pytest.mark.parametrize(
    ("tiles", "sentence"),
    [
        ({"fa4": {"tokens": [1024], "forward": [1.0]}}, "lacks backward"),
        ({"fa4": {"tokens": [1024], "forward": [1.0, 2.0], "backward": [1.0]}}, "as many speeds as tokens"),
        ({"fa4": {"tokens": [2048, 1024], "forward": [1.0, 2.0], "backward": [1.0, 2.0]}}, "do not rise"),
        ({"fa9": {"tokens": [1024], "forward": [1.0], "backward": [1.0]}}, "did you mean"),
        ({"fa4": {"tokens": [1024], "forward": [0], "backward": [1.0]}}, "expected a number above 0"),
    ],
)
def test_tiles_that_cannot_be_meant_are_one_sentence(tiles, sentence, tmp_path, capsys):
    path = tmp_path / "own.yaml"
    document = {
        "title": "own", "gpu_names": ["own"], "peak_bf16_tflops": 100, "memory_gib": 80, "kernel_tiles": tiles,
        "sources": {"peak_bf16_tflops": "here", "memory_gib": "here", "kernel_tiles": "here"},
    }  # fmt: skip
    path.write_text(json.dumps(document))
    assert (
        main(["plan", "--phases", "--hardware", str(path), "--model", "tiny", "--seq-len", "4k", "--cp-size", "2"]) == 2
    )
    assert sentence in capsys.readouterr().err
