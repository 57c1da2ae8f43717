"""A run in rounds: every round is kept, whatever ends it, and a run that is resumed goes on with what is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.files.progress import Progress
from engine.measurement import LINK, PROFILE, Measurement, unfinished, write_measurement
from engine.settings import Steps, TrialSettings
from engine.shape import ModelShape
from harness.base.errors import UsageError
from harness.cli import main
from harness.launch.launcher import Job, Outcome
from harness.machine.this_machine import Machine
from harness.records.provenance import redacted_command
from harness.records.record import Record, write_record
from harness.records.stored import read_records
from harness.run.attempt import RunContext
from harness.run.execution import FRESHLY, ExecutionOptions, Resume, run_experiment
from harness.run.progress import PlainView
from harness.run.rounds import Shuffle
from harness.spec.experiment import load_experiment
from harness.spec.trial import Trial
from harness.spec.written import experiment_text
from tests.patience import AMPLE

SHAPE = ModelShape(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
INSIDE = {"step": 2, "of": 2, "phase": "backward", "layer": 12, "layers": 32}  # what rank 0 writes within a step
TWICE, THRICE = 2, 3
CPU = Machine(hostname="here", device="cpu", cores=2, memory_gib=8.0)
Ends = Callable[[int, int], str]  # a trial's seed and round: how it ends


def trial(seed: int, **changes: Any) -> Trial:
    fields = {"task": "train", "method": "burst", "model": SHAPE, "seq_len": 64, "dtype": "fp32", "seed": seed}
    settings = TrialSettings(**{**fields, "steps": Steps(warmup=0, measured=2), **changes})
    return Trial(experiment="exp", title="E", settings=settings, deadline_seconds=AMPLE)


class Scripted:
    """A launcher without processes: each trial's rounds end as the test says, and leave real files."""

    name = "scripted"

    def __init__(self, ends: Ends) -> None:
        self.ends = ends
        self.ran: list[tuple[int, int]] = []  # (seed, round) in the order in which they began

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        asked = json.loads((job.trial_dir / "trial.json").read_text())
        seed, number = asked["settings"]["seed"], asked["round"]
        self.ran.append((seed, number))
        logs = job.trial_dir / "logs"
        logs.mkdir()
        (logs / "rank0.log").write_text(f"round {number}\n")
        how = self.ends(seed, number)
        if how in ("ctrl-c", "ctrl-c in its trace"):
            if how != "ctrl-c":
                figures = Measurement(step_seconds=[9.0], extra={PROFILE: unfinished("extra_step")})
                write_measurement(job.trial_dir, figures)
            raise KeyboardInterrupt
        if how.startswith("ok"):
            seconds = float(how.partition(" ")[2] or number)
            extra = {LINK: {"before": seconds}}
            write_measurement(job.trial_dir, Measurement(step_seconds=[seconds], loss=[1.0], extra=extra))
            return Outcome(status="ok", reason="", wall_seconds=2.0, hosts=["here"])
        return Outcome(status=how, reason=f"the reason of {how}", wall_seconds=2.0, hosts=["here"])  # type: ignore[arg-type]

    def close(self) -> None:
        pass


class Runner:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.said: list[str] = []

    def __call__(
        self,
        trials: list[Trial],
        rounds: int,
        ends: Ends = lambda seed, number: "ok",
        resume: Resume | None = None,
        machine: Machine = CPU,
        shuffle: Shuffle = lambda order: None,
        **more: Any,
    ) -> tuple[int, list[tuple[int, int]]]:
        launcher = Scripted(ends)
        code = run_experiment(
            "exp",
            trials,
            RunContext(
                machine=machine, launcher=launcher, environment={}, commit="abc", run_command=["burst", "run", "e"]
            ),
            self.run_dir,
            view=PlainView(Progress("", out=lambda _: None)),
            say=self.said.append,
            options=ExecutionOptions(rounds=rounds, shuffle=shuffle),
            resume=resume,
            again=["burst", "run", "exp.yaml"],
            **more,
        )
        return code, launcher.ran

    def records(self) -> dict[int, Record]:
        return {record.settings.seed: record for record in read_records(self.run_dir)}

    def files(self, seed: int) -> set[str]:
        folder = self.run_dir / "trials" / trial(seed).id
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    return Runner(tmp_path / "run")


def statuses(record: Record) -> list[tuple[int, str]]:
    return [(one.number, one.status) for one in record.rounds]


def test_every_round_runs_all_trials_in_an_order_of_its_own_and_records_round_and_place(run):
    orders = [[2, 0, 1], [1, 2, 0], [0, 1, 2]]

    def shuffle(trials: list[Trial]) -> None:
        wanted = orders.pop(0)
        trials.sort(key=lambda one: wanted.index(one.settings.seed))

    code, ran = run([trial(seed) for seed in range(3)], THRICE, shuffle=shuffle)
    assert code == 0
    assert ran == [(2, 1), (0, 1), (1, 1), (1, 2), (2, 2), (0, 2), (0, 3), (1, 3), (2, 3)]
    record = run.records()[2]
    assert [(one.number, one.place) for one in record.rounds] == [(1, 1), (2, 2), (3, 3)]
    assert (record.status, record.reason, record.attempts, record.wall_seconds) == ("ok", "", 1, 6.0)
    assert record.step_seconds_by_round == [[1.0], [2.0], [3.0]]
    assert [one.link_gib_per_second for one in record.rounds] == [{"before": 1.0}, {"before": 2.0}, {"before": 3.0}]
    assert record.run_command == ["burst", "run", "e"]
    rows = (run.run_dir / "results.csv").read_text().splitlines()
    assert len(rows) == 4


def test_orders_are_fresh_entropy(tmp_path):
    trials = [trial(seed) for seed in range(10)]
    orders = [Runner(tmp_path / str(number))(trials, 1, shuffle=FRESHLY)[1] for number in range(3)]
    assert len({tuple(order) for order in orders}) > 1  # of 10! each
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


def test_files_of_each_round_are_kept_and_the_last_are_where_they_were_without_rounds(run, capfd):
    run([trial(0)], THRICE)
    own = {"trial.json", "measurement.json", "logs/rank0.log"}
    assert run.files(0) == own | {"record.json"} | {f"rounds/{number}/{name}" for number in (1, 2) for name in own}
    folder = run.run_dir / "trials" / trial(0).id
    for number, arguments in [(3, []), (1, ["--round", "1"]), (2, ["--round", "2"]), (3, ["--round", "3"])]:
        assert main(["status", "--logs", str(folder), *arguments]) == 0
        assert capfd.readouterr().out.splitlines()[1] == f"round {number}"
    assert main(["status", "--logs", str(folder), "--round", "4"]) == 2
    assert "holds no logs of round 4, but those of round 1, 2 or 3" in capfd.readouterr().err


def test_a_round_that_fails_after_others_gave_figures_is_a_reason_and_exit_code_1(run):
    def ends(seed: int, number: int) -> str:
        return {(0, 2): "failed", (1, 2): "oom"}.get((seed, number), "ok")

    code, ran = run([trial(0), trial(1)], THRICE, ends)
    assert code == 1
    assert len(ran) == 6
    records = run.records()
    assert {seed: (record.status, record.reason) for seed, record in records.items()} == {
        0: ("ok", "round 2 failed: the reason of failed"),
        1: ("ok", "round 2 oom: the reason of oom"),
    }
    assert records[0].step_seconds_by_round == [[1.0], [3.0]]
    assert run.said == ["1 of 2 trials failed; try them again with: burst run exp.yaml --resume --retry-failed"]

    assert run([trial(0), trial(1)], THRICE, ends, Resume()) == (1, [])
    code, ran = run([trial(0), trial(1)], THRICE, resume=Resume(retry_failed=True))
    assert (code, ran) == (0, [(0, 2)])
    again = run.records()[0]
    assert (again.reason, again.step_seconds_by_round, again.attempts) == ("", [[1.0], [2.0], [3.0]], 2)
    assert {"attempts/1/logs/rank0.log", "attempts/1/record.json", "rounds/3/logs/rank0.log"} <= run.files(0)
    assert "rounds/2/trial.json" not in run.files(0)


def test_an_oom_alone_after_figures_is_no_failure(run):
    code, _ = run([trial(0)], TWICE, lambda seed, number: "oom" if number == 2 else "ok")
    assert code == 0


@pytest.mark.parametrize("status", ["oom", "failed", "refused", "timeout", "hang", "node_lost", "host_oom"])
def test_a_trial_without_figures_in_its_first_round_runs_in_no_other(run, status):
    _, ran = run([trial(0), trial(1)], THRICE, lambda seed, number: status if seed == 0 else "ok")
    assert ran == [(0, 1), (1, 1), (1, 2), (1, 3)]
    assert (run.records()[0].status, statuses(run.records()[0])) == (status, [(1, status)])
    code, ran = run([trial(0), trial(1)], THRICE, resume=Resume(retry_failed=True))
    assert code == 0
    is_result = status in ("oom", "refused", "host_oom")
    assert ran == ([] if is_result else [(0, 1), (0, 2), (0, 3)])


def test_ctrl_c_within_a_round_keeps_what_is_finished_and_resume_runs_exactly_the_rest(run):
    trials = [trial(seed) for seed in range(3)]
    code, ran = run(trials, THRICE, lambda seed, number: "ctrl-c" if (seed, number) == (1, 2) else "ok")
    assert (code, ran[-1]) == (1, (1, 2))
    assert run.said == ["interrupted in round 2 of 3 after 1 of 3 trials; go on with: burst run exp.yaml --resume"]
    records = run.records()
    assert {seed: record.status for seed, record in records.items()} == dict.fromkeys(range(3), "ok")
    assert [len(record.step_seconds_by_round) for record in records.values()].count(1) == 2
    assert "round 2 interrupted: stopped by the user" in records[1].reason

    before = records[0].rounds
    code, ran = run(trials, THRICE, resume=Resume())
    assert (code, ran) == (0, [(1, 2), (2, 2), (0, 3), (1, 3), (2, 3)])
    records = run.records()
    assert [record.step_seconds_by_round for record in records.values()] == [[[1.0], [2.0], [3.0]]] * 3
    assert records[0].rounds[:2] == before
    assert {seed: record.rounds[1].place for seed, record in records.items()} == {0: 1, 1: 2, 2: 3}
    assert {record.reason for record in records.values()} == {""}
    assert "attempts/1/logs/rank0.log" in run.files(1)


def test_a_run_that_was_killed_in_a_round_keeps_its_files_as_an_attempt(run):
    run([trial(0)], TWICE)
    folder = run.run_dir / "trials" / trial(0).id
    record = run.records()[0]
    shutil.copytree(folder, run.run_dir / "before")
    # As after SIGKILL in round 2: the files of that round, and the record from before it.
    write_record(folder, replace(record, rounds=record.rounds[:1], measurement=Measurement(step_seconds=[1.0])))
    code, ran = run([trial(0)], TWICE, resume=Resume())
    assert (code, ran) == (0, [(0, 2)])
    assert {"attempts/1/logs/rank0.log", "rounds/1/logs/rank0.log", "logs/rank0.log"} <= run.files(0)


def test_a_round_that_was_stopped_while_its_trace_was_taken_is_completed(run):
    run([trial(0)], TWICE, lambda seed, number: "ctrl-c in its trace" if number == 2 else "ok")
    [_, stopped] = run.records()[0].rounds
    assert stopped.reason == "stopped by the user; --resume keeps its figures, which were not checked"
    code, ran = run([trial(0)], TWICE, resume=Resume())
    assert (code, ran) == (0, [])
    record = run.records()[0]
    assert record.step_seconds_by_round == [[1.0], [9.0]]
    assert record.reason.startswith("round 2: measured, and then interrupted: stopped by the user")


def test_more_rounds_are_added_to_the_same_records_also_to_those_from_before_there_were_any(run):
    run([trial(0)], 1)
    old = run.records()[0]
    folder = run.run_dir / "trials" / trial(0).id
    write_record(folder, replace(old, rounds=[]))
    asked = json.loads((folder / "trial.json").read_text())
    del asked["round"]
    (folder / "trial.json").write_text(json.dumps(asked))

    assert run([trial(0)], THRICE, resume=Resume()) == (0, [(0, 2), (0, 3)])
    record = run.records()[0]
    assert statuses(record) == [(1, "ok"), (2, "ok"), (3, "ok")]
    assert record.rounds[0] == replace(old.rounds[0], place=0)
    assert (folder / "rounds" / "1" / "logs" / "rank0.log").read_text() == "round 1\n"
    assert run([trial(0)], 1, resume=Resume()) == (0, [])  # fewer are asked for: nothing is lost
    assert statuses(run.records()[0]) == [(1, "ok"), (2, "ok"), (3, "ok")]


def test_a_trial_that_runs_again_keeps_the_rounds_of_the_others(run):
    run([trial(0), trial(1)], THRICE)
    before = run.records()
    again = Resume(again=frozenset({trial(0).id}))
    with pytest.raises(UsageError, match=r"has 3 rounds in .*, and steps.rounds is 2; give --set steps.rounds=3"):
        run([trial(0), trial(1)], TWICE, only=[trial(0)], resume=again)
    assert run.records() == before
    assert run([trial(0), trial(1)], THRICE, only=[trial(0)], resume=again) == (0, [(0, 1), (0, 2), (0, 3)])


def test_rounds_on_other_hardware_are_refused_before_anything_runs(run):
    run([trial(0)], 1)
    before = run.records()
    gpu = replace(CPU, device="cuda", gpu_name="NVIDIA H200", gpu_count=1)
    with pytest.raises(UsageError, match=r"was measured on cpu, and further rounds here .* on NVIDIA H200; add them"):
        run([trial(0)], TWICE, resume=Resume(), machine=gpu)
    assert run.records() == before
    assert run([trial(0)], 1, resume=Resume(), machine=gpu) == (0, [])


def test_a_machine_that_cannot_run_a_trial_with_figures_leaves_it_alone(run):
    run([trial(0), trial(1)], 1)
    cannot = replace(trial(0), unsupported_reason="needs 4 GPUs")
    code, ran = run([cannot, trial(1)], TWICE, resume=Resume())
    assert (code, ran) == (0, [(1, 2)])
    assert run.said[-1] == ("1 trials with figures lack rounds that this machine cannot run; they are kept as they are")
    assert statuses(run.records()[0]) == [(1, "ok")]


def test_only_some_trials_run_and_the_list_and_the_other_records_stay(run):
    trials = [trial(seed) for seed in range(3)]
    code, ran = run(trials, TWICE, only=trials[1:2])
    assert (code, ran) == (0, [(1, 1), (1, 2)])
    assert json.loads((run.run_dir / "run.json").read_text())["trials"] == [each.id for each in trials]
    kept = run.records()[1]
    code, ran = run(trials, TWICE, resume=Resume(), only=trials[:1])
    assert (code, ran) == (0, [(0, 1), (0, 2)])
    assert run.records()[1] == kept
    assert json.loads((run.run_dir / "run.json").read_text())["trials"] == [each.id for each in trials]
    assert len((run.run_dir / "results.csv").read_text().splitlines()) == 3
    with pytest.raises(UsageError, match="the plan's only trial cannot run: no"):
        run(trials, TWICE, resume=Resume(), only=[replace(trials[0], unsupported_reason="no")])


def test_an_experiment_file_that_means_another_experiment_is_moved_aside_and_said(run):
    run([trial(0)], 1, text="# by the run\nname: a\n")
    path = run.run_dir / "experiment.yaml"
    path.write_text("# a remark of the user\nname: a\n")
    run([trial(0)], 1, text="# by another run\nname: a\n", resume=Resume())
    assert path.read_text() == "# a remark of the user\nname: a\n"
    assert run.said == []
    run([trial(0)], 1, text="name: b\n", resume=Resume())
    assert path.read_text() == "name: b\n"
    [aside] = run.run_dir.glob("experiment.yaml.*")
    assert aside.read_text() == "# a remark of the user\nname: a\n"
    assert run.said == [f"the earlier experiment.yaml in {run.run_dir} has other contents and is now {aside.name}"]


def test_a_command_is_kept_as_typed_but_for_secrets():
    typed = ["burst", "run", "e.yaml", "--set", "fixed.backward=key_value", "--only=train-*", "--set=steps.rounds=3"]
    assert redacted_command(typed) == typed
    assert redacted_command(
        ["api_token=a", "--set=my.password=a=b", "http://me:pw@host/e.yaml", "x=http://me:pw@h"]
    ) == [
        "api_token=<redacted>",
        "--set=my.password=<redacted>",
        "http://<redacted>@host/e.yaml",
        "x=http://<redacted>@h",
    ]


EXPERIMENT = """\
title: Attention in rounds
task: [attention, train]
model: {layers: 1, hidden: 32, ffn: 48, heads: 4, kv_heads: 2, head_dim: 8, vocab: 256}
sweep: {cp_size: [1, 2]}
fixed: {method: burst, seq_len: 64, dtype: fp32}
steps: {warmup: 1, measured: 2, rounds: 2}
limits: {trial_seconds: 3600}
"""


def test_real_trials_in_rounds_repeat_their_losses_and_a_resumed_run_adds_a_round(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("exp.yaml").write_text(EXPERIMENT)
    command = ["run", "exp.yaml", "--launcher", "local", "--out", "out", "--set", "fixed.learning_rate=1e-2"]
    assert main(command) == 0
    assert capfd.readouterr().err.count(", round 2 of 2] ") == 4
    first = {record.trial_id: record for record in read_records(Path("out"))}
    for record in first.values():
        assert record.measurement is not None
        assert (record.status, record.reason) == ("ok", "")
        assert [(one.number, len(one.step_seconds)) for one in record.rounds] == [(1, 2), (2, 2)]
        assert len(record.measurement.step_seconds) == 4
        assert (record.measurement.gpus, record.rounds[0].gpus_before) == ([], [])  # CPUs
        assert record.run_command == ["burst", *command]
    for number in (1, 2):
        places = [one.place for record in first.values() for one in record.rounds if one.number == number]
        assert sorted(places) == [1, 2, 3, 4]

    again = ["run", "out/experiment.yaml", "--launcher", "local", "--out", "out", "--resume", "--set", "steps.rounds=3"]
    train = next(record.trial_id for record in first.values() if record.settings.task == "train")
    assert main([*again, "--only", train]) == 0
    records = {record.trial_id: record for record in read_records(Path("out"))}
    assert records.keys() == first.keys()
    assert {trial_id: len(record.rounds) for trial_id, record in records.items()} == {
        trial_id: 3 if trial_id == train else 2 for trial_id in first
    }
    assert records[train].rounds[:2] == first[train].rounds
    assert main(["status", "out"]) == 0
    status = capfd.readouterr().out
    assert status.count("2 of 3 rounds") == 3
    assert status.count("3 of 3 rounds") == 1


def test_only_means_ids_beginnings_and_patterns_and_names_the_nearest(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("exp.yaml").write_text(EXPERIMENT)
    assert main(["run", "exp.yaml", "--launcher", "local", "--only", "train-burts-s64-cp1"]) == 2
    said = capfd.readouterr().err
    assert "--only 'train-burts-s64-cp1' means none of the 4 trials; did you mean train-burst-s64-cp1-" in said
    Path("search.yaml").write_text(f"{EXPERIMENT}\nsearch: {{until: oom, bisect: 64, at_most: 4k}}\n")
    assert main(["run", "search.yaml", "--launcher", "local", "--only", "train-burst-s4096-"]) == 2
    said = capfd.readouterr().err
    assert "means none of the 4 trials; a length that the search added can be named where it is put into sweep" in said
    assert not Path("results").exists()


def test_a_run_leaves_an_experiment_that_plans_its_very_trials(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.launch.supervisor.LocalLauncher", lambda: Scripted(lambda seed, number: "ok"))
    Path("exp.yaml").write_text(
        EXPERIMENT + "scales: {one: {sweep: {cp_size: [1]}, steps: {rounds: 1}, task: train}}\n"
    )
    Path("a text").write_text("some text " * 100)
    command = ["run", "exp.yaml", "--scale", "one", "--launcher", "local", "--set", "fixed.mask=full"]
    assert main([*command, "--set", "fixed.data=a text"]) == 0
    run_dir = Path("results", "runs", "exp")
    written = load_experiment(run_dir / "experiment.yaml")
    assert written == replace(
        load_experiment("exp.yaml", "one", ["fixed.mask=full", "fixed.data=a text"]),
        path=run_dir / "experiment.yaml",
        scale=None,
    )
    assert (run_dir / "experiment.yaml").read_text() == experiment_text(
        written, f"As resolved by: burst {' '.join(command)} --set 'fixed.data=a text'"
    )
    [record] = read_records(run_dir)
    described = json.loads((run_dir / "run.json").read_text())
    assert described["trials"] == [record.trial_id]
    assert described["rounds"] == 1
    assert main(["run", str(run_dir / "experiment.yaml"), "--launcher", "local", "--resume"]) == 0
    assert read_records(run_dir) == [record]


def test_status_shows_the_round_of_the_trial_that_runs_now(run, capfd):
    seen = []

    def ends(seed: int, number: int) -> str:
        if (seed, number) == (0, 2):
            folder = run.run_dir / "trials" / trial(0).id
            for line in ({"step": 1, "of": 2}, INSIDE):
                (folder / "progress.jsonl").write_text(json.dumps(line) + "\n")
                assert main(["status", str(run.run_dir)]) == 0
                seen.append(capfd.readouterr().out.splitlines())
        return "ok"

    run([trial(0), trial(1)], TWICE, ends)
    lines, within = seen
    assert lines[0].startswith(f"{trial(0).id}  running  round 2 of 2  step 1 of 2  ")
    assert within[0].startswith(f"{trial(0).id}  running  round 2 of 2  step 2 of 2, backward, layer 12 of 32  ")
    assert lines[1] == f"{trial(1).id}  ok  2.0 s  1 of 2 rounds"
    assert lines[2].startswith("exp runs: 1 running, 1 ok of 2 trials")


def test_a_plan_says_in_how_many_rounds_its_trials_run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("exp.yaml").write_text(EXPERIMENT)
    assert main(["plan", "exp.yaml"]) == 0
    assert "4 trials, 4 can run on this machine, in 2 rounds\n" in capfd.readouterr().out
    assert main(["plan", "exp.yaml", "--json"]) == 0
    assert {row["rounds"] for row in json.loads(capfd.readouterr().out)} == {2}
    assert main(["plan", "exp.yaml", "--set", "steps.rounds=1"]) == 0
    assert capfd.readouterr().out.endswith("4 trials, 4 can run on this machine\n")
