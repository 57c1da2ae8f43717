"""The second set of formulas: by hand, against each pair of a mask, and beside the first on settings of any kind."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.lora import Lora
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from harness.records.record import Record, Round
from harness.report.results import row_of
from tests.harness.metrics import second_formulas
from tests.harness.metrics.second_formulas import COLUMNS, figures_of, visible_pairs
from tests.harness.synthetic_records import H200, LARGE, measurement, record
from tests.published import stored_records

S = 24


def sees(mask: str, query: int, key: int) -> bool:
    """The definition of docs/attention.md, for one pair."""
    name, *arguments = mask.split(":")
    if name == "full":
        return True
    if name == "causal":
        return key <= query
    if name == "sliding_window":
        left, right, first = (*map(int, arguments), 0, 0)[:3]
        near = query - left <= key <= query + right
        everywhere = key < first or query < first
        return near or (everywhere and (key <= query or right > 0))
    if name == "documents":
        lengths = [int(one) for one in arguments[0].removesuffix(",...").split(",")]

        def document(position: int) -> tuple[int, int]:
            period, place = divmod(position, sum(lengths))
            index = 0
            while place >= lengths[index]:
                place -= lengths[index]
                index += 1
            return period, index

        return document(query) == document(key) and (key <= query or len(arguments) > 1)
    size, pattern, causal = int(arguments[0]), arguments[1], len(arguments) > 2
    a, b = query // size, key // size
    kind, *numbers = pattern.split("-")
    if kind == "strided":
        seen = abs(a - b) < int(numbers[0]) or (b + 1) % int(numbers[0]) == 0
    elif kind == "local_global":
        seen = abs(a - b) <= int(numbers[0]) or min(a, b) < int(numbers[1])
    else:
        seen = pattern.split("/")[a][b] == "1"
    return seen and (key <= query or not causal)


MASKS = (
    "full", "causal", "sliding_window:5", "sliding_window:5:2", "sliding_window:4:0:3", "sliding_window:4:3:2",
    "sliding_window:0:0:30", "documents:4,7,13", "documents:5,3,...", "documents:5,3,...:full", "documents:24:full",
    "block_sparse:5:strided-2", "block_sparse:5:strided-2:causal", "block_sparse:7:local_global-1-1",
    "block_sparse:7:local_global-0-2:causal", "block_sparse:12:01/10", "block_sparse:12:11/01:causal",
)  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rows", [S, 17, 1, 0])
def test_the_second_count_is_that_of_every_single_pair(mask: str, rows: int) -> None:
    assert visible_pairs(mask, S, rows) == sum(sees(mask, query, key) for query in range(rows) for key in range(S))


def test_lengths_in_k_and_sequences_longer_than_what_is_counted_at_once() -> None:
    seq_len = (1 << 21) + 5
    assert visible_pairs("sliding_window:1k", seq_len, seq_len) == seq_len * 1025 - 1024 * 1025 // 2
    assert visible_pairs("documents:1M,...", seq_len, seq_len) == 2 * (1 << 20) * ((1 << 20) + 1) // 2 + 15


@pytest.mark.parametrize(
    ("mask", "seq_len"),
    [
        ("diagonal", S),
        ("block_sparse:4:random-3", S),
        ("sliding_window:4", 1 << 40),
        ("documents:4,...", 1 << 40),
        ("block_sparse:1:strided-2", 1 << 20),
    ],
)
def test_a_mask_without_a_second_count_is_an_error(mask: str, seq_len: int) -> None:
    with pytest.raises(ValueError, match="has no second count"):
        visible_pairs(mask, seq_len, seq_len)


def test_figures_of_a_training_step_by_hand() -> None:
    shape = ModelShape(name="m", layers=2, hidden=8, ffn=16, heads=2, kv_heads=1, head_dim=4, vocab=32)
    found = figures_of(record(gpu=H200, dtype="bf16", model=shape, seq_len=4, cp_size=2, seconds=1.0))
    # A layer: queries and output 8 x 8 each, keys and values 8 x 4 each, three matrices of 8 x 16.
    layers = 2 * 4 * 2 * (64 + 64 + 32 + 32 + 3 * 128)
    head = 2 * 4 * 8 * 32
    attention = 2 * 4 * 2 * 4 * 10
    step = 1.04  # of 1, 1.04 and 1.08 s
    model = 3 * (layers + head + attention)
    assert found["tokens_per_gpu_per_second"] == pytest.approx(4 / 2 / step)
    assert found["tflops_per_gpu"] == pytest.approx(model / 2 / step / 1e12)
    assert found["mfu"] == pytest.approx(model / 2 / step / 989e12)
    # Checkpointing repeats each layer but the MLP's last matrix; attention kernels repeat the scores.
    again = layers - 2 * 4 * 2 * 128 + attention / 2
    assert found["hfu"] == pytest.approx((model + again) / 2 / step / 989e12)
    assert found["step_seconds_iqr"] == pytest.approx(0.04)
    assert found["peak_memory_gib"] == pytest.approx(21 // 2 + 0.5)


def test_the_ceiling_takes_the_gemms_that_a_trial_measured_at_its_own_shapes() -> None:
    one = record(gpu=H200, dtype="bf16", model=LARGE, seq_len=1 << 16)
    assert one.measurement is not None
    products = ("query", "key_value", "out", "gate_up", "down", "lm_head")
    directions = ("forward", "dgrad", "wgrad")
    of_the_hardware = figures_of(one)["mfu_ceiling"]
    one.measurement.extra["gemm_tflops"] = {name: dict.fromkeys(directions, 796.0) for name in products}
    assert figures_of(one)["mfu_ceiling"] == pytest.approx(of_the_hardware)
    for name in products:  # two thirds of each product's FLOPs at half the speed
        one.measurement.extra["gemm_tflops"][name] |= {"dgrad": 398.0, "wgrad": 398.0}
    slower = figures_of(one)["mfu_ceiling"]
    one.measurement.extra["gemm_tflops"] = {name: dict.fromkeys(directions, 796.0 * 3 / 5) for name in products}
    assert figures_of(one)["mfu_ceiling"] == pytest.approx(slower)
    del one.measurement.extra["gemm_tflops"]["down"]
    assert figures_of(one)["mfu_ceiling"] == of_the_hardware


def differing(one: Record) -> dict[str, Any]:
    """Figures in which the two sets of formulas differ."""
    row, second = row_of(one), figures_of(one)
    return {
        name: (row[name], value)
        for name, value in second.items()
        if (row[name] is None) != (value is None)
        or (value is not None and not math.isclose(row[name], value, rel_tol=1e-9))
    }


def any_shape(layers: int, mixer: tuple[str, str], **sizes: int) -> ModelShape:
    linear: dict[str, Any] = {}
    if mixer[0] and layers >= len(mixer[1]):
        linear = {"linear": mixer[0], "layer_pattern": mixer[1], "linear_heads": 8, "linear_key_heads": 2}
        linear |= {"linear_key_dim": 3, "linear_value_dim": 5}
    return ModelShape(name="any", layers=layers, **sizes, **linear)


settings_of_any_kind = st.builds(
    TrialSettings,
    task=st.sampled_from(["train", "attention", "lm_head"]),
    method=st.just("burst"),
    model=st.builds(
        any_shape,
        layers=st.integers(1, 20),
        hidden=st.integers(1, 500),
        ffn=st.integers(1, 500),
        heads=st.sampled_from([4, 8]),
        kv_heads=st.sampled_from([1, 2, 4]),
        head_dim=st.sampled_from([2, 64]),
        vocab=st.integers(1, 1000),
        gated=st.booleans(),
        qk_norm=st.booleans(),
        mixer=st.sampled_from([("", "f"), ("", "f"), ("gated_delta_net", "lf"), ("mamba2", "llf"), ("mamba2", "lLf")]),
    ),
    seq_len=st.just(S),
    cp_size=st.sampled_from([1, 2, 3, 5]),
    world_size=st.sampled_from([0, 30]),
    batch_size=st.integers(1, 3),
    gradient_accumulation=st.integers(1, 3),
    mask=st.sampled_from(MASKS),
    mlp_tiles=st.sampled_from([1, 4]),
    projection_tiles=st.sampled_from([1, 4]),
    head_groups=st.sampled_from([1, 3]),
    checkpoint=st.builds(
        Checkpoint,
        every=st.integers(0, 9),
        tail=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
        replay=st.sampled_from(["hold", "bisect"]),
        whole_layers=st.integers(0, 9),
        mlp=st.sampled_from([0.0, 0.3, 1.0]),
    ),
    kernel=st.sampled_from(["fa4", "cudnn", "flex"]),
    linear_dtype=st.sampled_from(["same", "same", "float8"]),
    lora=st.sampled_from([None, None, Lora(rank=2, alpha=4, targets=("q", "v", "output", "up", "down"))]),
)


@given(settings_of_any_kind, st.sampled_from([H200, "", "Some other GPU"]))
@hypothesis_settings(deadline=None, max_examples=150)
def test_both_sets_of_formulas_agree_on_settings_of_any_kind(of: TrialSettings, gpu: str) -> None:
    one = record(gpu=gpu)
    one.settings, one.measurement = of, measurement(of, gpu=gpu)
    assert differing(one) == {}


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_both_sets_of_formulas_agree_on_the_interval_of_rounds(rounds: int) -> None:
    one = record(gpu=H200, model=LARGE, dtype="bf16")
    assert one.measurement is not None
    steps = [[0.2 + 0.01 * number, 0.21 + 0.003 * number**2, 0.19] for number in range(rounds)]
    one.rounds = [
        Round(number=number, place=1, started_at="2026-01-02T03:04:05Z", wall_seconds=1.0, step_seconds=seconds)
        for number, seconds in enumerate(steps, start=1)
    ]
    one.measurement.step_seconds = [second for seconds in steps for second in seconds]
    one.measurement.forward_seconds = []
    assert differing(one) == {}
    assert (figures_of(one)["step_seconds_low"] is None) == (rounds < 3)


def test_a_trial_without_figures_has_none() -> None:
    found = figures_of(record(status="oom"))
    assert {name for name in COLUMNS if found[name] is not None} == {"dp_size", "nodes"}


def test_both_sets_of_formulas_agree_on_every_published_record() -> None:
    assert {f"{run}: {one.place}": found for run, one in stored_records() if (found := differing(one.record()))} == {}


def test_a_formula_that_changed_is_found_by_the_second_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.metrics.throughput.GIB", 1000**3)
    assert "peak_rss_gib" in differing(record())
    monkeypatch.setattr(
        "tests.harness.metrics.second_formulas.visible_pairs", lambda mask, seq_len, rows: rows * seq_len
    )
    assert "tflops_per_gpu" in differing(record(mask="causal"))


def test_the_second_set_uses_nothing_of_the_first() -> None:
    tree = ast.parse(Path(second_formulas.__file__).read_text(encoding="utf-8"))
    ours = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} - {"__future__"}
    first = {name for name in ours if name and name.startswith(("harness.", "engine."))}
    assert first == {"engine.settings", "engine.shape", "harness.metrics.hardware", "harness.records.record"}
