"""A step under the profiler in real ranks: which step, whose time, and what is left behind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.distributed import arrange
from engine.measurement import MEASUREMENT_FILE, PROGRESS_FILE, TRACE_FILE, read_measurement
from engine.profile.breakdown import CATEGORIES
from engine.profile.capture import StepProfiler, step_to_trace
from engine.settings import Checkpoint, Steps, TrialSettings
from engine.shape import ModelShape
from engine.worker import TASKS, PhaseTimer, measure
from harness.spec.methods import method_named
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=259)


def settings_of(**changes: Any) -> TrialSettings:
    fields: dict[str, Any] = {
        "task": "train", "method": "burst", "model": SHAPE, "seq_len": 64, "cp_size": 2, "dtype": "fp32",
        "steps": Steps(warmup=1, measured=2), "checkpoint": Checkpoint(tail=0.5),
    }  # fmt: skip
    return TrialSettings(**{**fields, **changes})


def profiled(directory: str, settings: TrialSettings) -> tuple[dict[str, Any], list[float], list[str]]:
    """(what rank 0's measurement says, all losses, names that its trace marked with `burst.`); nothing of others."""
    world = arrange(settings, torch.device("cpu"))
    rank_dir = Path(directory, f"rank{world.rank}")
    rank_dir.mkdir()
    task = TASKS[settings.task](settings, method_named(settings.method), world)
    profiler = StepProfiler(rank_dir, world, step_to_trace(settings))
    measure(task, profiler, rank_dir, world.rank, PhaseTimer(shown=False))
    left = sorted(path.name for path in rank_dir.iterdir())
    if world.rank:
        assert left == []
        return {}, [], []
    assert left == [MEASUREMENT_FILE, PROGRESS_FILE, TRACE_FILE]
    figures = read_measurement(rank_dir)
    trace = json.loads(gzip.decompress((rank_dir / TRACE_FILE).read_bytes()))
    names = [event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("burst.")]
    return figures.extra["profile"], figures.loss, names


def check(profile: dict[str, Any], of: str) -> None:
    assert (profile["of"], profile["on"], profile["rank"] in (0, 1)) == (of, "cpu", True)
    assert list(profile["seconds"]) == list(CATEGORIES)
    assert sum(profile["seconds"].values()) == pytest.approx(profile["span_seconds"])
    assert profile["seconds"]["communication"] > 0 or profile["seconds"]["idle"] > 0


def test_training_is_traced_in_one_more_step(tmp_path: Path) -> None:
    [(profile, loss, names), _] = run_on_ranks(2, profiled, str(tmp_path), settings_of())
    check(profile, "extra_step")
    assert len(loss) == 3
    assert {name: names.count(name) for name in names} == {
        "burst.step": 1,
        "burst.recompute": 2,
        "burst.optimizer": 1,
        "burst.lm_head": 1,
    }
    for category in ("attention_forward", "attention_backward", "attention_recomputed", "matmul", "recomputed"):
        assert profile["seconds"][category] > 0, category
    assert profile["seconds"]["optimizer"] > 0
    assert profile["seconds"]["lm_head"] > 0


def test_a_single_measured_step_is_traced_itself(tmp_path: Path) -> None:
    settings = settings_of(steps=Steps(warmup=1, measured=1), checkpoint=Checkpoint(every=0))
    [(profile, loss, names), _] = run_on_ranks(2, profiled, str(tmp_path), settings)
    check(profile, "measured_step")
    assert len(loss) == 2
    # No layer is computed again, but its norms are: they are not kept.
    assert sorted(set(names)) == ["burst.lm_head", "burst.optimizer", "burst.recompute", "burst.step"]
    assert profile["seconds"]["attention_recomputed"] == 0


@pytest.mark.parametrize(
    ("task", "method", "category"),
    [("attention", "ulysses", "attention_backward"), ("lm_head", "burst", "lm_head")],
)
def test_calls_are_traced_once_more(tmp_path: Path, task: str, method: str, category: str) -> None:
    [(profile, _, names), _] = run_on_ranks(2, profiled, str(tmp_path), settings_of(task=task, method=method))
    assert (profile["of"], names.count("burst.step")) == ("extra_step", 1)
    assert sum(profile["seconds"].values()) == pytest.approx(profile["span_seconds"])
    assert profile["seconds"][category] > 0
