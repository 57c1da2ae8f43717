"""An experiment written as a file is read as the same experiment: the very same trials, however it was laid out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.machine.this_machine import Machine
from harness.plan.matrix import asked_for, plan
from harness.records.stored import EXPERIMENT_FILE
from harness.spec.experiment import Experiment, load_experiment
from harness.spec.written import experiment_text, same_meaning
from tests.slow import slow

ROOT = Path(__file__).parents[3]
NODE = Machine(
    hostname="node", device="cuda", cores=64, memory_gib=2048, gpu_name="NVIDIA H200", gpu_count=4, gpu_memory_gib=139
)
SHIPPED = [
    (str(path.relative_to(ROOT / "experiments")), scale)
    for path in sorted([*(ROOT / "experiments").glob("*.yaml"), *(ROOT / "experiments" / "paper").glob("*.yaml")])
    for scale in (None, *(line for line in ("smoke", "gpu", "four", "grouped", "wire", "long", "alone", "curve",
                                      "8b_lora_64k")
                          if f"\n  {line}:" in path.read_text(encoding="utf-8")))
]  # fmt: skip


def written(experiment: Experiment, folder: Path, heading: str = "") -> Experiment:
    path = folder / EXPERIMENT_FILE
    path.write_text(experiment_text(experiment, heading), encoding="utf-8")
    return load_experiment(path)


@pytest.mark.parametrize(("name", "scale"), SHIPPED)
def test_a_shipped_experiment_at_a_scale_asks_for_the_same_trials_when_written_and_read(name, scale, tmp_path):
    experiment = load_experiment(ROOT / "experiments" / name, scale)
    again = written(experiment, tmp_path)
    assert again == replace(experiment, path=again.path, scale=None)
    assert asked_for(experiment) == asked_for(again)


_PLANNED_BY_MEMORY = ("memory_budget.yaml", None)


@pytest.mark.parametrize(
    ("name", "scale"), [_PLANNED_BY_MEMORY, *slow(*(each for each in SHIPPED if each != _PLANNED_BY_MEMORY))]
)
def test_a_shipped_experiment_is_planned_the_same_when_written_and_read(name, scale, tmp_path):
    experiment = load_experiment(ROOT / "experiments" / name, scale)
    again = written(experiment, tmp_path)
    trials, trials_again = plan(experiment, NODE), plan(again, NODE)
    assert [trial.id for trial in trials] == [trial.id for trial in trials_again]
    assert trials == trials_again


ODD = """\
name: "a name: with 'quotes' #1"
title: "- 1:30, über\\u00e9 \\U0001F600 and yes"
task: [train, attention]
sweep:
  model:
    - {layers: 1, hidden: 8, ffn: 8, heads: 2, kv_heads: 1, head_dim: 4, vocab: 256, note: "no: such"}
    - beside
    - models/beside.yaml
  mask: ["sliding_window:3", "documents:4,8,..."]
  checkpoint: {tail: [0, 0.1, 1e-3]}
  lora: [null, {rank: 2, alpha: 4, targets: [v, q]}]
exclude: [{model: beside, checkpoint.tail: [0.1]}, {task: attention, seed: [1, 2], mask: "sliding_window:3"}]
fixed: {method: burst, seq_len: 64, learning_rate: 1e-5, model.layers: 3, deterministic: true}
steps: {warmup: 0, rounds: 3}
seeds: [0, 1, 2]
limits: {trial_seconds: 33.5}
reference: {paper: "ablation"}
"""


def test_models_beside_the_file_odd_texts_and_dotted_keys_survive(tmp_path):
    (tmp_path / "models").mkdir()
    shape = {"layers": 2, "hidden": 8, "ffn": 8, "heads": 2, "kv_heads": 2, "head_dim": 4, "vocab": 256}
    (tmp_path / "models" / "beside.yaml").write_text("".join(f"{key}: {value}\n" for key, value in shape.items()))
    path = tmp_path / "odd.yaml"
    path.write_text(ODD, encoding="utf-8")
    experiment = load_experiment(path, overrides=["fixed.dtype=fp32", "steps.measured=2"])
    assert experiment.rounds == 3
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = written(experiment, elsewhere, "burst run odd.yaml\nsecond line")
    assert again == replace(experiment, path=again.path)
    ids = [trial.id for trial in plan(experiment, NODE)]
    assert len(ids) > 20
    assert ids == [trial.id for trial in plan(again, NODE)]


def test_texts_mean_the_same_where_only_comments_differ():
    experiment = load_experiment(ROOT / "experiments" / "quickstart.yaml", "smoke")
    text = experiment_text(experiment)
    assert same_meaning(experiment_text(experiment, "made by this"), text)
    raised = replace(experiment, rounds=2)
    assert not same_meaning(experiment_text(raised), text)
    for other in ("", "- [", "a: &x 1\nb: *x\n", "when: 2026-99-99"):
        assert not same_meaning(other, text)
