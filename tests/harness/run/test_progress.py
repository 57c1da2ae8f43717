"""What commands say while they work: a stage that takes long is named on stderr, and again as it gets on."""

from __future__ import annotations

import importlib
import io
import shutil
import sys
import time
from pathlib import Path

import pytest

from cluster.files import progress
from cluster.files.progress import FIRST_SECONDS, Progress
from harness.cli import main
from harness.run.progress import PlainView
from harness.training.progress import TrainingView, describe_line
from tests.patience import SOON
from tests.published import PUBLISHED

EXPERIMENT = """\
title: A small question
task: attention
model: tiny
sweep: {method: [burst]}
fixed: {seq_len: 256, dtype: fp32, mask: causal}
steps: {warmup: 0, measured: 1}
"""
TRAINING = "{model: tiny, data: python_docs, seq_len: 256, steps: 2, dtype: fp32}\n"
NODES = "nodes: [127.0.0.1]\n"


class Clock:
    """Time that passes when the test says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(progress, "FIRST_SECONDS", FIRST_SECONDS)
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)

    def after(self, seconds: float, told: Progress) -> str | None:
        self.now += seconds
        return told.due(self.now)


def test_a_stage_is_named_once_it_takes_long_and_again_as_it_gets_on(monkeypatch):
    clock = Clock(monkeypatch)
    told = Progress("reading")
    assert clock.after(1.4, told) is None  # most commands have ended by then
    assert clock.after(0.1, told) == "reading"
    told.so_far("1 of 9 runs")
    told.say("a sentence of its own")  # what is printed anyhow says that the command is alive
    assert clock.after(9.9, told) is None
    assert clock.after(0.1, told) == "reading: 1 of 9 runs"
    told.say("")  # as the thread does with a line that is due
    assert clock.after(60.0, told) is None  # nothing new
    told.stage("drawing")
    told.so_far("a figure")
    assert clock.after(1.4, told) is None
    assert clock.after(0.1, told) == "drawing: a figure"
    told.stage("")
    assert clock.after(60.0, told) is None


def test_the_first_stage_is_named_within_two_seconds():
    assert FIRST_SECONDS * (1 + 1 / 8) < 2  # the thread looks eight times in that while


def test_trials_and_steps_that_take_long_are_said_where_there_is_no_terminal(monkeypatch):
    clock, said = Clock(monkeypatch), []
    told = Progress("planning", out=said.append)
    view = PlainView(told)
    view.begin(2, "round 1 of 3")
    trial, record = type("T", (), {"id": "a"}), type("R", (), {"trial_id": "a", "status": "ok", "wall_seconds": 1.0})
    record.reason = ""
    view.trial_began(trial)
    assert clock.after(1.5, told) == "running the trials: [1/2, round 1 of 3] a  starting"
    view.trial_ended(record)
    assert said == ["[1/2, round 1 of 3] a  ok  1.0 s"]
    view.trial_began(trial)
    view.step({"step": 1, "of": 4, "loss": 2.5, "seconds": 3.0})
    assert clock.after(9.9, told) is None
    assert clock.after(0.1, told) == "running the trials: [2/2, round 1 of 3] a  step 1 of 4  loss 2.5000  3.00 s"
    view.end()
    assert clock.after(60.0, told) is None


def test_a_training_run_says_that_it_starts_and_seldom_where_it_is(monkeypatch):
    from rich.console import Console

    clock, console = Clock(monkeypatch), Console(file=io.StringIO(), width=150)
    told = Progress("preparing")
    inside = {"step": 2, "of": 3, "phase": "backward", "layer": 1, "layers": 32}
    with TrainingView(console, 3, told) as view:
        assert clock.after(1.5, told) == "training: starting"
        told.say("")
        for layer in range(1, 33):
            view(inside | {"layer": layer})
            line = clock.after(0.32, told)
            assert line == (f"training: {describe_line(inside | {'layer': 32})}" if layer == 32 else None)
        view({"step": 3, "of": 3, "loss": 2.5, "seconds": 0.25})
    assert console.file.getvalue() == "step 3 of 3  loss 2.5000  0.25 s\n"


class Enough(Exception):
    """The work was reached, and what is done was said before it ended."""


# Command line, the work that takes long, and what is said while it runs.
COMMANDS = [
    ("run exp.yaml", "harness.plan.matrix.plan", "planning the trials of exp"),
    ("run exp.yaml", "harness.commands.run._report", "drawing the report of results/runs/exp"),
    ("plan exp.yaml", "harness.plan.matrix.plan", "planning exp.yaml"),
    ("plan --hardware h200 --longest", "harness.commands.plan.prediction.predicted", "predicting time and memory of 1"),
    ("plan --hardware h200 --frontier", "harness.commands.plan.frontier.frontiers", "planning 1 trial under less"),
    ("doctor", "harness.commands.doctor.examine", "looking at the devices"),
    ("report r.jsonl --out out", "harness.report.page.write_report", "drawing the report of r.jsonl"),
    ("compare r.jsonl", "harness.compare.pairs.compare", "comparing the records of r.jsonl"),
    ("verify r.jsonl", "harness.verify.verdict.verify", "verifying r.jsonl"),
    ("verify pack r.jsonl --out new.jsonl", "harness.verify.packing.pack_lines", "packing r.jsonl"),
    ("reproduce", "harness.reproduce.points.runs_in", "reading the records of all runs"),
    ("reproduce e2e_main --draw-only", "harness.reproduce.predicted.predicted_for_paper", "predicting e2e_main"),
    ("train train.yaml", "harness.commands.train._start", "preparing the run of train.yaml"),
    ("train data exp.yaml --out tokens", "engine.data.store.build_store", "writing the tokens of tokens"),
    ("setup calibrate", "harness.predict.calibration.measure", "measuring matrix products"),
    ("setup baselines fidelity", "baselines.fidelity.run.run_systems", "running cases of all installed systems"),
    ("setup baselines install yunchang", "baselines.install.build.install_system", "installing yunchang"),
    ("cluster env nodes.yaml", "cluster.environment.survey.survey", "reading interfaces and adapters of 1 node"),
    ("cluster up nodes.yaml", "cluster.ray_cluster.up.start_cluster", "starting Ray on 1 node"),
    ("cluster check nodes.yaml --no-history", "cluster.cli.check_nodes", "checking 1 node"),
]


@pytest.mark.parametrize(("line", "work", "said"), COMMANDS, ids=[line for line, _, _ in COMMANDS])
def test_a_command_that_takes_long_says_what_it_does_while_it_does_it(line, work, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"exp.yaml": EXPERIMENT, "train.yaml": TRAINING, "nodes.yaml": NODES}.items():
        Path(name).write_text(text)
    shutil.copy(PUBLISHED / "cpu" / "quickstart_local.jsonl", "r.jsonl")
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", io.StringIO())

    def works(*_: object, **__: object) -> None:
        """Takes until the line is there."""
        deadline = time.monotonic() + SOON
        while said not in sys.stderr.getvalue():
            assert time.monotonic() < deadline, f"{line} said: {sys.stderr.getvalue()}"
            time.sleep(0.005)
        raise Enough

    module, _, function = work.rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), function, works)
    monkeypatch.setattr("harness.run.execution.run_experiment", lambda *_, **__: 0)  # with its trials, timed elsewhere
    with pytest.raises(Enough):
        main(line.split())
