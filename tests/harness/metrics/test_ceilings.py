"""The ceiling of a trial: which speeds it is formed from, and what is said of where and when they were measured."""

from __future__ import annotations

from typing import Any

import pytest

from engine.settings import TrialSettings
from engine.tasks.products import DIRECTIONS, matrix_products
from harness.metrics.flops import work_of
from harness.metrics.hardware import all_hardware
from harness.metrics.throughput import FORMULAS, kernel_bound_seconds, metrics_of, own_gemm_tflops
from harness.records.record import Record
from harness.report.results import row_of
from tests.harness.synthetic_records import H200, LARGE, SMALL, record

WHERE = "in this trial, after its last step"


def trained(speeds: dict[str, dict[str, float]] | None = None, **changes: Any) -> Record:
    """A training trial on an H200, with GEMM speeds of its own where they are given."""
    trial = record(
        **{"model": LARGE, "seq_len": 65536, "cp_size": 4, "dtype": "bf16", "gpu": H200, "seconds": 2.0} | changes
    )
    assert trial.measurement is not None
    if speeds is not None:
        trial.measurement.extra["gemm_tflops"] = speeds
        trial.measurement.extra["gemm"] = {"where": WHERE, "started_at": "2026-11-22T03:04:05Z"}
    return trial


def all_at(speed: float) -> dict[str, dict[str, float]]:
    return {product.name: dict.fromkeys(DIRECTIONS, speed) for product in matrix_products(LARGE)}


@pytest.mark.parametrize("model", [SMALL, LARGE])
def test_the_products_hold_every_weight_that_the_flops_count(model) -> None:
    weights = sum(product.weights for product in matrix_products(model))
    assert weights == model.layers * model.layer_matrices + model.vocab * model.hidden
    work = work_of(TrialSettings(task="train", method="burst", model=model, seq_len=1024))
    assert 2 * 1024 * weights == work.layers + work.head


def test_products_count_by_the_time_they_take() -> None:
    speeds = all_at(600.0)
    assert own_gemm_tflops(LARGE, speeds) == pytest.approx(600)
    speeds["lm_head"] = dict.fromkeys(DIRECTIONS, 300.0)
    share = LARGE.vocab * LARGE.hidden / sum(product.weights for product in matrix_products(LARGE))
    assert own_gemm_tflops(LARGE, speeds) == pytest.approx(1 / ((1 - share) / 600 + share / 300))
    speeds["lm_head"]["forward"] = 600.0  # of three directions one
    assert own_gemm_tflops(LARGE, speeds) == pytest.approx(1 / ((1 - share * 2 / 3) / 600 + share * 2 / 3 / 300))


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {},
        {"query": {}},
        all_at(600.0) | {"down": {"forward": 600.0}},
        all_at(600.0) | {"out": dict.fromkeys(DIRECTIONS, 0)},
    ],
)
def test_speeds_that_are_not_all_there_are_no_ceiling(broken) -> None:
    assert own_gemm_tflops(LARGE, broken) is None


def test_a_ceiling_takes_the_trials_own_gemms_and_says_when_and_where() -> None:
    own, published = metrics_of(trained(all_at(600.0))), metrics_of(trained())
    assert own.mfu_ceiling is not None
    assert published.mfu_ceiling is not None
    assert own.mfu_ceiling < published.mfu_ceiling  # 600 against 796 TFLOP/s
    work, h200 = work_of(trained().settings), all_hardware()["h200"]
    seconds = kernel_bound_seconds(work, h200, "fa4", gemm=600.0)
    assert seconds is not None
    assert own.mfu_ceiling == pytest.approx(work.model / seconds / 1e12 / 989)
    assert own.tflops_ceiling == pytest.approx(work.model / seconds / 1e12)
    kernel = "attention kernel fa4: experiments/hardware/h200.yaml, 2026-11-20, 64K tokens, causal, 32 heads x 128"
    assert own.ceiling_source == (f"GEMMs of this trial's shapes: {WHERE}, 2026-11-22T03:04:05Z; {kernel}")
    assert published.ceiling_source == (
        f"GEMM: experiments/hardware/h200.yaml, 2026-11-20, bf16, 8192 x 8192 x 8192; {kernel}"
    )
    assert row_of(trained(all_at(600.0)))["ceiling_source"] == own.ceiling_source
    assert "ceiling_source" in FORMULAS


def test_attention_alone_rests_on_its_kernel_and_an_lm_head_on_a_gemm() -> None:
    attention = metrics_of(trained(task="attention"))
    assert attention.ceiling_source is not None
    assert attention.ceiling_source.startswith("attention kernel fa4: ")
    head = metrics_of(trained(task="lm_head", cp_size=1))
    assert head.ceiling_source is not None
    assert head.ceiling_source.startswith("GEMM: ")
    assert "attention" not in head.ceiling_source


def test_own_gemms_make_no_ceiling_where_the_attention_kernel_was_never_measured() -> None:
    found = metrics_of(trained(all_at(600.0), gpu="NVIDIA H100 80GB HBM3"))
    assert found.mfu is not None
    assert (found.mfu_ceiling, found.tflops_ceiling, found.ceiling_source) == (None, None, None)


def test_a_record_that_could_not_measure_its_gemms_takes_the_hardwares() -> None:
    trial = trained()
    assert trial.measurement is not None
    trial.measurement.extra["gemm"] = {"reason": "the GEMMs of this trial's shapes were not measured: out of memory"}
    assert metrics_of(trial) == metrics_of(trained())
