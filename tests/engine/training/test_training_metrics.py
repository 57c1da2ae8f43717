"""metrics.jsonl over several starts, and the same figures in a tracker."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.training.config import MetricsChoice
from engine.training.files import MetricsWriter, read_metrics
from engine.training.trackers import EXTRAS, Tracker, open_tracker
from tests.engine.training.training_runs import config

STARTS = ((0, {1: 4.25, 2: 3.25, 3: 2.25}), (2, {3: 1.5}))  # each goes on after a step, and has these losses


def opened(run: Path, name: Any, from_step: int = 0) -> Tracker | None:
    return open_tracker(run, config(metrics=MetricsChoice(tracker=name)), from_step=from_step)


def write_starts(run: Path, name: str) -> None:
    """Both starts of a run with that tracker."""
    for from_step, losses in STARTS:
        writer = MetricsWriter(run, from_step=from_step, tracker=opened(run, name, from_step))
        for step, loss in losses.items():
            writer.write("step", step, step, loss=loss)
        writer.write("evaluation", max(losses), 3, loss=9.5)
        writer.close()


def test_lines_of_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path, from_step=0)
    for step in (1, 2, 3):
        first.write("step", step, 10 * step, loss=float(step), mfu=None)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # what a killed process leaves
    second = MetricsWriter(tmp_path, from_step=2)
    second.write("step", 3, 30, loss=3.5)
    assert read_metrics(tmp_path) == [
        {"kind": "step", "step": 1, "tokens": 10, "loss": 1.0},
        {"kind": "step", "step": 2, "tokens": 20, "loss": 2.0},
        {"kind": "step", "step": 3, "tokens": 30, "loss": 3.5},
    ]


def test_event_files_hold_the_same_figures_and_later_starts_replace_repeated_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the tensorboard package is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_starts(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("step/loss")] == [(1, 4.25), (2, 3.25), (3, 1.5)]
    assert [event.value for event in events.Scalars("evaluation/loss")] == [9.5]


def test_weights_and_biases_writes_both_starts_of_a_run_as_one_without_a_network(tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb", reason="the wandb package is not installed: pip install 'burst-harness[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SECRET_OF_THIS_TEST", "hunter2")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    write_starts(tmp_path, "wandb")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    name = (tmp_path / "tracker_id").read_text()
    first, second = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{name}.wandb"))
    for path, (_, losses) in zip((first, second), STARTS, strict=True):
        written = path.read_bytes()
        assert written.count(b"step/loss") >= len(losses)
        assert all(str(loss).encode() in written for loss in (*losses.values(), 9.5))
        assert b"learning_rate" in written
        assert b"hunter2" not in written


def test_trackio_writes_both_starts_of_a_run_as_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "database"))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    pytest.importorskip("trackio", reason="the trackio package is not installed: pip install 'burst-harness[trackio]'")
    from trackio.sqlite_storage import SQLiteStorage

    write_starts(tmp_path, "trackio")
    [name] = SQLiteStorage.get_runs("burst")
    assert name == f"{tmp_path.name}-{(tmp_path / 'tracker_id').read_text()}"
    losses = [
        (line["step"], line["step/loss"]) for line in SQLiteStorage.get_logs("burst", name) if "step/loss" in line
    ]
    assert losses == [(1, 4.25), (2, 3.25), (3, 2.25), (3, 1.5)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_figures_and_configuration_and_each_start_has_the_same_name(tmp_path, monkeypatch, name) -> None:
    calls: list[dict[str, Any]] = []
    figures: list[dict[str, float]] = []
    run = SimpleNamespace(
        log=lambda line, step=0: figures.append({"step": step, **line}), define_metric=lambda *_, **__: None,
        finish=lambda: figures.append({}),
    )  # fmt: skip
    package = SimpleNamespace(
        init=lambda **given: calls.append(given) or run, Settings=dict, Error=RuntimeError, teardown=lambda: None
    )
    monkeypatch.setitem(sys.modules, name, package)
    write_starts(tmp_path, name)
    first, second = calls
    assert first == second
    assert first["project"] == "burst"
    assert first["resume"] == "allow"
    assert first["config"]["settings"]["learning_rate"] == 0.01
    assert [line.get("step/loss") for line in figures] == [4.25, 3.25, 2.25, None, None, 1.5, None, None]
    assert [line.get("step/number", line.get("step")) for line in figures] == [1, 2, 3, 3, None, 3, 3, None]


def test_weights_and_biases_that_cannot_start_is_one_sentence(tmp_path, monkeypatch) -> None:
    def init(**_: object) -> None:
        raise RuntimeError("No API key configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict, Error=RuntimeError))
    with pytest.raises(
        ValueError, match=r"could not start \(No API key configured\); run `wandb login`, set WANDB_MODE="
    ):
        opened(tmp_path, "wandb")


@pytest.mark.parametrize("name", EXTRAS)
def test_a_tracker_is_refused_where_its_package_is_missing_and_only_when_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    assert opened(tmp_path, "none") is None
    said = rf"metrics.tracker is {name}, and the {name} package .*pip install 'burst-harness\[{EXTRAS[name]}\]'"
    with pytest.raises(ValueError, match=said):
        opened(tmp_path, name)
