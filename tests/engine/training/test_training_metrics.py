"""metrics.jsonl over several starts, and TensorBoard's event files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.training.files import MetricsWriter, read_metrics


def test_lines_of_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path, from_step=0, tensorboard=False)
    for step in (1, 2, 3):
        first.write("step", step, 10 * step, loss=float(step), mfu=None)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # what a killed process leaves
    second = MetricsWriter(tmp_path, from_step=2, tensorboard=False)
    second.write("step", 3, 30, loss=3.5)
    assert read_metrics(tmp_path) == [
        {"kind": "step", "step": 1, "tokens": 10, "loss": 1.0},
        {"kind": "step", "step": 2, "tokens": 20, "loss": 2.0},
        {"kind": "step", "step": 3, "tokens": 30, "loss": 3.5},
    ]


def test_event_files_hold_the_same_figures_and_later_starts_replace_repeated_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the tensorboard package is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for from_step, losses in ((0, {1: 4.0, 2: 3.0, 3: 2.0}), (2, {3: 1.5})):
        writer = MetricsWriter(tmp_path, from_step=from_step, tensorboard=True)
        for step, loss in losses.items():
            writer.write("step", step, step, loss=loss)
        writer.write("evaluation", max(losses), 3, loss=9.0)
        writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("step/loss")] == [(1, 4.0), (2, 3.0), (3, 1.5)]
    assert [event.value for event in events.Scalars("evaluation/loss")] == [9.0]


def test_tensorboard_is_refused_where_it_is_missing_and_only_when_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    MetricsWriter(tmp_path, from_step=0, tensorboard=False)
    with pytest.raises(ValueError, match=r"needs the tensorboard package.*pip install 'burst-harness\[train\]'"):
        MetricsWriter(tmp_path, from_step=0, tensorboard=True)
