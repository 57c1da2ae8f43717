"""Task lm_head as a launcher sees it, and its numbers in tables and figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from engine.burst import METHOD
from engine.distributed import arrange
from engine.measurement import Measurement
from engine.settings import Steps, TrialSettings
from engine.shape import ModelShape
from engine.tasks.lm_head import HeadTask
from engine.worker import silent
from harness.metrics.flops import work_of
from harness.records.record import Record
from harness.report.figures import shown_of
from harness.report.results import rows_of
from harness.report.tables.particular import head_table
from tests.harness.report.figures.drawn import sheet_of, texts
from tests.harness.synthetic_records import GIB, H200, record
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=3, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=501)


def settings(**changes: Any) -> TrialSettings:
    fields: dict[str, Any] = {"task": "lm_head", "method": "burst", "model": SHAPE, "seq_len": 64, "dtype": "fp32"}
    return TrialSettings(**{**fields, "steps": Steps(warmup=1, measured=2), **changes})


def measure() -> dict[str, dict[str, Any]]:
    """On each rank: the measurement of either form."""
    found = {}
    for name, fused in (("own", True), ("plain", False)):
        trial = settings(cp_size=2, lm_head_fusion=fused, z_loss=1e-3)
        task = HeadTask(trial, METHOD, arrange(trial, torch.device("cpu")))
        found[name] = asdict(task.run(silent))
        found[name]["extra"] |= task.check()
    return found


@pytest.fixture(scope="module")
def trials() -> dict[str, Measurement]:
    """What two ranks measure in either form."""
    return {name: Measurement(**figures) for name, figures in run_on_ranks(2, measure)[0].items()}


def test_every_raw_figure_is_left(trials: dict[str, Measurement]) -> None:
    for measurement in trials.values():
        assert len(measurement.step_seconds) == len(measurement.forward_seconds) == 2
        assert all(0 < f < s for f, s in zip(measurement.forward_seconds, measurement.step_seconds, strict=True))
        assert len(measurement.loss) == len(measurement.grad_norm) == 3
        assert len(measurement.peak_rss_bytes) == 2
        assert measurement.sent_bytes == [0, 0]
        held = 2 * 4 * (32 * SHAPE.hidden + SHAPE.vocab * SHAPE.hidden) + 8 * 32
        assert measurement.extra["held_gib"] == pytest.approx(held / GIB)
    assert trials["own"].chosen == {"tile": f"{(1 << 24) // 501} x 501"}
    assert trials["plain"].chosen == {}


def test_both_forms_compute_the_same_on_the_same_inputs(trials: dict[str, Measurement]) -> None:
    own, plain = trials["own"], trials["plain"]
    assert own.loss == pytest.approx(plain.loss, rel=1e-6)
    assert own.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    assert own.loss[0] == own.loss[-1]  # every step has the same inputs
    assert 6.2 < own.loss[0] < 9.5  # log 501, and half the variance of the logits at most


def test_a_small_problem_is_held_against_float64(trials: dict[str, Measurement]) -> None:
    for measurement in trials.values():
        assert set(measurement.extra["error"]) == {"loss", "dhidden", "dweight"}
        assert all(0 <= error < 1e-5 for error in measurement.extra["error"].values())


def test_its_work_is_three_products_and_no_attention() -> None:
    work = work_of(settings(cp_size=2, world_size=4, batch_size=3))
    assert (work.layers, work.attention, work.recomputed_layers) == (0.0, 0.0, 0.0)
    assert work.model == work.kernel == work.hardware == 6 * (64 * 3 * 2) * 32 * 501


def gpu_records() -> list[Record]:
    """Four forms on a GPU, of which plain ran out of memory."""
    common: dict[str, Any] = {"task": "lm_head", "gpu": H200, "dtype": "bf16", "seq_len": 1 << 16}
    found = [
        record(**common, loss_kernel="own", seconds=0.5),
        record(**common, loss_kernel="liger", seconds=1.0),
        record(**common, loss_kernel="cce", status="refused"),
        record(**common, lm_head_fusion=False, status="oom"),
    ]
    for each in found:
        if each.measurement is not None:
            each.measurement.loss = [7.0] * 3
            each.measurement.extra = {"held_gib": 5.0, "error": {"loss": 1e-7, "dhidden": 2e-3, "dweight": 3e-3}}
    return found


def test_the_table_has_a_line_per_implementation_with_memory_beyond_the_common_part() -> None:
    table = head_table(rows_of(gpu_records()))
    assert table is not None
    headers = [column.header for column in table.columns]
    lines = {row[headers.index("form")]: dict(zip(headers, row, strict=True)) for row in table.rows}
    assert set(lines) == {"own", "liger", "cce", "plain"}
    assert lines["plain"]["ms"] == "oom"
    assert lines["cce"]["ms"] == "refused"
    own = lines["own"]
    assert own["GiB beyond"] == own["peak GiB"] - 5.0
    assert own["TFLOP/s/GPU"] == pytest.approx(2 * lines["liger"]["TFLOP/s/GPU"])
    assert own["dweight error"] == 3e-3
    assert head_table(rows_of([record()])) is None


def test_speed_is_drawn_beside_what_the_matmuls_would_allow_and_no_loss_curve() -> None:
    rows = rows_of(gpu_records())
    assert any(row["tflops_ceiling"] for row in rows)  # no attention kernel's speed is needed for it
    assert set(shown_of(rows)) == {"speed", "memory"}
    speed = sheet_of("speed", rows)
    assert speed.title.startswith("LM head and loss: ")
    assert "ceiling" in speed.note
    assert "TFLOP/s per GPU" in texts(speed)
