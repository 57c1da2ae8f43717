"""`burst train` with its `data` and `export`: stopped by signals, gone on, exported."""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.files.progress import Progress
from harness.cli import main
from tests.patience import AMPLE, running, scaled, wait_until
from tests.processes import all_pids, stat_of
from tests.programs import shell_program

PROJECT = Path(__file__).parents[3]
CONFIG = """\
model: {layers: 1, hidden: 16, ffn: 24, heads: 2, kv_heads: 2, head_dim: 8, vocab: 256}
data: store
seq_len: 32
cp_size: 2
dtype: fp32
checkpoint: {every: 0}
steps: 100000
learning_rate: 0.01
evaluate: {every: 1000, sequences: 2}
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    (folder / "train.yaml").write_text(CONFIG)
    (folder / "text.txt").write_text("a line of text to learn from\n" * 400)
    return folder


def burst(workplace: Path, *arguments: str) -> tuple[int, str]:
    """Exit code, and everything printed, of a command in this process."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        patch.chdir(workplace)
        code = main(arguments)
    return code, said.getvalue()


def train(workplace: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run in a process of its own, for signals."""
    return subprocess.Popen(
        [sys.executable, "-m", "harness", "train", "train.yaml", "--launcher", "local", *arguments],
        cwd=workplace, env={**os.environ, "PYTHONPATH": str(PROJECT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def metrics(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    def made() -> bool:
        assert process.poll() is None, process.communicate()
        return any(line["kind"] == "step" and line["step"] >= step for line in metrics(run))

    wait_until(made, f"no step {step}")


@pytest.fixture(scope="module")
def store(workplace: Path) -> str:
    code, said = burst(workplace, "train", "data", "text.txt", "--out", "store", "--validation", "0.1")
    assert code == 0, said
    return said


@pytest.fixture(scope="module")
def stopped(workplace: Path, store: str) -> tuple[int, str]:
    """A run of far too many steps that gets Slurm's signal after its third step or a later one, and another one ahead
    of the same end while it cannot save yet, as a run that knows the end sends itself one: exit code and its words."""
    process = train(workplace, "--out", "run", "--set", f"save.grace_seconds={10 * AMPLE:g}")
    wait_for_step(process, workplace / "run", 3)
    ranks = grandchildren(process.pid)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    process.send_signal(signal.SIGUSR1)
    said = words_until_stopping(process)
    process.send_signal(signal.SIGUSR1)
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    _, error = process.communicate(timeout=AMPLE)
    return process.returncode, said + error


def words_until_stopping(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = ""
    while "stopping:" not in said:
        line = process.stderr.readline()
        assert line, "ended without a word"
        said += line
    return said


def test_a_store_says_what_it_holds_and_is_not_overwritten(workplace: Path, store: str) -> None:
    assert "11,600 tokens of 1 document, 1,160 of them held out; tokenizer bytes, vocabulary 256, uint8" in store
    code, said = burst(workplace, "train", "data", "text.txt", "--out", "store")
    assert (code, "holds a token store; give --out another path, or --replace" in said) == (2, True)


def test_a_signal_saves_and_says_how_to_go_on_and_slurms_second_one_breaks_nothing_off(workplace, stopped):
    code, said = stopped
    assert code == 1, said
    last = metrics(workplace / "run")[-1]["step"]
    assert "stopping: the step under way is finished and saved; a second Ctrl-C or SIGTERM ends at once" in said
    assert f"stopped; the state after step {last} is saved, go on with: burst train train.yaml" in said
    assert said.rstrip().endswith("--resume")
    assert (workplace / "run" / "checkpoints" / "latest").read_text() == f"step-{last:08d}\n"


def test_a_stopped_run_goes_on_to_its_end_and_exports(workplace: Path, stopped: tuple[int, str]) -> None:
    last = metrics(workplace / "run")[-1]["step"]
    more = ["--launcher", "local", "--out", "run", "--resume", "--set", f"steps={last + 2}"]
    code, said = burst(workplace, "train", "train.yaml", *more)
    assert (code, "Trained: run\n" in said) == (0, True), said
    source = workplace / "run" / "checkpoints" / f"step-{last:08d}"
    assert f"going on after step {last}, from {source}\n" in said
    lines = metrics(workplace / "run")
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, last + 3))
    losses = [line["loss"] for line in lines if line["kind"] == "evaluation"]
    assert losses[-1] < losses[0]
    code, said = burst(workplace, "train", "train.yaml", *more)
    assert (code, f"all {last + 2} steps of run are done already; raise steps to train on" in said) == (0, True), said
    assert "going on after" not in said

    pytest.importorskip("safetensors", reason="the safetensors library is not installed")
    code, said = burst(workplace, "train", "export", "run", "--out", "model")
    assert code == 0, said
    assert json.loads((workplace / "model" / "config.json").read_text())["hidden_size"] == 16
    code, said = burst(workplace, "train", "export", "run", "--out", "other", "--step", "1")
    assert (code, f"holds no checkpoint after step 1; it holds those after {last + 2} or {last}" in said) == (2, True)

    shutil.copytree(workplace / "run", workplace / "damaged")
    newest = workplace / "damaged" / "checkpoints" / f"step-{last + 2:08d}"
    max(newest.iterdir(), key=lambda path: path.stat().st_size).write_bytes(b"")
    code, said = burst(workplace, *(word if word != "run" else "damaged" for word in ("train", "train.yaml", *more)))
    assert (code, "are done already" in said, "is skipped because" in said) == (0, False, True), said


def test_a_checkpoint_that_its_run_removes_during_an_export_gives_way_to_the_newest(
    workplace: Path, stopped: tuple[int, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors", reason="the safetensors library is not installed")
    from engine.training import state

    read = state.whole_parameters

    def removed_meanwhile(path: Path) -> Any:
        if path.name == "step-00000001":
            shutil.rmtree(path)
            newer.rename(newer.with_name("step-00000002"))
        return read(path)

    named = []

    class Recorded(Progress):
        def stage(self, stage: str) -> None:
            named.append(stage)
            super().stage(stage)

    monkeypatch.setattr(state, "whole_parameters", removed_meanwhile)
    monkeypatch.setattr("harness.commands.train.Progress", Recorded)
    monkeypatch.chdir(workplace)
    for step, code in ([], 0), (["--step", "1"], 2):
        shutil.copytree("run", "going")
        first, *others = Path("going", "checkpoints").glob("step-*")
        for each in others:
            shutil.rmtree(each)
        newer = first.rename(first.with_name(".newer"))
        shutil.copytree(newer, first.with_name("step-00000001"))
        assert main(["train", "export", "going", "--out", "latest", *step]) == code
        printed = capsys.readouterr()
        if code:
            assert "step-00000001 was removed by its run while it was exported; leave --step out" in printed.err
        else:
            assert "after step 2, " in printed.out
            assert [stage.rpartition("/")[2] for stage in named] == ["step-00000001", "step-00000002"]
            assert "step-00000001 was removed by its run while it was read; step-00000002 is exported\n" in printed.err
        shutil.rmtree("going")


def test_the_checkpoint_of_an_export_is_chosen_once_torch_is_loaded(
    workplace: Path, stopped: tuple[int, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors", reason="the safetensors library is not installed")
    shutil.copytree(workplace / "run", workplace / "saving")
    first, *others = (workplace / "saving" / "checkpoints").glob("step-*")
    for each in others:
        shutil.rmtree(each)
    load = importlib.import_module

    def saved_meanwhile(name: str) -> Any:
        first.rename(first.with_name("step-00099999"))
        return load(name)

    monkeypatch.setattr("harness.commands.train.importlib", SimpleNamespace(import_module=saved_meanwhile))
    monkeypatch.chdir(workplace)
    assert main(["train", "export", "saving", "--out", "saved"]) == 0
    printed = capsys.readouterr()
    assert "after step 99999, " in printed.out
    assert "was removed" not in printed.err


def test_a_run_for_which_nothing_fits_says_that_it_starts_all_the_same(workplace: Path, store: str) -> None:
    asked = ["--set", "checkpoint={plan: auto}", "--set", "memory=0.05MiB", "--set", "steps=1", "--set", "evaluate={}"]
    code, said = burst(workplace, "train", "train.yaml", "--launcher", "local", "--out", "small", *asked)
    assert (code, "Trained: small\n" in said) == (0, True), said
    assert "nothing fits: " in said
    assert "; the run starts all the same, with the least that can be kept\n" in said


def test_a_second_signal_ends_a_run_that_cannot_save(workplace: Path, store: str) -> None:
    process = train(workplace, "--out", "stuck", "--set", f"save.grace_seconds={10 * AMPLE:g}")
    wait_for_step(process, workplace / "stuck", 1)
    ranks = grandchildren(process.pid)
    assert len(ranks) == 2
    for rank in ranks:  # they can neither step nor save any more; only SIGKILL still ends them
        os.kill(rank, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    words_until_stopping(process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=AMPLE)  # less than saving may take
    assert process.returncode == 1
    assert "stopped; no checkpoint was written, start again" in error
    assert not any(map(running, ranks))


@pytest.mark.slow
def test_a_run_in_a_slurm_job_saves_before_the_job_ends(workplace, store, tmp_path, monkeypatch):
    end, variables = job_that_ends_soon(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    process = train(workplace, "--out", "job")
    _, error = process.communicate(timeout=AMPLE)  # of far too many steps
    assert process.returncode == 1
    assert f"stopping ahead of the end of Slurm's job at {end}: the step under way is" in error
    last = metrics(workplace / "job")[-1]["step"]
    assert f"stopped; the state after step {last} is saved, go on with: burst train train.yaml" in error


def test_an_impossible_start_changes_nothing(workplace: Path, store: str) -> None:
    before = sorted(path.name for path in workplace.iterdir())
    for arguments, words in {
        ("--resume", "--out", "nowhere"): "nowhere holds no run to resume",
        ("--resume", "--set", "cp_size=64", "--set", "seq_len=1k"): "nowhere holds no run to resume",
        ("--set", "seq_len=33"): "this run cannot start: ",
        ("--set", "cp_size=64", "--set", "seq_len=1k"): "this run cannot start: 64 ranks are more than",
        ("--set", "model=no_such"): "unknown model no_such",
    }.items():
        code, said = burst(workplace, "train", "train.yaml", "--launcher", "local", "--out", "nowhere", *arguments)
        assert (code, words in said, said.count("\n")) == (2, True, 1), said
    assert sorted(path.name for path in workplace.iterdir()) == before


def job_that_ends_soon(folder: Path) -> tuple[str, dict[str, str]]:
    """The end of a Slurm job, half a minute from now, and the environment of a program in it."""
    end = f"{datetime.now() + timedelta(seconds=scaled(30)):%Y-%m-%dT%H:%M:%S}"
    shell_program(folder / "squeue", f"echo '7 {end}'")
    return end, {"SLURM_JOB_ID": "7", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def grandchildren(pid: int) -> list[int]:
    """The ranks: children of the fork server, which is a child of the command."""
    parents = {child: int(fields[1]) for child in all_pids() if len(fields := stat_of(child)) > 1}
    return [child for child, parent in parents.items() if parents.get(parent) == pid]
