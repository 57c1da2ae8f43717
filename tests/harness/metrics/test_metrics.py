"""Derived figures of one record."""

from __future__ import annotations

import dataclasses

import pytest

from harness.metrics.throughput import Metrics, interquartile_range, metrics_of
from tests.harness.synthetic_records import GIB, H200, LARGE, record


def test_medians_and_throughput_follow_from_step_times() -> None:
    trial = record(seq_len=1024, batch_size=2, cp_size=2, world_size=4)
    assert trial.measurement is not None
    trial.measurement.step_seconds = [0.5, 0.25, 4.0]
    found = metrics_of(trial)
    assert found.samples == 3
    assert found.step_seconds_median == 0.5
    # 1024 tokens x 2 sequences x 2 replicas over half a second on 4 ranks.
    assert found.tokens_per_gpu_per_second == 1024 * 2 * 2 / (0.5 * 4)


def test_attention_tflops_use_the_kernel_convention_and_mfu_the_model_one() -> None:
    found = metrics_of(
        record(task="attention", model=LARGE, seq_len=65536, cp_size=4, dtype="bf16", gpu=H200, seconds=1.0)
    )
    forward = 4 * 16 * 128 * (65536 * 65537 // 2)
    assert found.step_seconds_median == pytest.approx(1.04)
    assert found.tflops_per_gpu == pytest.approx(3.5 * forward / 1.04 / 4 / 1e12)
    assert found.mfu == pytest.approx(3 * forward / 1.04 / 4 / 1e12 / 989, rel=1e-3)
    assert found.mfu is not None
    assert found.hfu == pytest.approx(found.mfu * 3.5 / 3)


def test_training_figures_keep_their_order() -> None:
    found = metrics_of(record(model=LARGE, seq_len=65536, cp_size=4, dtype="bf16", gpu=H200, seconds=2.0))
    assert found.mfu is not None
    assert found.hfu is not None
    assert found.mfu_ceiling is not None
    assert 0 < found.mfu < found.hfu < 1
    assert found.mfu < found.mfu_ceiling < 1
    assert found.peak_tflops == 989
    assert found.tflops_per_gpu == pytest.approx(found.mfu * found.peak_tflops)


def test_a_cpu_has_no_utilisation() -> None:
    found = metrics_of(record())
    assert (found.mfu, found.hfu, found.mfu_ceiling, found.peak_tflops) == (None, None, None, None)
    assert found.tflops_per_gpu is not None


def test_an_fp32_run_is_not_held_against_the_bf16_peak() -> None:
    assert metrics_of(record(model=LARGE, dtype="fp32", gpu=H200)).mfu is None
    assert metrics_of(record(model=LARGE, dtype="bf16", gpu=H200)).mfu is not None


def test_an_unknown_gpu_has_speed_but_no_utilisation() -> None:
    found = metrics_of(record(model=LARGE, dtype="bf16", gpu="Imaginary GPU 9000"))
    assert found.mfu is None
    assert found.tflops_per_gpu is not None


def test_a_kernel_without_a_measured_speed_has_no_ceiling() -> None:
    found = metrics_of(record(model=LARGE, dtype="bf16", gpu=H200, kernel="reference"))
    assert found.mfu is not None
    assert found.mfu_ceiling is None


def test_memory_and_traffic_are_maxima_over_ranks() -> None:
    trial = record(cp_size=2)
    assert trial.measurement is not None
    trial.measurement.peak_allocated_bytes = [3 * GIB, 5 * GIB]
    trial.measurement.peak_reserved_bytes = [7 * GIB, 6 * GIB]
    trial.measurement.sent_bytes = [GIB // 2, GIB // 4]
    found = metrics_of(trial)
    assert (found.peak_memory_gib, found.peak_reserved_gib, found.sent_gib_per_gpu) == (5, 7, 0.5)


def test_what_was_not_measured_is_absent_rather_than_zero() -> None:
    trial = record()
    assert trial.measurement is not None
    for name in ("forward_seconds", "loss", "grad_norm", "peak_rss_bytes", "sent_bytes"):
        setattr(trial.measurement, name, [])
    found = metrics_of(trial)
    assert found.forward_seconds_median is None
    assert (found.loss, found.grad_norm, found.peak_rss_gib, found.sent_gib_per_gpu) == (None,) * 4


def test_bytes_that_were_counted_as_zero_stay_zero() -> None:
    assert metrics_of(record(cp_size=1)).sent_gib_per_gpu == 0.0
    trial = record(task="attention", cp_size=2)
    assert trial.measurement is not None
    trial.measurement.sent_bytes, trial.measurement.extra["computed_sent_bytes"] = [0, 0], [0, 0]
    assert metrics_of(trial).sent_gib_per_gpu == 0.0


def test_bytes_that_a_method_did_not_count_are_absent() -> None:
    trial = record(task="attention", cp_size=2)
    assert trial.measurement is not None
    trial.measurement.sent_bytes = [0, 0]
    assert metrics_of(trial).sent_gib_per_gpu is None


def test_traffic_that_was_not_counted_is_absent() -> None:
    trial = record(cp_size=2, task="attention")
    assert trial.measurement is not None
    trial.measurement.sent_bytes = [0, 0]  # of a method with transports of its own
    assert metrics_of(trial).sent_gib_per_gpu is None
    trial.measurement.extra["computed_sent_bytes"] = [0, 0]  # of a mask that no rank needs another's keys for
    assert metrics_of(trial).sent_gib_per_gpu == 0.0
    assert metrics_of(record(task="lm_head")).sent_gib_per_gpu is None


def test_loss_is_that_of_the_last_measured_step() -> None:
    trial = record()
    assert trial.measurement is not None
    trial.measurement.loss, trial.measurement.grad_norm = [5.0, 4.0, 3.0, 2.0], [4.0, 3.0, 2.0, 1.0]
    assert (metrics_of(trial).loss, metrics_of(trial).grad_norm) == (2.0, 1.0)


@pytest.mark.parametrize("status", ["oom", "host_oom", "timeout", "hang", "failed", "node_lost", "refused"])
def test_a_trial_that_did_not_end_well_has_no_figures(status: str) -> None:
    trial = record(status=status)  # type: ignore[arg-type]
    trial.measurement = record().measurement  # left before it failed: still no result
    assert all(value is None for value in dataclasses.asdict(metrics_of(trial)).values())
    assert metrics_of(trial) == Metrics()


def test_an_ok_record_without_times_is_an_error() -> None:
    trial = record()
    trial.measurement = None
    with pytest.raises(ValueError, match="ok but holds no step times"):
        metrics_of(trial)


def test_spread_is_the_middle_half_and_needs_two_samples() -> None:
    assert interquartile_range([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert interquartile_range([1.0, 2.0]) == 0.5
    assert interquartile_range([1.0]) is None
