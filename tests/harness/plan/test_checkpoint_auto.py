"""`checkpoint: auto` from the file to the record: what counts as set by hand, ids, budgets, corrections and columns."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from engine.checkpoint.planning.memory_settings import PLANNABLE, left_open
from engine.measurement import write_json
from engine.reader import to_json
from engine.settings import Checkpoint, TrialSettings
from harness.base.errors import UsageError
from harness.cli import main
from harness.machine.this_machine import Machine, imagined
from harness.metrics.hardware import hardware_named, speeds_of
from harness.plan.checkpointing import budget_of, plan_fits, planner_speeds, with_plan
from harness.plan.forecast import longest, machine_of
from harness.plan.matrix import plan, planned_again
from harness.records.forecasts import correction_of, outcome_in_words, records_with_plan
from harness.records.record import Record, read_record, write_record
from harness.report.results import row_of
from harness.report.variants import series_of, varying_settings
from harness.spec.experiment import load_experiment
from harness.spec.models import named_model
from harness.spec.trial import Trial
from harness.training.file import load_training
from harness.training.planning import planned_for
from tests.harness.synthetic_records import GIB, LARGE, measurement

H200 = imagined("NVIDIA H200", 139)
LAPTOP = Machine(hostname="laptop", device="cpu", cores=2, memory_gib=8)
TEXT = """\
task: train
model: 1b
fixed: {method: burst, seq_len: 64k, dtype: bf16, memory: 40GiB}
"""


def trials(folder: Path, *overrides: str, text: str = TEXT, machine: Machine = H200) -> tuple[Trial, ...]:
    path = folder / "question.yaml"
    path.write_text(text, encoding="utf-8")
    return plan(load_experiment(path, overrides=overrides), machine)


def only(folder: Path, *overrides: str, text: str = TEXT, machine: Machine = H200) -> Trial:
    [trial] = trials(folder, *overrides, text=text, machine=machine)
    return trial


def ran(trial: Trial, allocated: float, reserved: float = 0.0) -> Record:
    """The record of a trial that took so many times what was predicted."""
    assert trial.plan is not None
    measured = measurement(trial.settings, gpu=H200.gpu_name)
    measured.peak_allocated_bytes = [int(allocated * trial.plan.allocated_bytes)]
    measured.peak_reserved_bytes = [int((reserved or allocated) * trial.plan.reserved_bytes)]
    return Record(
        trial_id=trial.id, experiment="question", title="", settings=trial.settings, system="", status="ok",
        measurement=measured, gpu=H200.gpu_name, plan=trial.plan,
    )  # fmt: skip


def test_it_is_the_default_of_training_where_a_file_says_nothing_of_checkpointing(tmp_path: Path) -> None:
    assert only(tmp_path).settings.checkpoint.plan == "auto"
    assert only(tmp_path).settings.planned.split() == list(PLANNABLE)
    by_hand = only(tmp_path, "fixed.checkpoint.every=1")
    assert by_hand.settings.checkpoint == Checkpoint(every=1)
    assert (by_hand.settings.planned, by_hand.plan) == ("", None)
    assert only(tmp_path, "task=attention").settings.checkpoint == Checkpoint()
    assert only(tmp_path, "fixed.checkpoint.plan=hand").settings.checkpoint == Checkpoint()


def test_other_systems_decide_for_themselves(tmp_path: Path) -> None:
    for given in ((), ("fixed.checkpoint=auto",)):
        [foreign] = trials(tmp_path, "fixed.method=torchtitan_upstream", *given)
        assert foreign.settings.checkpoint.plan == "hand"
        assert foreign.plan is None
    native = only(tmp_path, "fixed.method=ulysses", "fixed.cp_size=2")
    assert native.plan is not None


def test_values_given_beside_it_are_set_by_hand(tmp_path: Path) -> None:
    trial = only(tmp_path, "fixed.checkpoint={plan: auto, tail: 0.5}", "fixed.mlp_tiles=3")
    assert (trial.settings.checkpoint.tail, trial.settings.mlp_tiles) == (0.5, 3)
    assert not {"checkpoint.tail", "mlp_tiles"} & set(trial.settings.planned.split())
    swept = trials(tmp_path, "fixed.checkpoint=auto", "sweep.mlp_tiles=[2, 4]")
    assert [each.settings.mlp_tiles for each in swept] == [2, 4]


def test_auto_over_a_file_ends_what_it_sets_by_hand(tmp_path: Path) -> None:
    text = TEXT.replace("memory: 40GiB", "memory: 40GiB, checkpoint: {every: 4, tail: 0.2}, mlp_tiles: 2")
    trial = only(tmp_path, "fixed.checkpoint=auto", text=text)
    assert trial.settings.checkpoint.plan == "auto"
    assert set(PLANNABLE) - set(trial.settings.planned.split()) == {"mlp_tiles"}


def test_an_id_depends_on_what_was_asked_and_not_on_what_was_chosen(tmp_path: Path) -> None:
    here, there = only(tmp_path), only(tmp_path, machine=LAPTOP)
    assert here.settings.checkpoint != there.settings.checkpoint
    assert here.id == there.id
    assert only(tmp_path, "fixed.memory=24GiB").id != here.id
    assert only(tmp_path, "fixed.checkpoint={plan: auto, tail: 0.5}").id != here.id


def test_ids_of_trials_set_by_hand_are_those_they_had_before(tmp_path: Path) -> None:
    """A published record of one GPU, whose settings say nothing of a planner."""
    folder = Path(__file__).parents[3] / "results" / "published" / "h200x1" / "one_gpu" / "trials"
    for path in sorted(folder.glob("*/record.json")):
        record = read_record(path)
        trial = Trial(experiment="", title="", settings=record.settings, deadline_seconds=1)
        assert trial.id == record.trial_id == path.parent.name


@pytest.mark.parametrize("text", ["80", "80GB", "GiB", "-1GiB", "0GiB", "1e3GiB", "80 gib", "8.1234GiB"])
def test_a_budget_without_a_number_and_a_unit_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"memory is .*; (give|expected) a size (above 0 )?with its unit"):
        only(tmp_path, f"fixed.memory={text}")
    with pytest.raises(UsageError, match="memory is"):
        only(tmp_path, f'fixed.memory="{text}"')


def test_the_budget_is_the_smaller_of_the_gpu_and_the_setting() -> None:
    asked = TrialSettings(task="train", method="burst", model=LARGE, seq_len=1024, memory="1.5TiB")
    node = dataclasses.replace(H200, memory_gib=512, gpu_count=8)
    found = budget_of(asked, node, hardware_named("h200"))
    assert (found.gpu, found.source) == (139 * GIB, "the GPU's own, less than memory: 1.5TiB")
    small = dataclasses.replace(asked, memory="80 GiB", cp_size=4, world_size=4)
    budget = budget_of(small, node, hardware_named("h200"))
    assert (budget.gpu, budget.host, budget.source) == (80 * GIB, 0.9 * 128 * GIB, "memory")
    assert budget.host_source == "90% of the host's, shared by 4 ranks"
    unlisted = dataclasses.replace(H200, gpu_name="Other GPU", gpu_memory_gib=48)
    assert budget_of(dataclasses.replace(asked, memory=""), unlisted, None).gpu == 46.5 * GIB
    assert budget_of(dataclasses.replace(asked, memory=""), LAPTOP, None).bytes == 4 * GIB
    assert budget_of(dataclasses.replace(asked, memory="1GiB"), LAPTOP, None).bytes == GIB


def test_the_host_memory_of_a_rank_is_the_smaller_of_its_share_and_the_setting() -> None:
    trial = TrialSettings(task="train", method="burst", model=LARGE, seq_len=1024, host_memory="64GiB")
    node = dataclasses.replace(H200, memory_gib=512, gpu_count=8)

    def found(machine: Machine, **changes: str) -> tuple[float, str]:
        budget = budget_of(dataclasses.replace(trial, **changes), machine, None)
        return budget.host / GIB, budget.host_source if budget.gpu else budget.source

    assert found(node) == (64, "host_memory")
    assert found(node, host_memory="1TiB") == (0.9 * 512, "90% of the host's")
    imagined = machine_of(hardware_named("h200"))
    assert found(imagined) == (64, "host_memory")
    assert found(imagined, host_memory="") == (0.9 * 256, "assumed; host_memory sets it")
    assert found(imagined, host_memory="1TiB") == (1024, "host_memory")
    assert found(LAPTOP, host_memory="3GiB") == (3, "host_memory")
    assert found(LAPTOP, host_memory="64GiB") == (4, "half of the host's")
    assert found(LAPTOP, host_memory="3GiB", memory="2GiB") == (2, "memory")


def test_less_host_memory_is_planned_for_at_the_price_of_time() -> None:
    eight = TrialSettings(
        task="train",
        method="burst",
        model=named_model("llama3_8b"),
        seq_len=1 << 20,
        cp_size=8,
        planned=" ".join(PLANNABLE),
    )
    hardware = hardware_named("h200")
    (_, free), (_, bounded) = (
        with_plan(dataclasses.replace(eight, host_memory=size), machine_of(hardware)) for size in ("", "64GiB")
    )
    assert free is not None
    assert bounded is not None
    assert free.host_bytes > 200 * GIB
    assert bounded.host_bytes <= 64 * GIB
    assert free.step_seconds is not None
    assert bounded.step_seconds is not None
    assert 1.003 < bounded.step_seconds / free.step_seconds < 1.005  # docs/memory.md says 0.4%


def test_numbers_of_a_hybrids_layers_on_the_host_are_all_compared(tmp_path: Path) -> None:
    """With one more, others are there: 4 of them can take more of the host than 5."""
    given = [
        "model=nemotron_h_8b", "fixed.seq_len=64k", "fixed.cp_size=4", "fixed.checkpoint={plan: auto, every: 0}",
        "fixed.optimizer_offload=false", "fixed.mlp_tiles=1", "fixed.projection_tiles=1", "fixed.head_tiles=0",
        "fixed.head_groups=1",
    ]  # fmt: skip
    for memory, host, layers in (("115GiB", "35.8GiB", 7), ("129.2GiB", "93.5GiB", 4)):
        trial = only(tmp_path, *given, f"fixed.memory={memory}", f"fixed.host_memory={host}")
        assert trial.plan is not None
        assert trial.plan.fits
        assert trial.settings.checkpoint.host_layers == layers


def test_settings_by_hand_that_take_more_than_host_memory_are_refused(tmp_path: Path) -> None:
    by_hand = "fixed.checkpoint={every: 0, host_layers: 8}"
    assert only(tmp_path, by_hand, "fixed.host_memory=64GiB").unsupported_reason is None
    reason = only(tmp_path, by_hand, "fixed.host_memory=3GiB").unsupported_reason
    assert reason is not None
    of_gpu = r"([\d.]+ GiB of its GPU, where memory is \w+, and )?"
    assert re.search(
        rf"a rank would hold about {of_gpu}[\d.]+ GiB of its host's memory, and host_memory is 3GiB; allow more", reason
    )
    with pytest.raises(UsageError, match=r"host_memory is .*; expected a size with its unit"):
        only(tmp_path, "fixed.host_memory=64")


def test_where_neither_the_gpu_nor_its_host_holds_a_trial_both_are_named(tmp_path: Path) -> None:
    given = ("model=1b", "sweep.seq_len=[128k]", "fixed.memory=9GiB", "fixed.host_memory=16GiB")
    reason = only(tmp_path, *given).unsupported_reason
    assert reason is not None
    assert re.search(r"about [\d.]+ GiB of its GPU, where memory is 9GiB, and [\d.]+ GiB of its host's memory", reason)


def test_the_planner_weighs_work_by_the_speeds_of_the_prediction() -> None:
    for name in ("h200", "h100", "a100", "a800"):
        hardware = hardware_named(name)
        for kernel in ("auto", "fa4", "cudnn", "fa2"):
            found = planner_speeds(kernel, hardware)
            expected = speeds_of(hardware, kernel)
            assert found.gemm == expected.gemm_tflops * 1e12
            assert found.attention == expected.attention_forward_tflops * 1e12
            assert found.memory == expected.memory_gib * GIB
            assert found.host_link == expected.host_gib * GIB
    assert planner_speeds("cudnn", hardware_named("h200")).attention == 555e12


def test_a_peak_above_the_prediction_corrects_the_next_plan_of_that_machine_and_shape(tmp_path: Path) -> None:
    first, second = trials(tmp_path, "sweep.seq_len=[64k, 128k]")
    assert planned_again(second, H200, [ran(first, 1.03)]) is second  # within the model's error
    seen = ran(first, 1.2)
    again = planned_again(second, H200, [seen])
    assert again.plan is not None
    assert again.plan.correction == pytest.approx(1.2)
    assert again.plan.words.endswith("the prediction is taken 1.2 times "
                                     f"({first.id}: {outcome_in_words(seen)})")  # fmt: skip
    assert 1.2 * again.plan.reserved_bytes <= 40 * GIB
    assert again.id == second.id
    assert outcome_in_words(seen).endswith("20.0% above the prediction")
    other_gpu = dataclasses.replace(seen, gpu="NVIDIA H100")
    assert planned_again(second, H200, [other_gpu]) is second
    other_model = only(tmp_path, "fixed.checkpoint=auto", "model=7b", "fixed.memory=139GiB")
    assert planned_again(other_model, H200, [seen]) is other_model


def test_a_new_run_and_a_training_run_plan_with_what_other_runs_of_this_machine_showed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = TEXT.replace("model: 1b", "model: tiny").replace("64k", "1k").replace("bf16, memory: 40GiB", "fp32")
    path = tmp_path / "question.yaml"
    path.write_text(text, encoding="utf-8")
    training = tmp_path / "run.yaml"
    training.write_text("model: tiny\nseq_len: 1k\nsteps: 2\ndtype: fp32\n", encoding="utf-8")
    asked = load_training(training).config.settings

    def planned() -> list[str]:
        assert main(["plan", str(path), "--json"]) == 0
        [row] = json.loads(capsys.readouterr().out)
        _, forecast = planned_for(asked, LAPTOP, None)
        assert forecast is not None
        return [row["checkpoint_plan"], forecast.words]

    assert not any("times" in words for words in planned())
    here = only(tmp_path, text=text, machine=LAPTOP)
    lost = Record(
        trial_id=here.id, experiment="another", title="", settings=here.settings, system="", status="oom",
        reason="out of memory", gpu="cpu", plan=here.plan,
    )  # fmt: skip
    write_record(tmp_path / "results" / "runs" / "another" / "trials" / here.id, lost)
    bad = tmp_path / "results" / "runs" / "bad" / "trials" / here.id
    bad.mkdir(parents=True)
    (bad / "record.json").write_text('{"added_seconds"', encoding="utf-8")
    assert records_with_plan() == [lost]
    for words in planned():
        assert f" times ({here.id}: out of memory, with " in words
    assert main(["plan", str(path), "--hardware", "h200", "--json"]) == 0
    assert "times" not in json.loads(capsys.readouterr().out)[0]["checkpoint_plan"]


def test_out_of_memory_corrects_more_each_time(tmp_path: Path) -> None:
    trial, factors = only(tmp_path), []
    records: list[Record] = []
    for number in range(3):
        assert trial.plan is not None
        lost = Record(
            trial_id=f"{trial.id}-{number}", experiment="question", title="", settings=trial.settings, system="",
            status="oom", reason="out of memory", gpu=H200.gpu_name, plan=trial.plan,
        )  # fmt: skip
        records.append(lost)
        trial = planned_again(trial, H200, records)
        factors.append(correction_of(trial.settings, H200.gpu_name, records).factor)
    assert factors[0] >= 1.1
    assert factors[1] >= 1.1 * factors[0]
    assert factors[2] >= 1.1 * factors[1]
    assert outcome_in_words(records[0]).startswith("out of memory, with ")


def test_a_record_keeps_the_plan_and_rows_show_it(tmp_path: Path) -> None:
    record = ran(only(tmp_path), 1.02)
    write_record(tmp_path / "trial", record)
    again = read_record(tmp_path / "trial" / "record.json")
    assert again == record
    row = row_of(again)
    assert row["checkpoint.host_layers"] == again.settings.checkpoint.host_layers > 0
    assert "layers whole" in row["checkpoint_plan"]
    assert row["predicted_peak_gib"] < row["predicted_reserved_gib"] <= 40
    assert row["predicted_step_seconds"] > 2
    assert row["plan_outcome"].endswith("2.0% above the prediction")
    assert "checkpoint_plan" not in row_of(dataclasses.replace(again, plan=None))


def test_series_are_named_by_the_plan_and_not_by_what_it_chose(tmp_path: Path) -> None:
    planned = [ran(trial, 1.0) for trial in trials(tmp_path, "sweep.seq_len=[64k, 128k, 256k]", "fixed.memory=80GiB")]
    rows = [row_of(record) for record in planned]
    assert varying_settings(rows) == []
    assert len({row["checkpoint.host_layers"] for row in rows}) > 1
    [(name, members)] = series_of(rows)
    assert (name, len(members)) == ("burst", 3)
    by_hand = dataclasses.replace(
        planned[0], settings=only(tmp_path, "fixed.checkpoint.every=1", "fixed.memory=80GiB").settings, plan=None
    )
    names = [name for name, _ in series_of([*rows, row_of(by_hand)])]
    assert names == ["burst, plan auto", "burst, plan hand"]


def test_a_training_file_plans_unless_it_says_otherwise(tmp_path: Path) -> None:
    def planned(text: str) -> TrialSettings:
        path = tmp_path / "run.yaml"
        path.write_text(f"model: tiny\nseq_len: 256\nsteps: 2\n{text}\n", encoding="utf-8")
        return load_training(path).config.settings

    assert planned("").planned.split() == list(PLANNABLE)
    assert planned("checkpoint: auto") == planned("")
    kept = planned("checkpoint: {plan: auto, tail: 0.5}\nmlp_tiles: 2")
    assert set(PLANNABLE) - set(kept.planned.split()) == {"checkpoint.tail", "mlp_tiles"}
    assert planned("checkpoint: {every: 2}").planned == ""
    with pytest.raises(UsageError, match="checkpoint is"):
        planned("checkpoint: automatic")
    with pytest.raises(UsageError, match="unknown key planned"):
        planned("planned: mlp_tiles")


def test_a_resumed_run_plans_with_what_its_earlier_starts_took(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: 1b\nseq_len: 64k\nsteps: 2\nmemory: 40GiB\n", encoding="utf-8")
    config = load_training(path).config
    settings, forecast = planned_for(config.settings, H200, None)
    assert forecast is not None
    attempt = tmp_path / "run" / "attempts" / "1"
    (attempt / "errors").mkdir(parents=True)
    order = {
        "config": to_json(dataclasses.replace(config, settings=settings)), "method": "engine.burst", "resume": False,
        "model_flops_per_step": 1.0, "peak_tflops": None, "plan": to_json(forecast),
    }  # fmt: skip
    write_json(attempt / "order.json", order)
    assert planned_for(config.settings, H200, tmp_path / "run")[1] == forecast
    write_json(attempt / "errors" / "rank0.json", {"kind": "oom", "reason": "", "traceback": ""})
    _, after = planned_for(config.settings, H200, tmp_path / "run")
    assert after is not None
    assert after.correction >= 1.1
    assert "start 1 of this run: out of memory" in after.words
    (attempt / "errors" / "rank0.json").write_text("{", encoding="utf-8")
    (tmp_path / "run" / "metrics.jsonl").write_text(
        json.dumps({"kind": "step", "step": 1, "loss": 1, "peak_memory_gib": 2 * forecast.allocated_bytes / GIB})
        + "\n",
        encoding="utf-8",
    )
    _, after = planned_for(config.settings, H200, tmp_path / "run")
    assert after is not None
    assert after.correction == pytest.approx(2)
    for damaged in (attempt / "order.json", tmp_path / "run" / "metrics.jsonl"):
        damaged.write_text("[1", encoding="utf-8")
    assert planned_for(config.settings, H200, tmp_path / "run")[1] == forecast


@pytest.mark.parametrize(
    ("model", "cp_size", "memory", "given"),
    [
        ("1b", 1, "12GiB", ()),
        ("tiny_hybrid", 2, "1GiB", ()),
        ("qwen3_8b", 4, "24GiB", ()),
        # Fits with a tail of a tenth alone, which has fewer slots to receive into.
        ("qwen3_8b", 4, "25084MiB", ("gradient_offload",)),
    ],
)
def test_what_fits_at_all_is_what_the_search_for_the_fastest_plan_finds_fitting(
    model: str, cp_size: int, memory: str, given: tuple[str, ...]
) -> None:
    asked = TrialSettings(
        task="train", method="burst", model=named_model(model), seq_len=96 << 10, cp_size=cp_size, memory=memory,
        checkpoint=Checkpoint(plan="auto"),
    )  # fmt: skip
    asked, hardware, found, tails = left_open(asked, given), hardware_named("h200"), [], []
    edge = longest(asked, hardware)
    assert edge is not None
    for seq_len in (edge.seq_len, edge.seq_len + 1024 * cp_size):
        tried = dataclasses.replace(asked, seq_len=seq_len)
        chosen, plan = with_plan(tried, machine_of(hardware), hardware=hardware)
        assert plan is not None
        assert plan_fits(tried, machine_of(hardware), hardware) is plan.fits
        found.append(plan.fits)
        tails.append(chosen.checkpoint.tail)
    assert found == [True, False]
    assert not given or tails[0] == 0.1
