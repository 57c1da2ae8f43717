"""The experiment files, and the experiments inside packed runs, still plan the trials of the published records."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.machine.this_machine import Machine, imagined
from harness.plan.matrix import plan
from harness.records.stored import runs_below, stored_run
from harness.report.results import RunRecords
from harness.spec import setting
from harness.spec.experiment import load_experiment
from tests.published import PUBLISHED, stored_records
from tests.slow import slow

ROOT = Path(__file__).parents[3]
CPU, H200 = Machine(hostname="vm", device="cpu", cores=2, memory_gib=8.0), imagined("NVIDIA H200", 141.0)

# Published runs that the experiment files still describe whole, by the command in results/published/README.md.
AUTO = ("sweep.schedule=[auto]",)
FP32 = ("fixed.grad_comm_dtype=fp32",)  # what every method sent before `auto` stood for what its original sends
EQUAL = ("sweep.settings=[equal]", "sweep.method=[burst, megatron_cp, ulysses]")  # usp is ulysses on one node
SETTINGS_ONCE = (
    None, "fp64", "deterministic", "head_tiles", "hybrid", "layouts", "usp", "tensor_parallel", "z_loss",
    "batch_size", "gradient_accumulation", "replicas", "seed", "gelu", "qk_norm",
)  # fmt: skip
WAYS_TO_START = {"local": ("local", 1), "inventory": ("ray", 2), "slurm": ("ray", 2)}  # launcher, hosts of two ranks
RUNS: list[tuple[str, str, str | None, tuple[str, ...]]] = [
    ("h200x4/attention_node", "attention_node", None, (*AUTO, *FP32)),
    ("h200x4/attention_node_grouped", "attention_node", "grouped", (*AUTO, *FP32)),
    ("h200x4/attention_exchange", "attention_node", "exchange", FP32),
    ("h200x2/attention_short", "attention_node", "short", ("sweep.cp_size=[1,2]", "fixed.cuda_graph=none")),
    ("h200x2/training_node_two", "training_node", "two", ()),
    (
        "h200x2/training_node_two_long", "training_node", "two_long",
        (*EQUAL, "sweep.seq_len=[128k]", "steps.rounds=3"),
    ),
    ("h200x2/training_node_two_longest", "training_node", "two_long", (*EQUAL, "sweep.seq_len=[256k]")),
    ("h200x2/training_node_two_published", "training_node", "two_long", ("sweep.settings=[as_published]",)),
    ("h200x2/training_node_small_two", "training_node", "small_two", ()),
    ("h200x2/training_node_weak", "training_node", "weak", ("sweep.cp_size=[1,2]",)),
    ("h200x2/attention_window_best", "attention_window", "best", ("sweep.cp_size=[1,2]",)),
    (
        "h200x2/attention_node_256k", "attention_node", None,
        ("sweep.cp_size=[1,2]", "sweep.seq_len=[256k]", "steps.warmup=1", "steps.measured=3"),
    ),
    (
        "h200x2/training_node_small_ring", "training_node", "small_two",
        (
            "sweep.settings=[equal]", "sweep.method=[burst,megatron_cp]", "sweep.schedule=[auto,ring]",
            "exclude=[{method: megatron_cp, schedule: ring}]",
        ),
    ),
    ("h200x2/training_node_small_auto", "training_node", "small_two", ("sweep.settings=[equal]",)),
    (
        "h200x2/checkpoint_tail_two", "checkpoint_tail", "two",
        ("sweep.seq_len=[256k]", "steps.measured=1", "steps.rounds=1"),
    ),
    (
        "h200x2/node_kernels_two", "node_systems", "first",
        (
            "sweep.seq_len=[64k]", "sweep.method=[burst]", "sweep.kernel=[auto, cudnn]", "steps.rounds=3",
        ),
    ),
    (
        "h200x2/two_nodes_overlap", "attention_two_nodes", None,
        (
            "sweep.cp_size=[2]", "sweep.emulate_nodes=[2]", "sweep.seq_len=[128k]", "sweep.method=[burst]",
            "sweep.schedule=[double_ring,ulysses]", "steps.warmup=1", "steps.measured=2",
        ),
    ),
    ("h200x4/attention_window", "attention_window", None, FP32),
    # At 256K a trial was interrupted, which a resumed run executes.
    ("h200x4/attention_two_nodes", "attention_two_nodes", "best", ("sweep.seq_len=[64k, 128k]", *FP32)),
    ("h200x4/attention_two_nodes_grouped", "attention_two_nodes", "grouped", (*AUTO, *FP32)),
    ("h200x4/longest_sequence", "longest_sequence", None, ("sweep.seq_len=[4M]", *FP32)),
    ("h200x4/longest_sequence", "longest_sequence", "alone", ("sweep.seq_len=[1200k]", *FP32)),
    ("h200x4/longest_sequence", "longest_sequence", "agreement", FP32),
    ("h200x4/lm_head", "lm_head", None, FP32),
    ("h200x4/lm_head", "lm_head", "check", FP32),
    ("h200x4/memory_levers", "memory_levers", "two", FP32),
    ("h200x4/checkpoint_tail", "checkpoint_tail", "two", ("sweep.seq_len=[128k]", *FP32)),
    ("cpu/grad_comm_dtype", "attention_precision", "wire", ()),
    *(("cpu/one_setting_each", "one_setting_each", scale, ()) for scale in SETTINGS_ONCE),
    ("cpu/checkpoint_tail", "checkpoint_tail", "curve", FP32),
    ("cpu/how_long", "how_long", "smoke", ()),
    ("cpu/how_long_ray", "how_long", "smoke", ()),
    *((f"cpu/quickstart_{path}", "quickstart", "smoke", ()) for path in WAYS_TO_START),
]  # fmt: skip


@pytest.mark.parametrize(("folder", "name", "scale", "overrides"), RUNS)
def test_an_experiment_plans_the_trials_of_its_published_run(folder, name, scale, overrides) -> None:
    experiment = load_experiment(ROOT / "experiments" / f"{name}.yaml", scale, overrides)
    trials = plan(experiment, CPU if folder.startswith("cpu") else H200)
    recorded = {stored.trial for run, stored in stored_records() if run == folder}  # what --resume looks for
    assert trials
    assert [trial.id for trial in trials if trial.id not in recorded] == []


# Runs whose own experiment no longer plans all of their trials, with what it takes and how many are not found even so.
CHANGED: dict[str, tuple[tuple[str, ...], int]] = {
    "h200x1/one_gpu": (FP32, 0),
    # The planner chooses head_tiles today, and did not when these ran: a plan that does is another trial.
    "h200x1/one_gpu_systems_8b": ((), 1),
    "h200x1/one_gpu_systems_long": ((), 1),
    # Lengths that the search added, which a resumed search adds again.
    "cpu/how_long": ((), 2),
    "cpu/how_long_ray": ((), 2),
}
PACKED = [path for path in runs_below(PUBLISHED) if stored_run(path).header().experiment]


ON_CPU = [path for path in PACKED if path.parent.name == "cpu"]


@pytest.mark.parametrize(
    "path", [*ON_CPU, *slow(*(path for path in PACKED if path not in ON_CPU))],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)  # fmt: skip
def test_a_packed_run_would_be_resumed_with_its_own_trials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: Path
) -> None:
    """The ids that `burst run --resume` looks for are those that the header names and the records have."""
    monkeypatch.setattr(setting, "_check_data", lambda _value: None)  # texts of where they ran are not here
    header, folder = stored_run(path).header(), path.parent.name
    assert header.plan is not None
    overrides, lost = CHANGED.get(f"{folder}/{path.stem}", ((), 0))
    (tmp_path / "experiment.yaml").write_text(header.experiment, encoding="utf-8")
    experiment = load_experiment(tmp_path / "experiment.yaml", None, overrides)
    planned = {trial.id for trial in plan(experiment, CPU if folder == "cpu" else H200)}
    recorded = {one.trial for one in stored_run(path).records()}
    assert set(header.plan["trials"]) <= recorded
    assert len(set(header.plan["trials"]) - planned) == lost


def test_every_way_to_start_ranks_has_records_that_agree() -> None:
    """Two ranks of one trial ran on one host, on two that burst reached over SSH, and on two of a job of Slurm."""
    losses: dict[str, set[float]] = {}
    for path, (launcher, hosts) in WAYS_TO_START.items():
        records = RunRecords(PUBLISHED / "cpu" / f"quickstart_{path}.jsonl")
        assert records.read() == []
        assert {record.launcher for record in records.records()} == {launcher}
        assert {len(record.hosts) for record in records.records() if record.settings.world_size == 2} == {hosts}
        for record in records.records():
            if record.settings.task == "train" and record.measurement is not None:
                losses.setdefault(record.trial_id, set()).add(round(record.measurement.loss[-1], 5))
    assert {trial: len(found) for trial, found in losses.items()} == dict.fromkeys(losses, 1)
    assert len(losses) == 4
