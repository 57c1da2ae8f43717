"""A plan is every combination once, in a fixed order, each with the reason when it cannot run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.checkpoint.planning.memory_settings import left_open
from engine.data.store import build_store
from engine.data.tokenizers import ByteTokenizer
from engine.settings import Checkpoint, Steps, TrialSettings
from engine.shape import ModelShape
from harness.base.errors import UsageError
from harness.cli import main
from harness.machine.this_machine import Machine, imagined
from harness.plan.matrix import nothing_can_run, plan, plan_table, told_apart, varying_settings
from harness.spec.experiment import load_experiment
from harness.spec.trial import Trial, id_of

LAPTOP = Machine(hostname="laptop", device="cpu", cores=2, memory_gib=8)
NODE = Machine(
    hostname="node", device="cuda", cores=64, memory_gib=512, gpu_name="NVIDIA H200", gpu_count=4, gpu_memory_gib=139
)
QUICKSTART = Path(__file__).parents[3] / "experiments" / "quickstart.yaml"

BASE = """\
task: train
model: tiny
sweep:
  method: [burst, ulysses]
  cp_size: [1, 2]
fixed: {seq_len: 1k, dtype: fp32}
"""


def _plan(folder: Path, *overrides: str, text: str = BASE, machine: Machine = LAPTOP) -> tuple[Trial, ...]:
    path = folder / "question.yaml"
    path.write_text(text, encoding="utf-8")
    return plan(load_experiment(path, overrides=overrides), machine)


def _only_unsupported_reason(folder: Path, *overrides: str, machine: Machine = LAPTOP) -> str:
    [trial] = _plan(folder, "fixed.method=burst", "fixed.cp_size=1", *overrides, machine=machine)
    assert trial.unsupported_reason is not None
    assert "\n" not in trial.unsupported_reason
    return trial.unsupported_reason


def test_trials_are_the_product_in_file_order(tmp_path: Path) -> None:
    trials = _plan(tmp_path, "task=[train, attention]", "seeds=[0, 1]")
    points = [(t.settings.task, t.settings.method, t.settings.cp_size, t.settings.seed) for t in trials]
    assert points == [
        (task, method, cp_size, seed)
        for task in ("train", "attention")
        for method in ("burst", "ulysses")
        for cp_size in (1, 2)
        for seed in (0, 1)
    ]
    assert trials == _plan(tmp_path, "task=[train, attention]", "seeds=[0, 1]")
    assert len({trial.id for trial in trials}) == len(trials)


def test_trials_carry_every_setting_of_the_file(tmp_path: Path) -> None:
    overrides = ("fixed.checkpoint.tail=0", "steps.measured=7", "limits.trial_seconds=60", "fixed.batch_size=2")
    trial = _plan(tmp_path, *overrides)[0]
    assert (trial.experiment, trial.deadline_seconds) == ("question", 60)
    assert (trial.settings.checkpoint.tail, trial.settings.checkpoint.every) == (0.0, 1)
    assert (trial.settings.steps.measured, trial.settings.batch_size, trial.settings.dtype) == (7, 2, "fp32")


def test_the_note_of_a_model_is_no_part_of_a_trial(tmp_path: Path) -> None:
    trial = _plan(tmp_path)[0]
    reworded = replace(trial, settings=replace(trial.settings, model=replace(trial.settings.model, note="other words")))
    assert (reworded.settings, reworded.id) == (trial.settings, trial.id)


SMALL = TrialSettings(
    task="train", method="burst", seq_len=64,
    model=ModelShape(name="small", layers=2, hidden=8, ffn=16, heads=2, kv_heads=1, head_dim=4, vocab=256),
)  # fmt: skip


def test_an_id_is_a_digest_of_what_differs_from_its_default_so_that_later_settings_change_none() -> None:
    given = {"task": "train", "method": "burst", "seq_len": 64, "world_size": 1, "model.gated": False}
    given |= {f"model.{name}": getattr(SMALL.model, name) for name in
              ("name", "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")}  # fmt: skip
    digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:8]
    settings = replace(SMALL, model=replace(SMALL.model, gated=False, note="words"))
    assert id_of(settings) == f"train-burst-s64-cp1-{digest}"


def test_every_setting_off_its_default_makes_another_trial() -> None:
    others = [
        replace(SMALL, checkpoint=Checkpoint(replay="bisect")), replace(SMALL, steps=Steps(measured=4)),
        replace(SMALL, z_loss=1e-4), replace(SMALL, model=replace(SMALL.model, qk_norm=True)),
        replace(SMALL, checkpoint=Checkpoint(plan="auto")),
        left_open(replace(SMALL, checkpoint=Checkpoint(plan="auto")), ()),
        left_open(replace(SMALL, checkpoint=Checkpoint(plan="auto")), ("mlp_tiles",)),
    ]  # fmt: skip
    assert len({id_of(each) for each in (SMALL, *others)}) == len(others) + 1


def test_what_the_planner_chose_is_no_part_of_an_id() -> None:
    free = left_open(replace(SMALL, checkpoint=Checkpoint(plan="auto")), ())
    chosen = replace(free, mlp_tiles=8, checkpoint=replace(free.checkpoint, every=0, tail=0.5))
    assert id_of(chosen) == id_of(free)


def test_more_ranks_than_tokens_are_refused_with_checkpointed_products(tmp_path: Path) -> None:
    machine = replace(NODE, gpu_count=8192)
    settings = ("fixed.checkpoint.mlp=0.5", "fixed.method=burst", "fixed.cp_size=4096")
    trials = _plan(tmp_path, *settings, machine=machine)
    assert all("4096" in str(trial.unsupported_reason) for trial in trials)
    assert [row["cp_size"] for row in plan_table(trials)] == [4096]


def test_equal_settings_are_one_trial(tmp_path: Path) -> None:
    assert len(_plan(tmp_path, "sweep.cp_size=[1, 2, 1]")) == 4
    assert len(_plan(tmp_path, "sweep.world_size=[0, 2]", "fixed.cp_size=2")) == 2  # 0 stands for cp_size x tp_size


def test_exclude_drops_what_matches_all_its_keys(tmp_path: Path) -> None:
    trials = _plan(tmp_path, "exclude=[{method: ulysses, cp_size: [1, 4]}]")
    assert [(t.settings.method, t.settings.cp_size) for t in trials] == [("burst", 1), ("burst", 2), ("ulysses", 2)]
    assert _plan(tmp_path, "exclude=[{method: ulysses, dtype: bf16}]") == _plan(tmp_path)
    assert len(_plan(tmp_path, "exclude=[{model: tiny}]")) == 0


def test_a_changed_model_says_so_in_its_name(tmp_path: Path) -> None:
    trials = _plan(tmp_path, "sweep.model.layers=[1, 2]", "fixed.method=burst", "fixed.cp_size=1")
    assert [(t.settings.model.name, t.settings.model.layers) for t in trials] == [("tiny(layers=1)", 1), ("tiny", 2)]


def test_model_settings_that_contradict_each_other_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"question.yaml: model .* 8 query heads are not divisible by 3 KV heads"):
        _plan(tmp_path, "fixed.model.kv_heads=3")


def test_settings_that_contradict_each_other_without_a_file_name_the_options(capsys: pytest.CaptureFixture) -> None:
    words = ["--model", "tiny", "--gpus", "1", "--seq-len", "4k", "--set", "fixed.model.kv_heads=3"]
    assert main(["plan", *words]) == 2
    assert capsys.readouterr().err.startswith("burst: the options --set fixed.model.kv_heads=3: model tiny(kv_heads=3)")


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    reason = _only_unsupported_reason(tmp_path, "fixed.cp_size=2", "fixed.world_size=3")
    assert reason.startswith("cp_size 2 x tp_size 1 = 2 does not divide world_size 3; choose")
    reason = _only_unsupported_reason(tmp_path, "fixed.cp_size=2", "fixed.emulate_nodes=3")
    assert reason.startswith("emulate_nodes 3 does not divide world_size 2; choose")


def test_more_ranks_than_the_machine_holds_are_refused(tmp_path: Path) -> None:
    assert "8 ranks need 8 GPUs, but this machine has 4 GPUs (NVIDIA H200)" in _only_unsupported_reason(
        tmp_path, "fixed.cp_size=8", machine=NODE
    )
    assert "16 ranks are more than the 8 processes" in _only_unsupported_reason(tmp_path, "fixed.cp_size=16")
    assert "8 ranks need 8 GPUs" in _only_unsupported_reason(tmp_path, "fixed.world_size=8", machine=NODE)


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["fixed.cp_size=16"], "cp_size"),
        (["fixed.cp_size=2", "fixed.world_size=16"], "world_size"),
        (
            ["fixed.method=megatron_tp", "fixed.tp_size=16", "fixed.model.heads=16", "fixed.model.kv_heads=16"],
            "tp_size",
        ),
    ],
)
def test_the_setting_to_make_smaller_is_the_one_that_asks_for_the_ranks(tmp_path, overrides, setting):
    assert _only_unsupported_reason(tmp_path, *overrides).endswith(f"; use GPUs or a {setting} of at most 8")
    assert _only_unsupported_reason(tmp_path, *overrides, machine=NODE).endswith(
        f"; use more GPUs or a smaller {setting}"
    )


@pytest.mark.parametrize("kernel", ["fa2", "cudnn", "fa4", "flex"])
def test_gpu_kernels_are_refused_without_gpu(tmp_path: Path, kernel: str) -> None:
    reason = _only_unsupported_reason(tmp_path, f"fixed.kernel={kernel}", "fixed.dtype=bf16")
    assert reason.startswith(f"kernel {kernel} needs a GPU, and this machine has none")


def test_the_cpu_kernel_is_refused_where_ranks_use_gpus(tmp_path: Path) -> None:
    reason = _only_unsupported_reason(tmp_path, "fixed.kernel=cpu", machine=NODE)
    assert reason.startswith("kernel cpu needs a CPU, and the ranks here use GPUs")


def test_head_dims_that_a_kernel_for_gpus_does_not_take_are_refused(tmp_path: Path) -> None:
    wide = "fixed.model.head_dim=192"
    reason = _only_unsupported_reason(tmp_path, wide, "fixed.kernel=cudnn", "fixed.dtype=bf16", machine=NODE)
    assert reason == "kernel cudnn takes head dims up to 128 in multiples of 8, found 192; choose kernel reference"
    alone = _plan(tmp_path, wide, "task=lm_head", "fixed.method=burst", "fixed.kernel=cudnn", "fixed.dtype=bf16",
                  machine=NODE)  # fmt: skip
    assert all(trial.unsupported_reason is None for trial in alone)  # it attends to nothing
    for kernel in ("fa4", "auto", "reference"):
        again = _plan(tmp_path, wide, f"fixed.kernel={kernel}", "fixed.dtype=bf16", machine=NODE)
        assert all(trial.unsupported_reason is None for trial in again)


def test_a_vocabulary_too_small_for_the_text_is_refused_in_training_only(tmp_path: Path) -> None:
    reason = _only_unsupported_reason(tmp_path, "task=train", "fixed.model.vocab=100")
    assert "has a vocabulary of 100, but the tokens of python_docs need 256; choose" in reason
    assert all(trial.unsupported_reason is None for trial in _plan(tmp_path, "task=attention", "fixed.model.vocab=100"))


def test_a_stores_own_vocabulary_decides_whether_a_model_has_words_for_it(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.vocabulary = 128  # ASCII alone
    (tmp_path / "text.txt").write_text("plain letters\n")
    build_store([str(tmp_path / "text.txt")], tmp_path / "store", tokenizer)
    data = f"fixed.data={tmp_path / 'store'}"
    assert all(
        trial.unsupported_reason is None for trial in _plan(tmp_path, "task=train", "fixed.model.vocab=128", data)
    )
    reason = _only_unsupported_reason(tmp_path, "task=train", "fixed.model.vocab=127", data)
    assert f"a vocabulary of 127, but the tokens of {tmp_path / 'store'} need 128" in reason
    (tmp_path / "store" / "header.json").write_text("{")
    assert "cannot be read" in _only_unsupported_reason(tmp_path, "task=train", data)


def test_a_mask_that_describes_another_length_is_refused_and_has_no_work(tmp_path: Path) -> None:
    trials = _plan(tmp_path, "fixed.mask=documents:3,5")
    assert all("2 documents hold 8 tokens" in (trial.unsupported_reason or "") for trial in trials)
    assert {row["model_tflop"] for row in plan_table(trials)} == {None}


def test_bf16_runs_without_gpu(tmp_path: Path) -> None:
    assert all(trial.unsupported_reason is None for trial in _plan(tmp_path, "fixed.dtype=bf16"))


def test_a_length_that_does_not_split_names_the_nearest_ones(tmp_path: Path) -> None:
    trials = _plan(tmp_path, "fixed.seq_len=1001")
    refused = {(t.settings.method, t.settings.cp_size): t.unsupported_reason for t in trials}
    assert refused["burst", 1] is None
    assert refused["burst", 2] is not None
    assert "1000" in refused["burst", 2]
    assert "1004" in refused["burst", 2]
    assert refused["ulysses", 2] is not None
    assert "1000" in refused["ulysses", 2]
    assert "1002" in refused["ulysses", 2]


def test_more_groups_of_heads_than_the_model_has_are_refused(tmp_path: Path) -> None:
    reason = _only_unsupported_reason(tmp_path, "fixed.head_groups=1000")
    assert reason == "head_groups is 1000, and model tiny has 4 KV heads; set it to at most 4"


@pytest.mark.parametrize(("setting", "least"), [("kernel=fa4", "9.0"), ("linear_dtype=float8", "8.9")])
def test_what_a_kind_of_gpu_is_too_old_for_is_refused(tmp_path: Path, setting: str, least: str) -> None:
    setting_of = ("fixed.dtype=bf16", f"fixed.{setting}")
    reason = _only_unsupported_reason(tmp_path, *setting_of, machine=imagined("NVIDIA A100-SXM4-80GB", 80))
    name, _, value = setting.partition("=")
    assert reason.startswith(f"{name} {value} needs compute capability {least} or newer, and NVIDIA A100-SXM4-80GB ha")
    for known in ("NVIDIA H200", "a GPU without a file"):
        trials = _plan(tmp_path, "fixed.method=burst", "fixed.cp_size=1", *setting_of, machine=imagined(known, 139))
        assert [trial.unsupported_reason for trial in trials] == [None]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["fixed.cp_size=2", "steps.warmup_seq_len=18"], "seq_len 18 does not split into 2 x cp_size = 4 equal zigzag"),
        (["fixed.mask=documents:1000,24", "steps.warmup_seq_len=128"], "2 documents hold 1024 tokens and the sequence"),
    ],
)
def test_a_warm_up_length_that_cannot_be_run_is_refused_by_its_name(tmp_path: Path, changes, reason: str) -> None:
    unsupported_reason = _only_unsupported_reason(tmp_path, *changes)
    assert unsupported_reason.startswith(f"steps.warmup_seq_len {changes[1].partition('=')[2]} cannot be run: {reason}")
    assert unsupported_reason.endswith("; 0 warms up at the trial's own length")
    [attention] = _plan(tmp_path, "fixed.method=burst", "fixed.cp_size=1", *changes, "task=attention")
    [cold] = _plan(tmp_path, "fixed.method=burst", "fixed.cp_size=1", *changes, "steps.warmup=0")
    assert attention.unsupported_reason is cold.unsupported_reason is None


def test_a_warm_up_longer_than_the_trial_is_refused_because_the_peaks_would_be_its_own(tmp_path: Path) -> None:
    changes = ("fixed.method=burst", "fixed.cp_size=1")
    reason = _only_unsupported_reason(tmp_path, "steps.warmup_seq_len=2k")
    assert reason.startswith("steps.warmup_seq_len 2048 is longer than seq_len 1024, and takes more memory; give fewer")
    for fine in ("steps.warmup_seq_len=1k", "steps.warmup_seq_len=512"):
        assert _plan(tmp_path, *changes, fine)[0].unsupported_reason is None
    assert _plan(tmp_path, *changes, "steps.warmup_seq_len=2k", "steps.warmup=0")[0].unsupported_reason is None


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [
        ("{every: 1, host_layers: 1}", "checkpoint.host_layers is 1, and of the 0 layers that are not computed again"),
        ("{every: 1, host_layers: 2}", "set it to at most 0"),
        ("{every: 0, host_layers: 2}", "at most 1 can be in host memory, the last one never; set it to at most 1"),
        ("{every: 1, whole_layers: 3}", "checkpoint.whole_layers is 3, and model tiny has 2 layers; set it to at mo"),
        ("{plan: auto, every: 0, whole_layers: 0, host_layers: 2}", "checkpoint.host_layers is 2, and of the 2 laye"),
    ],
)
def test_more_layers_than_there_are_to_keep_are_refused(tmp_path: Path, checkpoint, reason: str) -> None:
    changes = ("fixed.method=burst", "fixed.cp_size=1")
    found = _only_unsupported_reason(tmp_path, f"fixed.checkpoint={checkpoint}")
    assert reason in found
    assert found.endswith(", or checkpoint.every to 0") == ("every: 1, host_layers: 1" in checkpoint)
    assert _plan(tmp_path, *changes, f"fixed.checkpoint={checkpoint}", "task=attention")[0].unsupported_reason is None


def test_layers_that_a_plan_may_keep_are_not_refused(tmp_path: Path) -> None:
    for given in ("{plan: auto, host_layers: 1}", "{every: 0, host_layers: 1}"):
        trials = _plan(tmp_path, "fixed.method=burst", "fixed.cp_size=1", f"fixed.checkpoint={given}")
        assert [trial.unsupported_reason for trial in trials] == [None], given


@pytest.mark.parametrize("name", ["mlp_tiles", "projection_tiles", "head_tiles"])
def test_more_tiles_than_tokens_are_refused(tmp_path: Path, name: str) -> None:
    changes = ("fixed.method=burst", "fixed.cp_size=2")
    assert _plan(tmp_path, *changes, f"fixed.{name}=512")[0].unsupported_reason is None
    [trial] = _plan(tmp_path, *changes, f"fixed.{name}=513")
    assert trial.unsupported_reason == f"{name} is 513, and a rank has 512 tokens; set it to at most 512"


def test_heads_that_ulysses_cannot_divide_are_refused_and_the_rest_runs(tmp_path: Path) -> None:
    trials = _plan(tmp_path, "fixed.cp_size=8", "fixed.model.heads=24", "fixed.model.kv_heads=3")
    reasons = {trial.settings.method: trial.unsupported_reason for trial in trials}
    assert reasons["burst"] is None
    assert reasons["ulysses"] is not None
    assert "KV heads" in reasons["ulysses"]
    assert nothing_can_run(trials) is None


def test_a_plan_without_a_trial_that_can_run_says_why(tmp_path: Path) -> None:
    assert nothing_can_run(_plan(tmp_path)) is None
    everything_excluded = nothing_can_run(_plan(tmp_path, "exclude=[{dtype: fp32}]"))
    assert everything_excluded is not None
    assert "exclude drops every combination" in everything_excluded
    too_large = nothing_can_run(_plan(tmp_path, "sweep.cp_size=[16, 16]", "fixed.method=burst"))
    assert too_large is not None
    assert too_large.startswith("the plan's only trial cannot run: 16 ranks are more")
    both = nothing_can_run(_plan(tmp_path, "sweep.cp_size=[16, 32]", "fixed.method=burst"))
    assert both is not None
    assert both.startswith("none of the 2 trials can run, 1 of them because 16 ranks")


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (["steps.measured=2"], ["steps.measured=3"], "steps.measured 2, not 3"),
        (["fixed.seq_len=2k"], ["fixed.dtype=bf16"], "seq_len 2048, not 1024, and dtype fp32, not bf16"),
        (["seeds=[0, 1]"], ["seeds=[2]"], "seed 0 or 1, not 2"),
        (["model=1b"], ["model.layers=1"], "model 1b, not tiny(layers=1)"),
        (["task=train", "fixed.memory=8GiB"], ["task=train"], "memory 8GiB, not ''"),
        (["sweep.cp_size=[1, 4]", "seeds=[1]"], [], ""),  # cp_size 4 is left over
        (["seeds=[0, 1, 2, 3]"], ["seeds=[4]"], ""),  # many values
        ([], [], ""),
    ],
)
def test_the_few_settings_that_tell_all_trials_apart_are_named(tmp_path: Path, before, now, said: str) -> None:
    others, ours = ([trial.settings for trial in _plan(tmp_path, *changes)] for changes in (before, now))
    assert told_apart(others, ours) == said


def test_the_table_shows_what_varies_and_why_a_trial_cannot_run(tmp_path: Path) -> None:
    trials = _plan(tmp_path, "sweep.checkpoint.tail=[0, 1]", "sweep.cp_size=[1, 16]")
    assert varying_settings(trials) == ["method", "cp_size", "world_size", "checkpoint.tail"]
    rows = plan_table(trials)
    assert len({tuple(row) for row in rows}) == 1  # the same columns in every row
    assert rows[0]["trial_id"] == trials[0].id
    assert (rows[0]["model"], rows[0]["checkpoint.tail"], rows[0]["can_run"], rows[0]["reason"]) == (
        "tiny",
        0,
        True,
        "",
    )
    assert rows[-1]["can_run"] is False
    assert rows[-1]["reason"] == trials[-1].unsupported_reason
    assert all(row["model_tflop"] > 0 for row in rows)
    assert plan_table([]) == []


def test_the_quickstart_compares_three_methods_over_lengths_and_cp_sizes() -> None:
    trials = plan(load_experiment(QUICKSTART), LAPTOP)
    assert len(trials) == 36
    assert all(trial.unsupported_reason is None for trial in trials)
    settings = [trial.settings for trial in trials]
    assert {s.method for s in settings} == {"burst", "megatron_cp", "ulysses"}
    assert {s.cp_size for s in settings} == {1, 2, 4}
    assert len({s.seq_len for s in settings}) >= 2
    assert {s.task for s in settings} == {"train", "attention"}


def test_the_quickstart_on_gpus_runs_one_gpu_once_and_refuses_what_does_not_fit() -> None:
    experiment = load_experiment(QUICKSTART, "gpu")
    trials = plan(experiment, NODE)
    assert all(trial.unsupported_reason is None for trial in trials)
    assert {t.settings.method for t in trials if t.settings.cp_size == 1} == {"burst"}
    assert {t.settings.kernel for t in trials} == {"fa4", "cudnn"}
    assert nothing_can_run(plan(experiment, LAPTOP)) is not None
