"""The command line of `burst`: exit codes, sentences, and no traceback."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import main
from harness.commands import GROUPS, RENAMED, all_commands, command_names, verbs_of
from harness.commands.doctor import DoctorLine, examine, verdict
from harness.machine.this_machine import Machine

EXPERIMENT = """\
title: A small question
task: attention
model: tiny
sweep: {method: [burst, ulysses], cp_size: [1, 3]}
fixed: {seq_len: 256, dtype: fp32, mask: causal}
steps: {warmup: 0, measured: 1}
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("exp.yaml").write_text(EXPERIMENT)
    return "exp.yaml"


def test_every_command_module_is_found_by_its_name():
    assert {"run", "plan", "report", "doctor", "cluster", "status"} <= set(all_commands())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "missing.yaml"], "missing.yaml: no such experiment file; expected attention_masks, "),
        (["run", "quickstart"], "experiments/quickstart.yaml?"),
        (["plan", "--model", "tiny", "--gpus", "99"], "; add --hardware NAME to plan for GPUs, such as h100"),
        (["run", "exp.yaml", "--scale", "huge"], "unknown scale huge"),
        (["run", "exp.yaml", "--set", "sweep.seq_length=4"], "seq_len"),
        (["run", "exp.yaml", "--set", "sweep.method=[brust]"], "did you mean burst?"),
        (["run", "exp.yaml", "--set", "sweep.cp_size=[3]"], "none of the 2 trials can run"),
        (["plan", "exp.yaml", "--set", "sweep.cp_size=[3]"], "none of the 2 trials can run"),
        (["plan", "exp.yaml", "--hardware", "h20"], "hardware 'h20' has no file in"),
        (["plan", "exp.yaml", "--hardware", "My.MD"], "hardware 'My.MD' has no file in"),
        (["plan", "exp.yaml", "--hardware", ""], "--hardware names nothing; expected a100, a100_40gb"),
        (["plan", "exp.yaml", "--hardware", "H200", "--set", "fixed.world_size=999999"], "choose at most 65536"),
        (
            [
                "plan",
                "exp.yaml",
                "--set",
                "task=train",
                "--set",
                "model=llama3_8b",
                "--set",
                "fixed.seq_len=16M",
                "--set",
                "sweep.cp_size=[1]",
            ],
            "GiB of a host's memory, and there are",
        ),
        (["plan", "exp.yaml", "--hardware", "h200", "--nodes", "lab"], "all name the machine to plan for; give one"),
        (["run", "exp.yaml", "--resume"], "holds no run to resume"),
        (["run", "exp.yaml", "--out", "exp.yaml"], "is a file"),
        (["run", "exp.yaml", "--out", "exp.yaml/below"], "cannot be made (Not a directory)"),
        (["run", "exp.yaml", "--out", "x" * 300], "cannot be made (File name too long)"),
        (["run", "exp.yaml", "--out", "/proc/self/nowhere"], "cannot be made (No such file or directory)"),
        (["run", "exp.yaml", "--set", "fixed.seq_len=9999999999999G"], "seq_len is a number of more than 64 bits"),
        (
            ["run", "exp.yaml", "--set", "fixed.checkpoint=3"],
            "it has the settings checkpoint.every, checkpoint.tail, checkpoint.offload, "
            "checkpoint.replay, checkpoint.whole_layers, checkpoint.mlp, checkpoint.plan, checkpoint.upstream or "
            "checkpoint.host_layers",
        ),
        (["report", "."], "no record below"),
        (["report", ".", "--format", ","], "names no format"),
        (["status", "."], "is not the directory of a run (run.json: No such file or directory)"),
        (["status", "absent"], "absent does not exist; name one that"),
        (["compare", "absent"], "absent does not exist; name a run"),
        (["status", "--logs", "some-trial"], "holds no trials"),
        (["status", "--logs", ""], "holds no trials"),
        (["status", "--logs", "."], "holds no logs"),
    ],
)
def test_bad_input_gives_one_sentence_and_exit_code_2(experiment, capsys, arguments, expected):
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("burst: ")
    assert expected in message
    assert message.count("\n") == 1
    assert not Path("results").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "burst run: the following arguments are required: EXP.yaml"),
        (["run", "exp.yaml", "--launcher", "slurm"], "burst run: argument --launcher: invalid choice: 'slurm'"),
        (["run", "exp.yaml", "--hardware", "h200"], "burst run: --hardware h200 is not known; `burst run --help`"),
        (
            ["run", "exp.yaml", "--resme"],
            "burst run: --resme is not known (did you mean --resume?); `burst run --help`",
        ),
        (["run", "exp.yaml", "--steps", "3"], "burst run: --steps 3 is not known (what a file sets is given as --set "),
        (["train", "t.yaml", "--learning-rate=1"], "burst train: --learning-rate=1 is not known (what a file sets is "),
        (["plan", "exp.yaml", "more.yaml"], "burst plan: more.yaml is not known"),
    ],
)
def test_an_unknown_command_line_exits_with_2_and_one_sentence(arguments, said, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(said)
    assert message.endswith("--help` lists the arguments\n")
    assert message.count("\n") == 1


def test_burst_alone_prints_every_command_in_six_groups(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([])
    assert exit_info.value.code == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert sorted(name for group, _ in GROUPS for name in group) == command_names()
    assert len(lines) == len(GROUPS) == 6
    assert all(line.strip().startswith(", ".join(group)) for line, (group, _) in zip(lines, GROUPS, strict=True))
    assert max(map(len, [*lines, last])) < 100
    assert last.startswith("burst COMMAND --help")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("stauts", "burst: stauts is no command; did you mean status?"),
        ("unknown", "burst: unknown is no command; expected cluster, compare, conform"),
    ],
)
def test_an_unknown_command_is_told_its_neighbour(word, said, capsys):
    assert main([word]) == 2
    message = capsys.readouterr().err
    assert message.startswith(said)
    assert message.count("\n") == 1


def doctor_lines(gpu: str, found: bool, fa4: bool, cudnn: bool) -> list[DoctorLine]:
    kernels = {"fa4": fa4, "cudnn": cudnn, "cpu": True}
    return [
        DoctorLine(section="devices", name="cpu", ok=True, sentence="2 cores"),
        DoctorLine(section="devices", name="gpu", ok=found, sentence=gpu),
        *(DoctorLine(section="kernels", name=name, ok=ok, sentence=f"about {name}") for name, ok in kernels.items()),
    ]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (doctor_lines("none; trials run on the CPU", False, False, False), "burst plans here, .*kernel cpu.*no GPU"),
        (doctor_lines("driver 470 is too old", False, False, False), "cannot use the GPUs .*: driver 470 is too old"),
        (doctor_lines("2 x A100", True, False, True), "on 2 x A100, with kernel cudnn; about fa4"),
        (doctor_lines("1 x H200", True, True, True), "fastest kernel, fa4, on 1 x H200"),
    ],
)
def test_doctor_begins_with_a_verdict(lines, said):
    assert re.search(said, verdict(lines))


def test_doctor_prints_its_verdict_first(capsys):
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == verdict(examine())


def plan_rows(capsys, *words: str) -> list[dict]:
    """What `burst plan` with these words says of each trial."""
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_gives_every_trial_and_the_reason_of_those_that_cannot_run(experiment, capsys):
    assert main(["plan", experiment]) == 0
    printed = capsys.readouterr().out
    assert "4 trials, 2 can run on this machine" in printed
    assert "does not split into" in " ".join(printed.split())
    rows = plan_rows(capsys, experiment)
    assert [(row["method"], row["cp_size"], row["can_run"]) for row in rows] == [
        ("burst", 1, True),
        ("burst", 3, False),
        ("ulysses", 1, True),
        ("ulysses", 3, False),
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give an experiment file, or --model, --seq-len and --gpus"),
        (["64k", "--model", "7b", "--seq-len", "16k"], "there is no file 64k; lists have commas and no spaces, such"),
        (["FILE", "--model", "7b"], "have no meaning beside it; use --set, such as --set model=7b"),
        (["--model", "7b", "--scale", "smoke"], "--scale belongs to an experiment file; name one"),
        (["--model", "7b", "--gpus-per-node", "4"], "--gpus-per-node belongs to --hardware"),
        (["--model", "7b", "--hardware", "h200", "--gpus-per-node", "0"], "--gpus-per-node is 0"),
    ],
)
def test_a_plan_is_of_a_file_or_of_options_that_stand_for_one(experiment, capsys, words, sentence):
    assert main(["plan", *(experiment if word == "FILE" else word for word in words)]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_plan_predicts_time_and_memory_on_hardware_that_is_not_there(experiment, capsys):
    longer = ["--set", "sweep.cp_size=[8]", "--set", "fixed.dtype=bf16", "--set", "fixed.method=burst"]
    longer += ["--set", "fixed.checkpoint.every=1"]
    million = [*longer, "--set", "sweep.seq_len=[1M, 16M]", "--set", "model=llama3_8b", "--set", "task=train"]
    rows = plan_rows(capsys, experiment, "--hardware", "h200", *million)
    assert [row["can_run"] for row in rows] == [True, True]
    short, long = rows
    assert 200 < short["predicted_seconds"] < 230
    assert 256 * 0.93 < long["predicted_seconds"] / short["predicted_seconds"] < 256
    assert short["predicted_gpu_gib"] < 139 < long["predicted_gpu_gib"]
    assert main(["plan", experiment, "--hardware", "h200", *million]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 trials, 1 can run on GPUs of kind NVIDIA H200 SXM 141 GB" in printed
    assert "1 further trial would hold" in printed
    assert "GPU-hours" in printed
    assert (printed.count("too large?"), printed.count("yes")) == (1, 1)
    assert [row["predicted_to_fit"] for row in rows] == [True, False]


def test_a_plan_in_which_nothing_fits_says_so_once_and_what_would_help(capsys):
    words = ["--model", "1b", "--seq-len", "64k", "--gpus", "1", "--hardware", "h200", "--set", "memory=1GiB"]
    assert main(["plan", *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "None of them is predicted to fit, so no time is added up For 1 trial nothing fits that the planner may "
        "choose, where the setting memory leaves 1 GiB; take more GPUs, a shorter sequence or a larger setting memory"
    ) in printed
    assert "would hold" not in printed
    assert "No time is predicted" not in printed
    assert main(["plan", *words[:3], "64M", *words[4:8]]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert " of 139 GiB (the GPU's own)" in printed
    assert "e+0" not in printed


def test_what_several_gpus_have_to_be_told_is_named_where_nothing_else_fits(capsys):
    words = ["--model", "1b", "--seq-len", "128k", "--gpus", "2", "--hardware", "h200", "--set", "memory=9GiB"]
    told = "something fits with gradient_offload true, which is not chosen on several GPUs"
    [row] = plan_rows(capsys, *words)
    assert row["predicted_to_fit"] is False
    assert str(row["checkpoint_plan"]).endswith(f"; {told}")
    [asked] = plan_rows(capsys, *words, "--set", "gradient_offload=true")
    assert asked["predicted_to_fit"] is True
    for other in ("gradient_offload=false", "memory=5GiB"):  # as a user has decided; too little for these also
        [row] = plan_rows(capsys, *words, "--set", other)
        assert row["predicted_to_fit"] is False
        assert told not in str(row["checkpoint_plan"])
    assert main(["plan", *words, "--frontier"]) == 2
    assert "found 9 (memory); give gradient_offload true, a larger memory, --gpus or" in capsys.readouterr().err
    for decided, told in (([], True), (["--set", "gradient_offload=false"], False)):
        assert main(["plan", *words[:-1], "memory=12GiB", *decided, "--frontier"]) == 0
        footer = " ".join(capsys.readouterr().out.split()).partition("in whole GiB")[2]
        assert footer == (" without gradient_offload, which is not chosen on several GPUs." if told else ".")


def test_a_plan_of_which_nothing_can_run_gives_no_reason_of_its_own_for_a_time(capsys):
    words = ["--model", "llama3_8b", "--seq-len", "128k", "--gpus", "1", "--hardware", "h200"]
    assert main(["plan", *words, "--set", "host_memory=1GiB"]) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "None of them can run, so no time is added up" in printed
    assert "No time is predicted" not in printed


def test_what_does_not_fit_the_share_of_a_host_without_gpus_is_not_among_those_that_can_run(monkeypatch, capsys):
    host = Machine(hostname="laptop", device="cpu", cores=2, memory_gib=24)
    monkeypatch.setattr("harness.machine.this_machine.discover", lambda: host)
    words = ["--model", "1b,tiny", "--seq-len", "4k", "--gpus", "1"]
    assert [(row["can_run"], row["predicted_to_fit"]) for row in plan_rows(capsys, *words)] == [
        (True, False), (True, True),
    ]  # fmt: skip
    assert main(["plan", *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "nothing fits: 19.2 of 12 GiB (half of the host's)" in printed
    assert (printed.count("too large?"), printed.count("yes")) == (1, 1)
    assert "2 trials, 1 can run on this machine" in printed


def test_a_hardware_file_of_ones_own_is_what_a_plan_predicts_with(tmp_path, capsys):
    own = (
        "title: Own\ngpu_names: [{name}]\npeak_bf16_tflops: 989\nmemory_gib: 80\nspeeds: {{gemm_tflops: 1}}\n"
        "sources: {{peak_bf16_tflops: x, memory_gib: x, speeds: x}}\n"
    )
    path = tmp_path / "question.yaml"
    path.write_text("task: train\nmodel: 1b\nfixed: {method: burst, dtype: bf16, seq_len: 64k}\n", encoding="utf-8")
    for name in ("NVIDIA H200", "Another GPU"):  # also where a shipped file has the name
        file = tmp_path / "own.yaml"
        file.write_text(own.format(name=name), encoding="utf-8")
        [row] = plan_rows(capsys, str(path), "--hardware", str(file))
        assert row["predicted_seconds"] > 100
        assert row["gpu_room_gib"] == 80
        assert " of 80 GiB" in row["checkpoint_plan"]


def test_a_trial_that_its_budget_does_not_hold_is_not_among_those_that_can_run(tmp_path, capsys):
    path = tmp_path / "budgets.yaml"
    path.write_text(
        "task: train\nmodel: llama3_8b\nsweep: {memory: [24GiB, 40GiB, 80GiB]}\n"
        "fixed: {method: burst, dtype: bf16, seq_len: 64k, gradient_offload: false}\n",
        encoding="utf-8",
    )
    for options in ([], ["--set", "fixed.checkpoint={every: 1, offload: inputs}", "--set", "fixed.mlp_tiles=8"]):
        words = [str(path), "--hardware", "h200", "--set", "fixed.optimizer_offload=true", *options]
        assert [(row["predicted_to_fit"], row["gpu_room_gib"]) for row in plan_rows(capsys, *words)] == [
            (False, 24), (False, 40), (True, 80),
        ]  # fmt: skip
        assert main(["plan", *words]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "3 trials, 1 can run on" in printed
        assert ("1 further trial would hold 6" if options else "For 1 further trial nothing fits that") in printed
        assert "where the setting memory leaves 24 GiB;" in printed
        assert "where the setting memory leaves 40 GiB;" in printed
        assert "mlp_tiles checkpoint" not in printed  # the list of what was left open has no column


def test_a_planned_trial_whose_memory_is_not_predicted_is_not_called_too_large(tmp_path, capsys):
    path = tmp_path / "divided.yaml"
    path.write_text(
        "task: train\nmodel: 7b\n"
        "fixed: {method: megatron_tp, dtype: bf16, seq_len: 64k, tp_size: 4, world_size: 4, checkpoint: auto}\n",
        encoding="utf-8",
    )
    [row] = plan_rows(capsys, str(path), "--hardware", "h200")
    assert (row["can_run"], row["predicted_gpu_gib"], row["predicted_to_fit"]) == (True, None, None)
    assert main(["plan", str(path), "--hardware", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "1 trial, 1 can run on" in printed
    assert "would hold" not in printed


def test_what_is_unknown_is_no_column_and_null_in_json(experiment, capsys):
    assert main(["plan", experiment, "--hardware", "a100"]) == 0
    printed = capsys.readouterr().out
    assert "predicted_" not in printed
    assert "No time is predicted for any of them; predictions are for trials in bf16" in printed
    rows = plan_rows(capsys, experiment, "--hardware", "a100")
    assert {row["predicted_seconds"] for row in rows} == {None}


def test_help_and_plan_import_neither_torch_nor_ray_nor_matplotlib(experiment):
    script = (
        "import sys; from harness.cli import main; main(['plan', 'exp.yaml']);"
        "sys.exit(' '.join({'torch', 'ray', 'matplotlib', 'pandas'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_start_of_a_command_does_not_wait_for_numpy_nor_does_the_state_of_a_run():
    script = (
        "import sys, harness.run.state; from harness.commands import RENAMED, all_commands, verbs_of; all_commands();"
        "sys.exit(' '.join({'numpy', 'rich'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_imports_no_module_of_another():
    script = (
        "import sys; from harness.cli import main; main(['cluster', 'status', '--state', '/none']);"
        "sys.exit(' '.join(sorted(name for name in sys.modules if name.startswith('harness.commands.'))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "harness.commands.cluster"


def test_check_gets_its_arguments_as_they_were_typed(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["cluster", "check", "--help"])
    assert exit_info.value.code == 0
    assert "usage: burst cluster check" in capsys.readouterr().out


def test_status_of_a_damaged_description_says_how_to_mend_it(tmp_path, capsys):
    for text in ("[1]", "{}"):
        (tmp_path / "run.json").write_text(text)
        assert main(["status", str(tmp_path)]) == 2
        assert "run.json does not describe a run; run it again with --resume" in capsys.readouterr().err


def test_records_without_a_description_are_no_run_to_look_at_but_a_report_shows_them(tmp_path, capsys):
    (tmp_path / "trials" / "one").mkdir(parents=True)
    (tmp_path / "trials" / "one" / "record.json").write_text("{}")
    assert main(["status", str(tmp_path)]) == 2
    assert f"its records can be read: burst report {tmp_path} shows them" in capsys.readouterr().err


def test_logs_names_the_ranks_there_are(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    for name in ("rank10.log", "rank2.log", "rankless.log"):
        (tmp_path / "logs" / name).write_text(f"said by {name}\n")
    assert main(["status", "--logs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.index("said by rank2.log") < printed.index("said by rank10.log")
    assert "rankless" not in printed
    assert main(["status", "--logs", str(tmp_path), "--rank", "7"]) == 2
    assert "holds no log of rank 7; its ranks are 2, 10" in capsys.readouterr().err


def test_logs_says_when_a_rank_printed_nothing(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").touch()
    assert main(["status", "--logs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"==> {tmp_path}/logs/rank0.log <==", "(nothing printed)"]


def test_logs_of_an_unknown_trial_names_a_neighbour_or_a_few_of_many(tmp_path, capsys):
    for number in range(40):
        (tmp_path / "sweep" / "trials" / f"train-burst-s{number}").mkdir(parents=True)
    assert main(["status", str(tmp_path), "--logs", "train-brust-s7"]) == 2
    assert "did you mean train-burst-s7?" in capsys.readouterr().err
    assert main(["status", str(tmp_path), "--logs", "zzz"]) == 2
    message = capsys.readouterr().err
    assert "`burst status DIR` lists the trials of a run, such as train-burst-s0 or train-burst-s1\n" in message


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_earlier_name_of_a_command_does_what_todays_does_and_says_its_name(old, new, capsys):
    value = ["some"] if new.split()[-1].startswith("-") else []  # of the option that the words end with
    with pytest.raises(SystemExit) as end:
        main([old, *value, "--help"])
    said = capsys.readouterr()
    assert (end.value.code, said.err) == (0, f"burst {old} is now burst {new}\n")
    words = [word for word in new.split() if not word.startswith("-")]
    assert said.out.startswith(f"usage: burst {' '.join(words)} ")


def test_the_help_of_a_command_lists_its_verbs_and_a_file_of_such_a_name_has_a_path(tmp_path, monkeypatch, capsys):
    for command in all_commands():
        if verbs := verbs_of(command):
            with pytest.raises(SystemExit):
                main([command, "--help"])
            said = capsys.readouterr().out
            assert "a file of that name is ./VERB" in said
            assert [verb for verb in verbs if f"\n  {verb} " not in said] == []
    monkeypatch.chdir(tmp_path)
    Path("pack").mkdir()
    assert main(["verify", "./pack"]) == 2
    assert "pack" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # the verb, without the run that it packs
        main(["verify", "pack"])
    assert "burst verify pack: the following arguments are required: RUN" in capsys.readouterr().err


def test_a_command_of_verbs_alone_names_them_and_the_neighbour_of_an_unknown_one(capsys):
    for words, said in ([], "names no verb; expected nodes, check,"), (["staus", "--x"], "did you mean status?"):
        assert main(["cluster", *words]) == 2
        assert said in capsys.readouterr().err


def test_status_without_a_directory_is_of_the_newest_run_and_its_trials_have_logs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 2
    assert "results/runs holds no runs; start one with burst run EXP.yaml" in capsys.readouterr().err
    for number, name in enumerate(("older", "newer")):
        logs = Path("results", "runs", name, "trials", f"train-burst-{name}", "logs")
        logs.mkdir(parents=True)
        (logs / "rank0.log").write_text(f"said in {name}\n")
        facts = {"experiment": name, "trials": [], "started_at": "then"}
        (logs.parents[2] / "run.json").write_text(json.dumps(facts))
        os.utime(logs.parents[2] / "run.json", (number, number))
    assert main(["status"]) == 0
    first, step = capsys.readouterr().out.splitlines()
    assert first.startswith("results/runs/newer: newer has ended")
    assert "burst " in step
    assert main(["status", "--logs", "train-burst-o"]) == 0
    assert "said in older" in capsys.readouterr().out
    assert main(["status", "results/runs/newer", "--logs", "train"]) == 0
    assert "said in newer" in capsys.readouterr().out
    assert main(["status", "--rank", "0"]) == main(["status", "--logs", "train-burst-o", "--json"]) == 2


def _shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)


def test_a_reader_that_leaves_early_meets_no_traceback(experiment):
    Path("logs").mkdir()  # more than a pipe holds: the writer always meets its closed end
    Path("logs/rank0.log").write_text("line\n" * 100_000)
    done = _shell(f"{sys.executable} -m harness status --logs . | head -n 1; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_stdout_is_no_error(experiment):
    done = _shell(f"{sys.executable} -m harness plan exp.yaml --json >&-")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(experiment):
    done = _shell(f"{sys.executable} -m harness plan exp.yaml --json > /dev/full")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left on device; make room" in done.stderr


def test_an_output_that_fails_is_one_sentence(experiment):
    master, slave = os.openpty()
    os.close(master)  # whatever is written to the slave now is an input/output error
    command = [sys.executable, "-m", "harness", "plan", "exp.yaml", "--json"]
    done = subprocess.run(command, stdout=slave, stderr=subprocess.PIPE, text=True, check=False)
    os.close(slave)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "Input/output error; see to that file or its file system, then repeat the command" in done.stderr
