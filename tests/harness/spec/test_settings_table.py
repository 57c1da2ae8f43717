"""`settings: equal | as_published | tuned`: the table behind it, what it fills, and where a reader sees that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.settings import Checkpoint, SettingsFrom, TrialSettings, from_json, to_json
from harness.base.errors import UsageError
from harness.cli import main
from harness.machine.this_machine import Machine
from harness.plan.matrix import plan
from harness.plan.unsupported import unsupported_reason
from harness.report.results import METHOD_ORDER, flatten
from harness.spec.experiment import load_experiment
from harness.spec.methods import all_methods, method_named
from harness.spec.table import (
    EQUAL,
    MAY_FILL,
    TABLE_FILE,
    VARIANTS,
    MethodSettings,
    method_settings_of,
    read_table,
    settings_table,
)
from harness.spec.trial import Trial
from tests.harness import synthetic_records

NODES = Machine(
    hostname="node", device="cuda", cores=64, memory_gib=2048, gpu_name="NVIDIA H200", gpu_count=8, gpu_memory_gib=139,
    nodes=4,
)  # fmt: skip
LAPTOP = Machine(hostname="laptop", device="cpu", cores=2, memory_gib=8)
FILLED: tuple[SettingsFrom, ...] = ("as_published", "tuned")
METHODS = list(all_methods())
NATIVE = [
    name
    for name, method in all_methods().items()
    if hasattr(method, "attention") and "train" in getattr(method, "tasks", ("train",))
]


def papers_trial(folder: Path, method: str, variant: str, machine: Machine = NODES, **fixed: Any) -> Trial:
    """The paper's 7B trial on 32 GPUs with this method, as near to it as a foreign system runs one."""
    tasks = getattr(method_named(method), "tasks", ("train",))
    whole = {name: {"cp_size": 1} for name in METHODS if name.startswith(("trl_", "transformers_", "flash_"))}
    sizes = {**whole, "megatron_tp": {"tp_size": 8, "world_size": 32}}
    values = {"method": method, "seq_len": "1M", "settings": variant} | sizes.get(method, {"cp_size": 32}) | fixed
    lines = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in values.items())
    path = folder / "question.yaml"
    steps = "steps: {warmup: 1, measured: 1}\n"
    path.write_text(f"task: {tasks[0]}\nmodel: 7b\n{steps}fixed:\n{lines}", encoding="utf-8")
    [trial] = plan(load_experiment(path), machine)
    return trial


def flat(settings: TrialSettings) -> dict[str, Any]:
    return flatten(to_json(settings))


def unplanned(settings: TrialSettings) -> TrialSettings:
    """Settings with the defaults of what the planner chose: it chooses nothing where the table gives checkpointing."""
    return replace(
        settings, checkpoint=Checkpoint(), planned="", mlp_tiles=1, projection_tiles=1, optimizer_offload=False
    )


def test_every_method_has_an_entry_for_every_value_of_settings() -> None:
    table = settings_table()
    assert {name: set(table.get(name, {})) for name in METHODS} == {name: set(VARIANTS) for name in METHODS}
    # Entries of methods that reports have a place for may stand before the method does.
    assert set(table) - set(METHODS) <= set(METHOD_ORDER)


@pytest.mark.parametrize("variant", FILLED)
@pytest.mark.parametrize("method", list(settings_table()))
def test_an_entry_names_where_it_comes_from_and_every_value_its_reason_and_source(method, variant):
    entry = method_settings_of(method, variant)
    assert entry is not None
    assert entry.source
    assert all(choice.reason and choice.source for choice in entry.choices.values())


@pytest.mark.parametrize("method", [*NATIVE, "megatron_tp", "torch_cp"])
def test_the_entries_of_native_forms_say_head_recomputation_offload_and_wire(method: str) -> None:
    for variant in FILLED:
        entry = method_settings_of(method, variant)
        assert entry is not None
        planned = "checkpoint.plan" in entry.choices  # what it would name besides is chosen for the GPU's memory
        by_hand = set() if planned else {"checkpoint.every", "checkpoint.tail", "optimizer_offload"}
        assert {"lm_head_fusion", *by_hand} <= entry.choices.keys()
    published = method_settings_of(method, "as_published")
    assert published is not None
    assert method in ("megatron_tp", "torch_cp") or {"grad_comm_dtype", "sharding"} <= published.choices.keys()


def test_burst_as_published_is_the_artifacts(tmp_path: Path) -> None:
    settings = papers_trial(tmp_path, "burst", "as_published").settings
    assert (settings.schedule, settings.backward, settings.grad_comm_dtype) == ("double_ring", "query", "input")
    assert (settings.checkpoint.every, settings.checkpoint.tail) == (1, 0.5)
    assert settings.lm_head_fusion
    assert settings.optimizer_offload


@pytest.mark.parametrize("variant", FILLED)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_accepts_what_the_table_gives_it_for_the_papers_7b(method, variant, tmp_path):
    trial = papers_trial(tmp_path, method, variant)
    assert method_named(method).refuse(trial.settings) is None
    if method in NATIVE:
        assert trial.unsupported_reason is None


@pytest.mark.parametrize("variant", FILLED)
@pytest.mark.parametrize("method", METHODS)
def test_the_table_changes_the_settings_it_names_and_no_other(method, variant, tmp_path):
    equal, trial = (papers_trial(tmp_path, method, each) for each in (EQUAL, variant))
    entry = method_settings_of(method, variant)
    assert entry is not None
    given = {name: choice.value for name, choice in entry.choices.items()}
    planned = given.get("checkpoint.plan") == "auto"
    unfilled = equal.settings if planned else unplanned(equal.settings)
    assert flat(trial.settings) == flat(unfilled) | given | {"settings": variant}
    assert trial.table.filled == tuple(sorted(given))
    assert trial.table.notes == entry.notes
    assert equal.table.filled == equal.table.by_hand == equal.table.notes == ()


def test_a_value_set_by_hand_wins_and_is_said_to_be_by_hand(tmp_path: Path) -> None:
    by_hand = {"checkpoint": {"tail": 1}, "optimizer_offload": False, "mlp_tiles": 2}
    trial = papers_trial(tmp_path, "ulysses", "as_published", **by_hand)
    assert (trial.settings.checkpoint.tail, trial.settings.optimizer_offload, trial.settings.mlp_tiles) == (1, False, 2)
    assert trial.settings.checkpoint.every == 1
    assert trial.table.by_hand == ("checkpoint.tail", "mlp_tiles", "optimizer_offload")
    assert not set(trial.table.by_hand) & set(trial.table.filled)


def test_the_id_of_a_trial_with_equal_settings_is_the_one_it_had_before_there_was_the_setting(tmp_path: Path) -> None:
    trial = papers_trial(tmp_path, "burst", EQUAL)
    before = {name: value for name, value in to_json(trial.settings).items() if name != "settings"}
    assert replace(trial, settings=from_json(TrialSettings, before)).id == trial.id
    assert "settings" not in json.dumps(before)
    assert papers_trial(tmp_path, "burst", "tuned").id != trial.id


def test_set_ups_that_come_to_the_same_values_are_trials_of_their_own(tmp_path: Path) -> None:
    trials = [papers_trial(tmp_path, "trl_upstream", variant) for variant in FILLED]
    same = [flat(trial.settings) | {"settings": ""} for trial in trials]
    assert same[0] == same[1]
    assert trials[0].id != trials[1].id


def test_settings_are_swept_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "question.yaml"
    path.write_text(
        "task: train\nmodel: tiny\nsweep: {settings: [equal, as_published, tuned], method: [burst, megatron_cp]}\n"
        "fixed: {seq_len: 256, dtype: fp32}\nexclude: [{settings: tuned, method: burst}]\n",
        encoding="utf-8",
    )
    trials = plan(load_experiment(path), LAPTOP)
    assert [(trial.settings.settings, trial.settings.method) for trial in trials] == [
        ("equal", "burst"), ("equal", "megatron_cp"), ("as_published", "burst"), ("as_published", "megatron_cp"),
        ("tuned", "megatron_cp"),
    ]  # fmt: skip
    assert {trial.unsupported_reason for trial in trials} == {None}


def test_an_unknown_value_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"settings is 'tunde'; expected equal, as_published or tuned; did you mean tuned\?"
    ):
        papers_trial(tmp_path, "burst", "tunde")


def test_a_method_without_an_entry_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = papers_trial(tmp_path, "burst", "tuned")
    monkeypatch.setitem(settings_table(), "burst", {EQUAL: MethodSettings()})
    reason = unsupported_reason(trial.settings, NODES)
    assert reason is not None
    assert reason.startswith("settings tuned has no entry for burst in baselines/settings.yaml; add one")
    assert unsupported_reason(replace(trial.settings, settings=EQUAL), NODES) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("burst: {as_publishd: {}}", r":1: unknown key as_publishd in the entry of burst; did you mean as_published\?"),
        ("burst: {equal: {source: a paper}}", r":1: equal of burst fills settings; write equal: \{\}"),
        ("burst: {tuned: {settings: {}}}", r":1: tuned of burst lacks source; name the file and line"),
        (
            "burst: {tuned: {source: a paper, settings: {seq_len: {value: 1, reason: x, source: y}}}}",
            r":1: seq_len is no setting that the table may fill; ",
        ),
        (
            "burst: {tuned: {source: a paper, settings: {schedule: {value: ring, reason: x}}}}",
            ":1: schedule lacks source; add what is missing",
        ),
        (
            "burst: {tuned: {source: a paper, settings: {schedule: {value: rng, reason: x, source: y}}}}",
            ":1: schedule is 'rng'; expected auto, ring, double_ring",
        ),
        (
            "burst: {tuned: {source: a paper, settings: {checkpoint.tail: {value: 2, reason: x, source: y}}}}",
            ":1: checkpoint.tail is 2",
        ),
    ],
)
def test_a_table_is_read_strictly(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / TABLE_FILE.name
    path.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match=expected):
        read_table(path)


def test_the_table_never_decides_what_is_computed_or_on_how_many_ranks() -> None:
    work = {"task", "method", "model", "seq_len", "cp_size", "tp_size", "world_size", "batch_size", "dtype", "mask"}
    assert not MAY_FILL & work
    decided = {"checkpoint.tail", "lm_head_fusion", "grad_comm_dtype", "schedule", "kernel", "sharding", "mlp_tiles"}
    assert decided <= MAY_FILL <= flat(synthetic_records.settings()).keys()


def test_a_plan_says_which_values_came_from_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "question.yaml"
    path.write_text(
        "task: train\nmodel: tiny\nsweep: {settings: [equal, as_published], method: [burst, ulysses]}\n"
        "fixed: {seq_len: 256, dtype: fp32, checkpoint.tail: 1}\n",
        encoding="utf-8",
    )
    assert main(["plan", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "as_published of ulysses, from baselines/settings.yaml: checkpoint.every 1, grad_comm_dtype input," in text
    assert "sharding full; by hand: checkpoint.tail note: fp16 with loss scaling" in text
    assert "equal of" not in text
    assert main(["plan", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row.get("by_hand") for row in rows] == [None, None, ["checkpoint.tail"], ["checkpoint.tail"]]
    assert rows[3]["from_table"]["optimizer_offload"] is True
    assert any("ratio 0.8" in note for note in rows[3]["notes"])
