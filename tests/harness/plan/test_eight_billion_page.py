"""docs/8b-at-128k.md: `burst plan` accepts its settings, and predicts what the page says is predicted; so does the
first table of docs/plan.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.machine.this_machine import imagined
from harness.metrics.hardware import hardware_named
from harness.plan.forecast import forecast
from harness.plan.matrix import plan
from harness.spec.experiment import load_experiment

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "8b-at-128k.md").read_text(encoding="utf-8")
PLANS = (DOCS / "plan.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?ms)^```yaml\n(.*?)^```", PAGE)
H200 = hardware_named("h200")
HOST = imagined(H200.gpu_names[0], H200.memory_gib)
AUTO = ["fixed.checkpoint=auto", "fixed.mlp_tiles=1"]


def planned(tmp_path: Path, block: str, overrides: list[str]):
    """The only trial of a block of settings, with its forecast."""
    path = tmp_path / "8b.yaml"
    path.write_text(block, encoding="utf-8")
    [trial] = plan(load_experiment(path, None, overrides), HOST, [], hardware=H200)
    return trial, forecast(trial.settings, H200, plan=trial.plan)


def test_there_are_settings_for_one_two_and_four_gpus() -> None:
    assert [re.findall(r"cp_size: \[(\d)\]", block) for block in BLOCKS] == [["1"], ["2"], ["4"]]


@pytest.mark.parametrize("block", BLOCKS, ids=["one", "two", "four"])
def test_settings_of_the_page_can_run_and_fit(tmp_path: Path, block: str) -> None:
    trial, found = planned(tmp_path, block, [])
    assert trial.unsupported_reason is None
    assert found.fits is not False
    assert (trial.settings.seq_len, trial.settings.model.name) == (131072, "llama3_8b")


def test_predictions_of_the_page_are_those_of_the_plan(tmp_path: Path) -> None:
    one, two, four = BLOCKS
    _, alone = planned(tmp_path, one, [])
    assert f"the prediction is {alone.time.seconds:.1f} s, with {alone.host_gib:.0f} GiB on the host" in PAGE
    _, less = planned(tmp_path, one, ["fixed.host_memory=64GiB"])
    assert f"`host_memory: 64GiB` {less.time.seconds:.1f} s, with {less.host_gib:.0f} GiB there" in PAGE
    assert f"the answer is {less.time.seconds:.1f} s and {less.host_gib:.0f} GiB" in PLANS
    _, whole = planned(tmp_path, two, [])
    _, small = planned(tmp_path, two, ["fixed.memory=80GiB"])
    longer = small.time.seconds / whole.time.seconds - 1
    assert f"the prediction is {small.gpu_gib:.0f} GiB and a step {longer:.0%} longer" in PAGE
    _, kept = planned(tmp_path, four, AUTO)
    assert f"the prediction is {kept.time.seconds:.1f} s and {kept.gpu_gib:.0f} GiB" in PAGE


def test_what_the_page_on_plans_prints_for_this_model_is_the_plan(tmp_path: Path) -> None:
    table = PLANS.partition("cp_size  checkpoint.mlp")[2].partition("```")[0]
    rows = [line.split() for line in table.splitlines()[1:]]
    assert [row[0] for row in rows] == ["1", "2", "4"]
    for gpus, mlp, hosted, offload, *shown, _ in rows:
        trial, found = planned(tmp_path, BLOCKS[1].replace("cp_size: [2]", f"cp_size: [{gpus}]"), [])
        checkpoint = trial.settings.checkpoint
        assert (float(mlp), int(hosted)) == (checkpoint.mlp, checkpoint.host_layers)
        assert float(offload.replace("False", "0")) == trial.settings.optimizer_offload
        predicted = [found.time.seconds, found.gpu_gib, found.host_gib]
        assert [float(each) for each in shown] == pytest.approx(predicted, rel=0.005)
