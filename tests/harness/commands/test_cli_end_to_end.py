"""From an experiment file to a report, with real ranks."""

import csv
import json
import re
from pathlib import Path

import pytest

from harness.cli import main
from tests.harness.run.test_run_experiment import ScriptedLauncher

PROJECT = Path(__file__).parents[3]
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


def rows(workplace: Path) -> list[dict[str, str]]:
    with open(workplace / "results" / "runs" / "exp" / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_an_experiment_becomes_records_results_and_a_report(workplace, capfd):
    assert main(["run", "exp.yaml", "--launcher", "local"]) == 0
    printed = capfd.readouterr().out
    found = rows(workplace)
    assert {(row["method"], row["cp_size"], row["status"]) for row in found} == {
        ("burst", "1", "ok"),
        ("burst", "2", "ok"),
        ("ulysses", "2", "ok"),
    }
    losses = [float(row["loss"]) for row in found]
    assert max(losses) - min(losses) < 1e-4 * min(losses)
    run_dir = workplace / "results" / "runs" / "exp"
    assert f"Report: {run_dir.relative_to(workplace) / 'report.html'}" in printed
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert len(page) > 1000
    assert not list(run_dir.rglob("trace*"))  # nothing of --profile
    assert not any(name.startswith("extra_profile") for name in found[0])
    assert not list((run_dir / "tables").glob("breakdown.*"))
    assert "step&#39;s time goes" not in page

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
    monkeypatch.setattr(ScriptedLauncher, "name", "local")
    monkeypatch.setattr("harness.launch.supervisor.LocalLauncher", lambda: ScriptedLauncher({}))

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
def test_the_quickstart_trains_real_text_and_every_method_and_cp_size_computes_the_same(workplace, capfd):
    quickstart = PROJECT / "experiments" / "quickstart.yaml"
    shorter = ("--set", "task=train", "--set", "sweep.seq_len=[256]", "--set", "steps.measured=2")
    assert main(["run", str(quickstart), "--launcher", "local", "--out", "out", *shorter]) == 0
    records = [json.loads(path.read_text()) for path in (workplace / "out" / "trials").glob("*/record.json")]
    points = {(record["settings"]["method"], record["settings"]["cp_size"]): record for record in records}
    assert points.keys() == {(method, cp) for method in ("burst", "megatron_cp", "ulysses") for cp in (1, 2, 4)}
    assert (
        len(re.findall(r"^\[\d/9\] train-", capfd.readouterr().err, re.MULTILINE)) == 9
    )  # a line of progress per trial
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


def test_an_exclusion_that_drops_nothing_is_said_by_plan_and_run(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    misspelt = EXPERIMENT.replace("{method: ulysses, cp_size: 1}", "{method: ulysses, cp_size: [4, 8]}, {cp_size: 2}")
    (workplace / "exp.yaml").write_text(misspelt)
    said = "note: exclude drops nothing by {method: ulysses, cp_size: [4, 8]}; check its values"
    assert main(["plan", "exp.yaml"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("exclude drops nothing") == 1
    assert said in printed
    assert main(["plan", "exp.yaml", "--set", "sweep.method=[burst]"]) == 0  # which may sweep less on purpose
    assert "exclude drops nothing" not in capsys.readouterr().out
    assert main(["run", "exp.yaml", "--launcher", "local", "--only", "none-of-them"]) == 2
    assert said in capsys.readouterr().err
