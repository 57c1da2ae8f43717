"""From an experiment file to a report in real processes, and what Ctrl-C leaves."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import main
from tests.patience import AMPLE, wait_until

BURST = [sys.executable, "-m", "harness"]
PROJECT = Path(__file__).parents[2]
EXPERIMENT = """\
title: Two ways to share a short sequence
task: train
model: tiny
sweep: {method: [burst, ulysses], cp_size: [1, 2]}
exclude: [{method: ulysses, cp_size: 1}]
fixed: {seq_len: 128, dtype: fp32, mask: causal, learning_rate: 1e-3}
steps: {warmup: 1, measured: 2}
limits: {trial_seconds: 3600}
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    return tmp_path


def burst(workplace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.run(
        [*BURST, *arguments], cwd=workplace, env=environment, capture_output=True, text=True, check=False
    )


def rows(workplace: Path) -> list[dict[str, str]]:
    with open(workplace / "results" / "runs" / "exp" / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_an_experiment_becomes_records_results_and_a_report(workplace, capfd):
    done = burst(workplace, "run", "exp.yaml", "--launcher", "local")
    assert done.returncode == 0, done.stderr
    found = rows(workplace)
    assert {(row["method"], row["cp_size"], row["status"]) for row in found} == {
        ("burst", "1", "ok"),
        ("burst", "2", "ok"),
        ("ulysses", "2", "ok"),
    }
    losses = [float(row["loss"]) for row in found]
    assert max(losses) - min(losses) < 1e-4 * min(losses)
    run_dir = workplace / "results" / "runs" / "exp"
    assert f"Report: {run_dir.relative_to(workplace) / 'report.html'}" in done.stdout
    assert (run_dir / "report.html").stat().st_size > 1000

    assert main(["run", "exp.yaml", "--launcher", "local", "--resume"]) == 0
    assert capfd.readouterr().err.count("kept from before") == 3
    main(["status", str(run_dir)])
    assert "exp has ended: 3 ok of 3 trials" in capfd.readouterr().out
    assert main(["status", "--logs", found[1]["trial_id"]]) == 0
    assert capfd.readouterr().out.count("==> ") == 2


WITH_SMOKE = """\
task: attention
model: tiny
sweep: {cp_size: [1, 2], seq_len: [64, 128]}
fixed: {method: burst}
steps: {warmup: 0, measured: 1}
scales:
  smoke: {sweep: {seq_len: [64]}, fixed: {dtype: fp32}}
"""


def test_a_run_for_gpus_on_a_machine_without_any_says_once_that_there_is_a_scale_for_cpus(
    workplace, monkeypatch, capfd
):
    """nvidia-smi finds the GPUs, and CUDA_VISIBLE_DEVICES hides those that a machine has."""
    (workplace / "gpu.yaml").write_text(WITH_SMOKE)
    note = (
        "no GPU was found on this machine, so the ranks are CPU processes; gpu.yaml has a scale for CPUs: --scale smoke"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def said(*arguments: str) -> list[str]:
        only = ["--only", "attention-burst-s64-cp1"]
        code, err = main(["run", "gpu.yaml", *only, *arguments]), capfd.readouterr().err
        assert code == 0, err
        return err.splitlines()

    lines = said()
    assert (lines[0], lines.count(note)) == (note, 1)
    for arguments in (["--scale", "smoke"], ["--set", "fixed.dtype=fp32"]):
        assert note not in said(*arguments)


@pytest.mark.slow
def test_the_quickstart_trains_real_text_and_every_method_and_cp_size_computes_the_same(workplace):
    quickstart = PROJECT / "experiments" / "quickstart.yaml"
    shorter = ("--set", "task=train", "--set", "sweep.seq_len=[256]", "--set", "steps.measured=2")
    done = burst(workplace, "run", str(quickstart), "--launcher", "local", "--out", "out", *shorter)
    assert done.returncode == 0, done.stderr
    records = [json.loads(path.read_text()) for path in (workplace / "out" / "trials").glob("*/record.json")]
    points = {(record["settings"]["method"], record["settings"]["cp_size"]): record for record in records}
    assert points.keys() == {(method, cp) for method in ("burst", "megatron_cp", "ulysses") for cp in (1, 2, 4)}
    assert len(re.findall(r"^\[\d/9\] train-", done.stderr, re.MULTILINE)) == 9  # a line of progress per trial
    reference = points["burst", 1]["measurement"]
    assert reference["loss"] == sorted(reference["loss"], reverse=True)
    for point, record in points.items():
        measured = record["measurement"]
        assert measured["loss"] == pytest.approx(reference["loss"], rel=1e-4), point
        assert measured["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4), point
        assert (measured["data"]["origin"], measured["data"]["tokenizer"]) == ("pydoc_data.topics", "bytes")
        assert len(measured["data"]["sha256"]) == 64
        assert {"python", "torch"} <= measured["software"].keys()
        assert measured["chosen"]["kernel"] == "cpu"
        assert (record["launcher"], len(record["hosts"])) == ("local", 1)
        assert "OMP_NUM_THREADS" in record["environment"]


def test_ctrl_c_leaves_an_interrupted_record_and_no_process(workplace):
    program = subprocess.Popen(
        [*BURST, "run", "exp.yaml", "--launcher", "local", "--set", "steps.measured=100000"],
        cwd=workplace, env={**os.environ, "PYTHONPATH": str(PROJECT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    progress = workplace / "results" / "runs" / "exp" / "trials"
    wait_until(lambda: list(progress.glob("*/progress.jsonl")), "no trial has made a step")
    program.send_signal(signal.SIGTERM)  # as good as Ctrl-C
    _, said = program.communicate(timeout=AMPLE)
    assert program.returncode == 1
    assert "go on with: burst run exp.yaml --launcher local --set steps.measured=100000 --resume" in said
    assert [row["status"] for row in rows(workplace)] == ["interrupted"]
    trial_dir = str(next(progress.iterdir()))
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if trial_dir.encode() in command]


def test_a_directory_that_becomes_unwritable_ends_the_run_in_one_sentence_and_what_is_finished_stays(workplace):
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, to run without the right to write anywhere")
    (workplace / "exp.yaml").write_text(
        "task: train\nmodel: tiny\nsweep: {seq_len: [64, 128]}\n"
        "fixed: {method: burst, cp_size: 1, dtype: fp32}\nsteps: {warmup: 1, measured: 200}\n"
    )
    # Root, too, is then refused what the mode forbids.
    refusable = ["setpriv", "--inh-caps=-dac_override", "--bounding-set=-dac_override"] if os.getuid() == 0 else []
    program = subprocess.Popen(
        [*refusable, *BURST, "run", "exp.yaml", "--out", "out"],
        cwd=workplace, env={**os.environ, "PYTHONPATH": str(PROJECT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    trials = workplace / "out" / "trials"
    wait_until(
        lambda: list(trials.glob("*/progress.jsonl")) or program.poll() is not None, "the first trial has made no step"
    )
    assert program.poll() is None, program.communicate()
    trials.chmod(0o555)  # the second trial's directory cannot be made
    _, said = program.communicate(timeout=AMPLE)
    trials.chmod(0o755)
    assert program.returncode == 1, said
    assert "Traceback" not in said, said
    assert "Permission denied; see to that file or its file system, then repeat the command" in said
    (finished,) = trials.glob("*/record.json")
    before = finished.read_bytes()
    again = burst(workplace, "run", "exp.yaml", "--launcher", "local", "--out", "out", "--resume")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("kept from before") == 1
    assert finished.read_bytes() == before
