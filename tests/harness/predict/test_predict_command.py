"""`burst plan --phases`, `--longest`, `--frontier` and `burst setup calibrate` as a user calls them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from engine.settings import Checkpoint, TrialSettings
from engine.tasks.products import matrix_products
from harness.cli import main
from harness.metrics.hardware import hardware_named, load_hardware, speeds_of
from harness.plan.forecast import START_SECONDS, cost_of, forecast, held_out_width, longest
from harness.predict.calibration import Calibrated, Figure, hardware_document
from harness.records.record import write_record
from harness.spec.models import named_model
from tests.harness.synthetic_records import record
from tests.slow import slow


def predicted(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["plan", "--phases", "--hardware", "a800", "--json", *words]) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return rows


def test_methods_differ_where_their_schedules_do(capsys: pytest.CaptureFixture[str]) -> None:
    methods = "burst,megatron_cp,ulysses,loongtrain_double_ring,loongtrain_usp"
    rows = predicted(capsys, "--method", methods, "--seq-len", "256k", "--cp-size", "32", "--model", "7b")
    seconds = {row["method"]: row["seconds"] for row in rows}
    assert len(set(seconds.values())) == 5, seconds
    assert seconds["megatron_cp"] > 2 * seconds["loongtrain_double_ring"]  # every hop waits for the link between nodes
    for row in rows:
        low, high = row["interval"]
        assert low < row["seconds"] < high
        assert sum(row["phases"].values()) == pytest.approx(row["seconds"])
        assert row["bottleneck"] in row["phases"]
        assert row["schedule"] in row["schedule_reason"]


def test_gradients_take_the_width_that_the_method_states_or_the_setting_gives(capsys):
    words = ["--method", "megatron_cp", "--seq-len", "256k", "--cp-size", "16", "--model", "7b"]
    [own] = predicted(capsys, *words)
    [same] = predicted(capsys, *words, "--set", "grad_comm_dtype=input")
    [wide] = predicted(capsys, *words, "--set", "grad_comm_dtype=fp32")
    assert own["seconds"] == same["seconds"] < wide["seconds"]


def test_memory_is_predicted_of_the_engines_own_methods_alone(capsys: pytest.CaptureFixture[str]) -> None:
    own, foreign = predicted(capsys, "--method", "burst,torchtitan_upstream", "--seq-len", "64k")
    assert own["gpu_gib"] is not None
    assert foreign["gpu_gib"] is foreign["seconds"] is foreign["fits"] is None
    assert "torchtitan_upstream" in foreign["reason"]


def test_memory_of_the_published_systems_stands_beside_the_engines_where_it_was_fitted(capsys):
    words = ("--model", "14b", "--seq-len", "1M", "--cp-size", "32", "--set", "checkpoint.every=1")
    rows = predicted(capsys, *words, "--method", "burst,megatron_cp,loongtrain_usp")
    burst, megatron, loongtrain = (float(str(row["system_gib"])) for row in rows)
    assert burst == pytest.approx(loongtrain, rel=0.2)
    assert megatron > 80  # all parameters and gradients on every rank
    assert burst > float(str(rows[0]["gpu_gib"]))  # operators of torch's own, and layers that wait
    assert main(["plan", "--phases", "--hardware", "h200", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["system_gib"] is None


def test_lists_settings_and_refusals_are_taken_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    rows = predicted(capsys, "--seq-len", "64k,128k", "--cp-size", "2,4", "--set", "checkpoint.tail=0.5")
    assert [(row["seq_len"], row["cp_size"]) for row in rows] == [
        (65536, 2), (65536, 4), (131072, 2), (131072, 4),
    ]  # fmt: skip
    kept = predicted(capsys, "--seq-len", "64k", "--cp-size", "2", "--set", "checkpoint.tail=1")
    assert kept[0]["seconds"] < rows[0]["seconds"]
    [refused] = predicted(capsys, "--model", "14b", "--method", "ulysses", "--cp-size", "16")
    assert refused["seconds"] is None
    assert "40 heads" in str(refused["reason"])


def test_a_setting_is_written_as_in_an_experiment_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "tiny", "--cp-size", "2", "--set", "learning_rate=1e-5", "--set", "seq_len=64k")
    [row] = predicted(capsys, *words)
    assert row["seq_len"] == 65536
    rows = predicted(capsys, "--model", "tiny", "--set", "fixed.seq_len=64k", "--set", "sweep.cp_size=[1, 2]")
    assert [(row["seq_len"], row["cp_size"]) for row in rows] == [(65536, 1), (65536, 2)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--set", "mlp_tiles=on"], "YAML reads the bare word on as a truth value"),
        (["--set", "chekpoint.tail=1"], "did you mean checkpoint.tail?"),
        (["--set", "checkpoint.tali=1"], "did you mean checkpoint.tail?"),
        (["--set", "tail"], "this is not path=value; write for example --set seq_len=64k"),
        (["--set", "sweep.seq_len=[]"], "sweep.seq_len is an empty list"),
        (["--set", "checkpoint.tail=2"], "expected a fraction from 0"),
        (["--model", "8bb"], "unknown model 8bb"),
        (["--method", "busrt"], "did you mean burst?"),
        (["--cp-size", "0"], "--gpus 0: cp_size is 0; give a number of at least 1"),
        (["--gpus", "two"], "--gpus two: cp_size is 'two'; expected a whole number"),
        (["--seq-len", ","], "--seq-len names nothing"),
        (["--seq-len", "many"], "'many' is not a length"),
        (["--gpus-per-node", "0"], "--gpus-per-node is 0"),
        (["--cp-size", ",".join(["1"] * 1001)], "more than 1000 combinations"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(words, sentence, capsys):
    assert main(["plan", "--phases", "--hardware", "a800", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_what_is_computed_again_is_planned_for_the_gpus_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "1b", "--seq-len", "32k", "--cp-size", "1"]
    [unplanned] = predicted(capsys, *words, "--set", "checkpoint.every=1")
    [whole] = predicted(capsys, *words)
    assert whole == predicted(capsys, *words, "--set", "checkpoint=auto")[0]  # the default
    [tight] = predicted(capsys, *words, "--set", "memory=24GiB")
    assert whole["seconds"] < tight["seconds"]
    assert whole["seconds"] < unplanned["seconds"]
    assert tight["gpu_gib"] < 24 < whole["gpu_gib"]
    assert "GiB of the host (assumed; host_memory sets it)" in str(tight["plan"])
    assert "plan" not in unplanned
    [long] = predicted(capsys, "--model", "1b", "--longest", "--set", "optimizer_offload=false")
    [plain] = predicted(capsys, "--model", "1b", "--longest", "--set", "checkpoint.every=1")
    assert long["seq_len"] > plain["seq_len"]


# (hardware, model, settings as `--set` gives them), each asked at all lengths, numbers of GPUs and methods below.
QUESTIONS = [
    ("a800", "7b", ["settings=as_published"]),
    ("h200", "1b", ["memory=40GiB", "optimizer_offload=true"]),
    *slow(
        ("h200", "llama3_8b", []),
        ("h100", "14b", []),
        ("h100", "llama3_8b", ["checkpoint.tail=0.5", "schedule=double_ring", "deterministic=true"]),
        ("a100", "13b", ["settings=tuned", "kernel=fa2"]),
    ),
]


@pytest.mark.parametrize(("hardware", "model", "changes"), QUESTIONS)
def test_plan_gives_one_answer_by_file_by_options_and_in_detail(hardware, model, changes, tmp_path, capsys):
    """Settings, seconds, GiB and whether it fits, of 18 trials each: on one GPU, on a node and on several."""
    lengths, gpus, methods = "32k,1M", "1,8,16", "burst,megatron_cp,loongtrain_usp"
    path = tmp_path / "question.yaml"
    fixed = {name: yaml.safe_load(text) for name, text in (change.split("=") for change in changes)}
    sweep = {"method": methods.split(","), "seq_len": lengths.split(","), "cp_size": [*map(int, gpus.split(","))]}
    asked = {"task": "train", "model": model, "sweep": sweep, "fixed": fixed | {"dtype": "bf16"}}
    path.write_text(yaml.safe_dump(asked), encoding="utf-8")
    sets = [word for change in changes for word in ("--set", change)]
    words = ["--model", model, "--seq-len", lengths, "--gpus", gpus, "--method", methods, *sets]
    answers = []
    for command in (["plan", str(path)], ["plan", *words], ["plan", "--phases", *words]):
        assert main([*command, "--hardware", hardware, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        names = ("predicted_seconds", "predicted_gpu_gib", "predicted_to_fit", "checkpoint_plan")
        if "--phases" in command:
            names = ("seconds", "gpu_gib", "fits", "plan")
        answers.append({row["trial_id"]: [row.get(name) for name in names] for row in rows})
    by_file, by_options, predicted_rows = answers
    assert len(by_file) == 18
    assert by_file == by_options == predicted_rows
    assert {fits for _, _, fits, _ in by_file.values()} >= {True}


def test_a_first_run_is_answered_by_what_the_planner_would_choose_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    for gpu, model, length, gpus, gib in (("h200", "llama3_8b", "128k", "1", 132.9), ("h100", "14b", "1M", "8", 74.1)):
        assert (
            main(
                ["plan", "--phases", "--hardware", gpu, "--model", model, "--seq-len", length, "--gpus", gpus, "--json"]
            )
            == 0
        )
        [row] = json.loads(capsys.readouterr().out)
        assert (row["fits"], row["gpu_gib"]) == (True, pytest.approx(gib, rel=0.01))


def test_settings_as_published_are_filled_from_the_table_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "7b", "--seq-len", "1M", "--gpus", "32", "--method", "loongtrain_usp"]
    [equal] = predicted(capsys, *words)
    [published] = predicted(capsys, *words, "--set", "settings=as_published")
    [by_hand] = predicted(capsys, *words, "--set", "settings=as_published", "--set", "checkpoint.tail=1")
    assert published["seconds"] > by_hand["seconds"] > equal["seconds"]
    assert {"checkpoint.tail", "lm_head_fusion", "optimizer_offload"} <= set(published["from_table"])
    assert "checkpoint.tail" not in by_hand["from_table"]
    assert "plan" not in published  # its checkpointing is the table's
    for detail in ([], ["--phases"]):
        assert main(["plan", *detail, "--hardware", "a800", *words, "--set", "settings=as_published"]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "as_published of loongtrain_usp, from baselines/settings.yaml:" in printed
        assert "checkpoint.tail 0" in printed


def test_the_table_prints_phases_and_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--phases", "--hardware", "h200", "--seq-len", "256k", "--cp-size", "16"]) == 0
    printed = capsys.readouterr().out
    assert "attention backward" in printed
    assert "memory, backward of the first layer" in printed
    assert printed.count("the fullest") == 1
    assert "nine of ten" in printed


def test_the_longest_sequence_fits_and_the_next_longer_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    settings = TrialSettings(task="train", method="burst", model=named_model("7b"), seq_len=1024, cp_size=8)
    hardware = hardware_named("a800")
    found = longest(settings, hardware)
    assert found is not None
    assert forecast(found, hardware).fits is True
    longer = TrialSettings(
        task="train", method="burst", model=settings.model, seq_len=found.seq_len + 1024 * 8, cp_size=8
    )
    assert forecast(longer, hardware).fits is False
    [row] = predicted(capsys, "--model", "7b", "--cp-size", "8", "--longest", "--set", "checkpoint.every=1")
    assert row["seq_len"] == found.seq_len
    assert row["fits"] is True
    assert main(["plan", "--phases", "--hardware", "a800", "--model", "70b", "--cp-size", "1", "--longest"]) == 2
    assert "burst with 70b and cp_size 1 on NVIDIA A800 80 GB: no sequence fits 80 GiB;" in capsys.readouterr().err


def test_the_longest_sequence_keeps_to_a_budget_and_to_the_planners_word(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "1b", "--cp-size", "1", "--longest", "--set", "memory=24GiB")
    [by_hand] = predicted(capsys, *words, "--set", "checkpoint.every=1")
    [planned] = predicted(capsys, *words)
    for row in (by_hand, planned):
        assert row["fits"] is True
        assert 0.9 * 24 < 1.04 * float(str(row["gpu_gib"])) <= 24
    assert int(str(planned["seq_len"])) > int(str(by_hand["seq_len"]))
    assert "nothing fits" not in str(planned["plan"])
    next_longer = ("--model", "1b", "--cp-size", "1", "--set", "memory=24GiB", "--seq-len")
    [longer] = predicted(capsys, *next_longer, str(int(str(planned["seq_len"])) + 1024))
    assert "nothing fits" in str(longer["plan"])
    [wide] = predicted(capsys, *words[:-1], "memory=1TiB", "--set", "checkpoint.every=1")
    assert int(str(wide["seq_len"])) > int(str(by_hand["seq_len"]))


def test_a_combination_without_a_longest_sequence_is_a_row_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "70b", "--cp-size", "1,64", "--longest", "--method", "burst,torchtitan_upstream")
    rows = predicted(capsys, *words)
    assert [row["seq_len"] is None for row in rows] == [True, False, True, True]
    assert "no sequence fits" in str(rows[0]["reason"])
    assert "no memory is predicted of method torchtitan_upstream" in str(rows[2]["reason"])
    assert main(["plan", "--phases", "--hardware", "a800", *words]) == 0
    assert "no sequence fits" in capsys.readouterr().out
    assert main(["plan", "--phases", "--hardware", "a800", "--longest", "--task", "attention"]) == 2
    assert "no memory is predicted of task attention" in capsys.readouterr().err


def test_the_frontier_is_the_plan_of_each_budget_down_to_the_least_that_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("plan", "--hardware", "h200", "--model", "1b", "--seq-len", "32k", "--gpus", "1")
    assert main([*words, "--frontier", "--set", "sweep.memory=[40GiB, 24GiB]", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    budgets = [row["budget_gib"] for row in rows]
    assert budgets[:4] == [40, 30, 20, 15]
    assert budgets[4:] == sorted(budgets[4:], reverse=True)
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]
    for row in rows:
        assert row["gpu_gib"] <= row["budget_gib"]
    alone = [*words, "--phases", "--json", "--set"]
    for budget, fits in ((budgets[-1], True), (budgets[-1] - 1, False)):
        assert main([*alone, f"memory={budget:g}GiB"]) == 0
        [row] = json.loads(capsys.readouterr().out)
        assert row["fits"] is fits
        assert not fits or (row["seconds"], row["gpu_gib"]) == (rows[-1]["seconds"], rows[-1]["gpu_gib"])
    assert main([*words, "--frontier", "--set", "memory=26GiB"]) == 0
    printed = capsys.readouterr().out
    assert "█" in printed
    assert "(1) all 16 layers whole" in printed
    assert " of them on the host" in printed
    assert main([*words, "--frontier"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ *[\d.]+ to 139 ", printed, re.MULTILINE)  # budgets of the same plan are one row
    assert printed.endswith("The last row's budget is the least in whole GiB.\n")


def test_a_frontier_says_how_many_budgets_are_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_SECONDS", "AGAIN_SECONDS"):
        monkeypatch.setattr(f"cluster.files.progress.{name}", 0.001)
    # A length of its own: plans of other tests are kept, and would take no time.
    assert main(["plan", "--hardware", "h200", "--model", "1b", "--seq-len", "40k", "--gpus", "1", "--frontier"]) == 0
    assert "planning 1 trial under less and less memory: 2 budgets\n" in capsys.readouterr().err


def test_a_frontier_and_the_longest_sequence_keep_to_the_host_memory_that_is_allowed(capsys) -> None:
    words = ("plan", "--hardware", "h200", "--model", "1b", "--gpus", "1", "--json", "--set", "host_memory=4GiB")
    assert main([*words, "--frontier", "--seq-len", "64k", "--set", "memory=40GiB"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) > 2
    assert all(row["host_gib"] <= 4 and row["gpu_gib"] <= row["budget_gib"] for row in rows)
    by_hand = ("--set", "checkpoint.offload=all", "--set", "checkpoint.every=1")
    assert main([*words, "--longest", *by_hand]) == 0
    [longest_found] = json.loads(capsys.readouterr().out)
    for more, runs in ((0, True), (1024, False)):
        assert main([*words, *by_hand, "--seq-len", str(longest_found["seq_len"] + more)]) in (0, 2)
        [row] = json.loads(capsys.readouterr().out)
        assert row["can_run"] is runs


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            [
                "--frontier",
                "--hardware",
                "h200",
                "--model",
                "1b",
                "--gpus",
                "1",
                "--seq-len",
                "128k",
                "--set",
                "memory=17GiB",
                "--set",
                "host_memory=4GiB",
            ],
            "needs more of a host than 4GiB beside 17 GiB of a GPU (memory); give a larger host_memory, memory, --gpus",
        ),
        (["--frontier"], "--frontier is a prediction for a kind of GPU"),
        (["--frontier", "--hardware", "h200", "--longest"], "give it without --phases and --longest"),
        (
            ["--frontier", "--hardware", "h200", "--set", "checkpoint.plan=hand"],
            "ask for training with a method of this project, and checkpoint.plan auto",
        ),
        (["--frontier", "--hardware", "h200", "--method", "trl_upstream"], "method trl_upstream"),
        (
            ["--frontier", "--hardware", "h200", "--model", "70b", "--gpus", "1"],
            "GiB of a GPU, found 139 (NVIDIA H200 SXM 141 GB); give a larger --gpus or a smaller --seq-len",
        ),
        (
            ["--frontier", "--hardware", "h200", "--model", "1b", "--set", "memory=1GiB"],
            "GiB of a GPU, found 1 (memory); give a larger memory, --gpus or a smaller --seq-len",
        ),
        (
            ["--frontier", "--hardware", "h200", "--model", "1b", "--seq-len", "100", "--gpus", "3"],
            "seq_len 100 does not split into 2 x cp_size = 6 equal zigzag chunks",
        ),
        (
            [
                *("--frontier", "--hardware", "h200", "--model", "llama3_8b", "--seq-len", "128k", "--gpus", "64"),
                *("--method", "ulysses", "--set", "memory=2GiB"),
            ],
            "ulysses needs",
        ),
        (
            ["--longest", "--hardware", "h200", "--model", "1b", "--set", "memory=1GiB"],
            "no sequence fits 1 GiB; give a larger --cp-size or memory",
        ),
    ],
)
def test_a_frontier_that_cannot_be_is_one_sentence(words, sentence, capsys):
    assert main(["plan", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "gpus", "tokens"), [("1b", 2, 1), ("1b", 4, 1), ("1b", 4, 2), ("1b", 4, 3), ("7b_artifact", 16, 5)]
)
@pytest.mark.parametrize("option", [[], ["--frontier"]])
def test_fewer_tokens_than_gpus_are_refused_in_one_sentence(model, gpus, tokens, option, capsys):
    words = ["--hardware", "h200", "--model", model, "--gpus", str(gpus), "--seq-len", str(tokens)]
    assert main(["plan", *words, *option]) == 2
    sentence = f"seq_len {tokens} does not split into cp_size = {gpus} equal contiguous chunks; the nearest lengths"
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "levers",
    [(), ("checkpoint.every=0",), ("checkpoint.whole_layers=3", "checkpoint.every=4"), ("optimizer_offload=true",)],
)
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_fullest_moment_is_the_memory_of_a_trial(levers, ranks, capsys):
    words = ["--model", "1b", "--seq-len", "128k", "--cp-size", str(ranks)]
    [row] = predicted(capsys, *words, *(word for lever in levers for word in ("--set", lever)))
    moments = row["gib_by_moment"]
    assert max(moments.values()) == pytest.approx(row["gpu_gib"], rel=1e-12)
    assert {"LM head", "backward of the last layer", "backward of the first layer", "optimizer"} <= moments.keys()
    assert min(moments.values()) > 0


def test_the_interval_is_that_of_the_held_out_rows_and_a_plan_costs_what_its_trials_take() -> None:
    assert 1.01 < held_out_width(True) < 1.5
    settings = TrialSettings(task="train", method="burst", model=named_model("7b"), seq_len=1 << 18, cp_size=8)
    hardware = hardware_named("a800")
    one = forecast(settings, hardware)
    assert one.time is not None
    cost = cost_of([settings, settings], hardware, rounds=3)
    steps = settings.steps.warmup + settings.steps.measured
    assert cost.seconds == pytest.approx(6 * (START_SECONDS + steps * one.time.seconds))
    assert cost.gpu_hours == pytest.approx(8 * cost.seconds / 3600)
    short = forecast(replace(settings, seq_len=1 << 15), hardware)
    assert short.time is not None
    warmed = replace(settings, steps=replace(settings.steps, warmup=2, measured=3, warmup_seq_len=1 << 15))
    taken = START_SECONDS + 2 * short.time.seconds + 3 * one.time.seconds
    assert cost_of([warmed], hardware).seconds == pytest.approx(taken)
    linear = replace(warmed, model=named_model("hybrid_1b"))  # one of whose 16 layers runs at full length as well
    times = [forecast(replace(linear, seq_len=seq_len), hardware).time for seq_len in (1 << 15, 1 << 18)]
    short_seconds, seconds = [time.seconds for time in times if time is not None]
    taken = START_SECONDS + 2 * short_seconds + (3 + 1 / 16) * seconds
    assert cost_of([linear], hardware).seconds == pytest.approx(taken)


def test_nothing_hides_copies_back_to_groups_of_heads() -> None:
    """In backward each layer's input and output are waited for; with all heads at once products hide both ways."""
    kept = Checkpoint(every=1, tail=1, offload="all", whole_layers=4)
    settings = TrialSettings(task="train", method="burst", model=named_model("1b"), seq_len=1 << 19, checkpoint=kept)
    hardware = hardware_named("h200")
    found = [forecast(replace(settings, head_groups=groups), hardware).time for groups in (1, 8)]
    assert all(time is not None for time in found)
    seconds = [dict(time.phases).get("host copies", 0.0) for time in found if time is not None]
    tensors = 12 * 2 * 2 * (1 << 19) * 2048  # of twelve layers two, two bytes an element
    assert seconds == pytest.approx([0, tensors / (speeds_of(hardware).host_gib * 2**30)], rel=1e-12)


def test_this_machine_is_measured_and_the_file_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.yaml"
    assert main(["setup", "calibrate", "--out", str(path), "--ranks", "2", "--model", "tiny"]) == 0
    assert "link inside" in capsys.readouterr().out
    hardware = load_hardware(path)
    measured = yaml.safe_load(path.read_text())["measured"]
    assert measured["gemm_tflops"]["what"].startswith("products of tiny")
    assert "forward and both gradients" not in measured["gemm_tflops"]["what"] + measured["speeds"]["what"]
    shapes = {name for name in hardware.figures if name.startswith("gemm tiny ")}
    assert shapes == {f"gemm tiny {each.name}" for each in matrix_products(named_model("tiny"))}
    assert " us (" in hardware.figures["latency inside"]
    assert "across_gib" not in hardware.speeds
    assert "128 tokens" not in measured["kernel_ceilings"]["what"]  # of the longest tile alone
    assert measured["kernel_tiles"]["what"].startswith("128 tokens")
    assert {"gemm_tflops", "memory_gib", "inside_gib", "attention_forward_tflops"} <= hardware.speeds.keys()
    assert hardware.spread
    assert hardware.kernel_tiles["cpu"].tokens == (128, 256)
    assert speeds_of(hardware, "cpu").tiles == hardware.kernel_tiles["cpu"]
    assert any(name.startswith("attention cpu backward") for name in hardware.figures)
    before = path.read_bytes()
    assert main(["setup", "calibrate", "--out", str(path)]) == 2
    assert "exists; give --out another name" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert (
        main(["plan", "--phases", "--hardware", str(path), "--model", "tiny", "--seq-len", "4k", "--cp-size", "2"]) == 0
    )
    assert yaml.safe_load(before)["sources"]["speeds"].startswith("measured")


SPEED = Figure(median=700.0, least=690.0, largest=710.0, samples=5, unit="TFLOP/s", what="products of 1b")


def test_a_calibration_takes_the_link_between_nodes_from_the_trials_of_a_run(tmp_path, monkeypatch, capsys):
    found = Calibrated(device="Other GPU", ranks=1, torch="2.13", figures={"gemm 1b": SPEED})
    monkeypatch.setattr("harness.predict.calibration.measure", lambda *_, **__: found)
    path, run = tmp_path / "here.yaml", tmp_path / "over_nodes"
    for number, (link, latency) in enumerate(((4.0, 2e-5), (6.0, 4e-5))):
        one = record(method="burst", cp_size=2, seq_len=1024 + number)
        assert one.measurement is not None
        one.measurement.extra |= {
            "link_gib_per_second": {"before": link - 1, "between": link, "after": link + 1},
            "across_gib_per_second": link + 1, "link_latency_seconds": latency,
        }  # fmt: skip
        write_record(run / "trials" / one.trial_id, one)
    assert (
        main(["setup", "calibrate", "--out", str(path), "--ranks", "1", "--model", "tiny", "--across", str(run)]) == 0
    )
    hardware = load_hardware(path)
    assert hardware.speeds["across_gib"] == pytest.approx(5)
    assert hardware.spread["across_gib"] == pytest.approx((7 - 3) / 5)
    assert hardware.figures["link across"].startswith("5 GiB/s (3 to 7, 6 samples)")
    assert hardware.figures["latency across"].startswith("30 us (20 to 40, 2 samples)")
    capsys.readouterr()
    for wrong, sentence in (
        (tmp_path / "nowhere", "found nothing there"),
        (tmp_path, "no trial there measured a link"),
    ):
        assert main(["setup", "calibrate", "--out", str(tmp_path / "other.yaml"), "--across", str(wrong)]) == 2
        assert sentence in capsys.readouterr().err
    (run / "trials" / one.trial_id / "record.json").write_text("{", encoding="utf-8")
    assert main(["setup", "calibrate", "--out", str(tmp_path / "other.yaml"), "--across", str(run)]) == 2
    assert "record.json is not a record" in capsys.readouterr().err
    assert not (tmp_path / "other.yaml").exists()


def test_what_a_calibration_does_not_measure_comes_from_the_shipped_file_of_that_gpu() -> None:
    found = Calibrated(device="NVIDIA H200", ranks=1, torch="2.13", figures={"gemm 1b": SPEED})
    document = hardware_document(found, memory_gib=139.0, gpus_per_node=1)
    shipped = hardware_named("h200")
    assert document["speeds"] == shipped.speeds | {"gemm_tflops": 700.0}
    assert document["spread"] == {"gemm_tflops": pytest.approx(20 / 700, rel=1e-3)}
    assert "across_gib" in document["sources"]["speeds"]
    assert "experiments/hardware/h200.yaml" in document["sources"]["speeds"]
    unknown = hardware_document(replace(found, device="Other GPU"), memory_gib=139.0, gpus_per_node=1)
    assert unknown["speeds"] == {"gemm_tflops": 700.0}


def test_a_calibration_that_fails_says_which_rank_and_leaves_no_file(tmp_path, capsys):
    path = tmp_path / "here.yaml"
    assert main(["setup", "calibrate", "--out", str(path), "--ranks", "1", "--timeout", "0.01"]) == 2
    assert "was not finished after 0.01 s" in capsys.readouterr().err
    assert not path.exists()
    assert main(["setup", "calibrate", "--out", str(path), "--ranks", "1000"]) == 2
    assert "--ranks is 1000" in capsys.readouterr().err


def test_both_names_of_one_option_are_not_given_together(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--gpus", "4", "--cp-size", "8"])
    assert ended.value.code == 2
    assert "--cp-size: not allowed with argument --gpus" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--gpus", "8", "--set", "mask=documents:100,28"), "2 documents hold 128 tokens and the sequence has 131072"),
        (("--gpus", "100000"), "100000 ranks are more than a plan takes"),
        (("--gpus", "4096"), "cp_size 4096 is more than a plan takes; choose at most 1024"),
    ],
)
def test_what_is_no_trial_has_a_reason_and_no_prediction(capsys, words, reason) -> None:
    asked = ("plan", "--hardware", "h200", "--model", "1b", "--seq-len", "128k", *words)
    assert main([*asked]) == 2
    told = capsys.readouterr()
    assert reason in told.out + told.err
    main([*asked, "--phases", "--json"])
    [row] = json.loads(capsys.readouterr().out)
    assert row["seconds"] is None
    assert reason in str(row)


@pytest.mark.parametrize("option", ["--model", "--method", "--seq-len", "--gpus"])
def test_an_option_that_is_given_empty_is_not_its_default(capsys, option: str) -> None:
    assert main(["plan", "--hardware", "h200", option, ""]) == 2
    assert f"{option} names nothing; give at least one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "override", "name"),
    [
        (("--gpus", "2"), "cp_size=4", "cp_size"),
        (("--cp-size", "2"), "fixed.cp_size=2", "cp_size"),
        (("--seq-len", "64k"), "sweep.seq_len=[1M]", "seq_len"),
        (("--task", "train"), "task=attention", "task"),
    ],
)
def test_what_an_option_and_an_override_both_give_is_refused(capsys, given, override: str, name: str) -> None:
    """One of them would be taken, and the plan be that of another trial than was asked for."""
    assert main(["plan", "--hardware", "h200", "--model", "1b", *given, "--set", override]) == 2
    told = capsys.readouterr().err
    assert f"--set {override} both give {name}; leave one of them out" in told
    assert main(["plan", "--hardware", "h200", "--model", "1b", "--seq-len", "64k", "--set", "cp_size=4"]) == 0
