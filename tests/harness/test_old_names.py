"""Files written before names changed are still read: experiments, training runs, records, and whole run directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from engine.atomic import write_atomic
from engine.measurement import MEASUREMENT_FILE, read_measurement
from engine.settings import to_json
from harness.base.errors import UsageError
from harness.launch.launcher import Job, Outcome
from harness.machine.this_machine import Machine, imagined
from harness.plan.matrix import plan
from harness.run.attempt import Host
from harness.run.execution import Resume
from harness.run.experiment import run_experiment
from harness.run.progress import PlainView
from harness.spec.experiment import load_experiment
from harness.spec.trial import Trial
from harness.training.file import load_training
from tests.published import stored_records

ROOT = Path(__file__).parents[2]

OLD = """\
task: attention
model: tiny
sweep:
  method: [burst]
  seq_len: [1k]
  schedule: [auto, head_exchange, heads_inside]
fixed: {gradient_wire: input}
exclude: [{schedule: [heads_inside, heads_across], gradient_wire: fp32}]
scales:
  narrow: {fixed: {gradient_wire: input_across, schedule: heads_across}}
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "old.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_an_old_experiment_file_is_read_and_each_name_is_noted_once(written, capsys) -> None:
    path = written(OLD)
    experiment = load_experiment(path)
    assert experiment.sweep["schedule"] == ("auto", "ulysses", "usp")
    assert experiment.fixed["grad_comm_dtype"] == "input"
    assert experiment.exclude == ({"schedule": ("usp", "usp_transposed"), "grad_comm_dtype": ("fp32",)},)
    assert capsys.readouterr().err.splitlines() == [
        f"{path}:6: schedule head_exchange is now ulysses",
        f"{path}:6: schedule heads_inside is now usp",
        f"{path}:7: gradient_wire is now grad_comm_dtype",
        f"{path}:8: schedule heads_across is now usp_transposed",
    ]


def test_old_names_in_a_scale_and_in_set_lie_over_new_ones(written, capsys) -> None:
    path = written(OLD.replace("fixed: {gradient_wire: input}", "fixed: {grad_comm_dtype: input}"))
    narrow = load_experiment(path, "narrow").fixed
    assert (narrow["grad_comm_dtype"], narrow["schedule"]) == ("input_across", "usp_transposed")
    capsys.readouterr()
    fixed = load_experiment(path, None, ["fixed.gradient_wire=fp32", "fixed.schedule=heads_inside"]).fixed
    assert (fixed["grad_comm_dtype"], fixed["schedule"]) == ("fp32", "usp")
    said = capsys.readouterr().err
    assert "--set fixed.gradient_wire=fp32: gradient_wire is now grad_comm_dtype\n" in said
    assert "--set fixed.schedule=heads_inside: schedule heads_inside is now usp\n" in said


def test_a_setting_under_both_names_is_refused_with_both_places(written) -> None:
    both = "fixed:\n  gradient_wire: input\n  grad_comm_dtype: fp32"
    path = written(OLD.replace("fixed: {gradient_wire: input}", both))
    with pytest.raises(UsageError, match=r":8: gradient_wire is now grad_comm_dtype, .* given at .*:9; keep one"):
        load_experiment(path)


def test_an_old_training_configuration_is_read(written, capsys) -> None:
    path = written("model: tiny\nseq_len: 1k\nsteps: 1\ngradient_wire: input\nschedule: head_exchange\n")
    settings = load_training(path, ["gradient_wire=input_across"]).config.settings
    assert (settings.grad_comm_dtype, settings.schedule) == ("input_across", "ulysses")
    assert f"{path}:4: gradient_wire is now grad_comm_dtype\n" in capsys.readouterr().err


# Their ids were hashed before settings came that no id leaves out: nothing has resumed them since.
EARLIER = ("h200x4/quickstart", "cpu/attention_precision")


def test_every_published_record_has_the_id_that_its_settings_have_today() -> None:
    checked = 0
    for run, stored in stored_records():
        record = stored.record()
        today = Trial(experiment="", title="", settings=record.settings, deadline_seconds=1.0).id
        if run not in EARLIER:
            assert record.trial_id == today == stored.trial
            checked += 1
    assert checked >= 160


def test_published_records_are_read_under_the_names_of_today() -> None:
    assert any("gradient_wire" in one.data["settings"] for _, one in stored_records()), "an old record is among them"
    schedules = set()
    for _, stored in stored_records():
        record = stored.record()
        assert "gradient_wire" not in to_json(record.settings)
        if record.measurement is not None:
            chosen = record.measurement.chosen
            assert "head_parts" not in chosen
            schedules |= {chosen.get("schedule")} | {
                entry.split()[0] for entry in chosen.get("estimate", "ring 1 ms").split(", ")
            }
    assert schedules <= {None, "ring", "double_ring", "ulysses", "usp", "usp_transposed", "all_gather"}


def test_a_measurement_left_by_an_interrupted_trial_is_read_under_the_names_of_today(tmp_path: Path) -> None:
    (tmp_path / MEASUREMENT_FILE).write_text('{"step_seconds": [1.0], "chosen": {"head_parts": "4"}}')
    assert read_measurement(tmp_path).chosen == {"num_head_chunks": "4"}


class RefusingLauncher:
    """A launcher that no trial should reach."""

    name = "refusing"

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        raise AssertionError(f"{job.trial_id} was executed")

    def close(self) -> None:
        pass


# Published runs that the experiment files still describe whole, by the command in results/published/README.md.
AUTO = ("sweep.schedule=[auto]",)
FP32 = ("fixed.grad_comm_dtype=fp32",)  # what every method sent before `auto` stood for what its original sends
EQUAL = ("sweep.settings=[equal]", "sweep.method=[burst, megatron_cp, ulysses]")  # usp is ulysses on one node
RUNS: list[tuple[str, str, str | None, tuple[str, ...]]] = [
    ("h200x4/attention_node", "attention_node", None, (*AUTO, *FP32)),
    ("h200x4/attention_node_grouped", "attention_node", "grouped", (*AUTO, *FP32)),
    ("h200x4/attention_exchange", "attention_node", "exchange", ()),
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
        ("sweep.seq_len=[256k]", "steps.measured=1", "steps.rounds=1", "limits.share_ranks=true"),
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
    ("h200x4/attention_window", "attention_window", None, ()),
    # At 256K a trial was interrupted, which a resumed run executes.
    ("h200x4/attention_two_nodes", "attention_two_nodes", "best", ("sweep.seq_len=[64k, 128k]", *FP32)),
    ("h200x4/attention_two_nodes_grouped", "attention_two_nodes", "grouped", (*AUTO, *FP32)),
    ("h200x4/longest_sequence", "longest_sequence", None, ("sweep.seq_len=[4M]",)),
    ("h200x4/longest_sequence", "longest_sequence", "alone", ("sweep.seq_len=[1200k]",)),
    ("h200x4/longest_sequence", "longest_sequence", "agreement", ()),
    ("h200x4/lm_head", "lm_head", None, ()),
    ("h200x4/lm_head", "lm_head", "check", ()),
    ("h200x4/memory_levers", "memory_levers", "two", ()),
    ("h200x4/checkpoint_tail", "checkpoint_tail", "two", ("sweep.seq_len=[128k]",)),
    ("cpu/grad_comm_dtype", "attention_precision", "wire", ()),
    ("cpu/checkpoint_tail", "checkpoint_tail", "curve", ()),
]  # fmt: skip


@pytest.mark.parametrize(("folder", "name", "scale", "overrides"), RUNS)
def test_resuming_a_published_run_executes_no_trial(folder, name, scale, overrides, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for run, stored in stored_records():
        if run == folder:
            write_atomic(run_dir / "trials" / stored.trial / "record.json", stored.content)
    (run_dir / "run.json").write_text("{}")  # what makes it a run's directory
    experiment = load_experiment(ROOT / "experiments" / f"{name}.yaml", scale, overrides)
    cpu = Machine(hostname="vm", device="cpu", cores=2, memory_gib=8.0)
    machine = cpu if folder.startswith("cpu") else imagined("NVIDIA H200", 141.0)
    before = {path: path.read_bytes() for path in run_dir.glob("trials/*/record.json")}
    assert before
    code = run_experiment(
        experiment.name,
        plan(experiment, machine),
        Host(machine=machine, launcher=RefusingLauncher(), environment={}, commit="abc"),
        run_dir,
        view=PlainView(Console(quiet=True)),
        say=lambda _: None,
        resume=Resume(mix=True),  # other scales' records lie beside
    )
    assert code == 0
    assert {path: path.read_bytes() for path in run_dir.glob("trials/*/record.json")} == before
