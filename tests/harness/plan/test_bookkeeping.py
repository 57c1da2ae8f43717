"""The books of a run grow with its trials and no faster: every record is read once, results.csv rarely written."""

import builtins
import os
from collections import Counter
from pathlib import Path

import pytest

from harness.base.errors import UsageError
from harness.cli import main
from harness.machine.this_machine import Machine
from harness.plan.matrix import MAX_TRIALS, plan
from harness.run.directory import RunDirectory, next_attempt
from harness.spec.experiment import load_experiment
from tests.harness.run.test_run_experiment import Runner, trial
from tests.harness.synthetic_records import leave_record

EXPERIMENT = """\
title: Many small trials
task: attention
model: {layers: 2, hidden: 128, ffn: 256, heads: 8, kv_heads: 8, head_dim: 16, vocab: 256}
sweep: {mask: [causal, full], seq_len: [1024, 2048, 4096, 8192, 16384], cp_size: [1, 2]}
fixed: {method: burst, dtype: fp32}
steps: {warmup: 0, measured: 3}
"""
LAPTOP = Machine(hostname="here", device="cpu", cores=8, memory_gib=8.0)


@pytest.fixture
def opened(monkeypatch):
    """How often each file was opened, by name of its directory and its own."""
    counts: Counter[str] = Counter()
    real_open, real_os_open = builtins.open, os.open

    def count(path: object) -> None:
        if isinstance(path, str | Path):
            counts[f"{Path(path).parent.name}/{Path(path).name}"] += 1

    def counted(file, *arguments, **options):
        count(file)
        return real_open(file, *arguments, **options)

    def os_counted(path, *arguments, **options):
        count(path)
        return real_os_open(path, *arguments, **options)

    monkeypatch.setattr(builtins, "open", counted)
    monkeypatch.setattr(os, "open", os_counted)
    return counts


def test_a_resumed_run_of_many_finished_trials_reads_each_once_and_prints_the_first(
    tmp_path, monkeypatch, opened, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.commands.run.PRINTED_TRIALS", 3)
    Path("exp.yaml").write_text(EXPERIMENT)
    trials = plan(load_experiment("exp.yaml"), LAPTOP)
    directory = RunDirectory(Path("run"))
    for one in trials:
        leave_record(directory, one)
    directory.describe(experiment="exp", title="", trials=[], started_at="2026-01-02")
    opened.clear()
    assert main(["run", "exp.yaml", "--out", "run", "--resume", "--launcher", "local"]) == 0
    assert {one.id: opened[f"{one.id}/record.json"] for one in trials} == {one.id: 1 for one in trials}
    assert len(Path("run/results.csv").read_text().splitlines()) == 1 + len(trials)
    printed = capsys.readouterr().out
    assert f"The first 3 of {len(trials)} trials; results.csv and the report have all of them." in printed
    assert printed.count("attention") == 3


def test_finished_trials_are_added_to_what_was_read_and_results_are_written_at_the_end(tmp_path, opened):
    run = Runner(tmp_path / "run")
    trials = [trial(length) for length in (16, 32, 48, 64, 80)]
    run({}, trials)
    assert sum(count for name, count in opened.items() if name.endswith("/record.json")) == 0
    assert sum(count for name, count in opened.items() if "results.csv" in name) == 1
    assert len((tmp_path / "run" / "results.csv").read_text().splitlines()) == 6


def test_results_are_written_also_when_a_run_is_stopped(tmp_path):
    run = Runner(tmp_path / "run")
    run({32: "ctrl-c"}, [trial(16), trial(32), trial(48)])
    assert len((tmp_path / "run" / "results.csv").read_text().splitlines()) == 3


def test_an_attempt_gets_the_number_after_the_highest_where_earlier_ones_were_removed(tmp_path):
    directory = RunDirectory(tmp_path)
    attempts = directory.trial("t") / "attempts"
    (attempts / "2").mkdir(parents=True)
    (attempts / "notes").mkdir()
    (directory.trial("t") / "record.json").write_text("third")
    assert directory.begin_attempt("t") == 4
    assert (attempts / "3" / "record.json").read_text() == "third"
    assert next_attempt(attempts) == 4
    assert next_attempt(tmp_path / "none") == 1


def test_a_product_beyond_the_bound_is_refused_with_its_count_before_it_is_formed(tmp_path):
    values = list(range(1, 61))
    path = tmp_path / "exp.yaml"
    keys = ("seq_len", "cp_size", "batch_size", "projection_tiles", "mlp_tiles")
    sweep = "".join(f"  {key}: {values}\n" for key in keys)
    path.write_text(f"task: attention\nmodel: tiny\nfixed: {{method: burst}}\nsweep:\n{sweep}")
    with pytest.raises(UsageError, match=rf"777,600,000 combinations .* at most {MAX_TRIALS:,}; sweep fewer values"):
        plan(load_experiment(path), LAPTOP)
