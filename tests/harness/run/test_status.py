"""`burst status`: failures first, counts, and the time that is left, as lines and as JSON."""

import json
import os
import shlex
from pathlib import Path

import pytest

from harness.cli import main
from harness.launch.launcher import Job, Outcome
from harness.run.execution import Resume
from harness.run.state import TrialState, seconds_left, state_of
from harness.spec.experiment import Search
from tests.harness.run.test_run_experiment import Runner, ScriptedLauncher, trial
from tests.harness.run.test_run_search import trial as searched_trial


@pytest.fixture
def run(tmp_path):
    return Runner(tmp_path / "run")


def status(run: Runner, capsys, *options: str) -> str:
    capsys.readouterr()
    assert main(["status", str(run.run_dir), *options]) == 0
    return capsys.readouterr().out


def test_failures_come_first_and_counts_last(run, capsys):
    trials = [trial(length) for length in (16, 32, 64, 128)]
    run({32: "oom", 64: "hang"}, trials)
    lines = status(run, capsys).splitlines()
    assert [line.split("  ")[:2] for line in lines[:-2]] == [
        [trials[2].id, "hang"], [trials[0].id, "ok"], [trials[1].id, "oom"], [trials[3].id, "ok"]
    ]  # fmt: skip
    assert "the reason of hang" in lines[0]
    assert lines[-2].startswith("exp has ended: 2 ok, 1 oom, 1 hang of 4 trials, started ")
    assert "left" not in lines[-2]
    again = f"burst run exp.yaml --out {run.run_dir} --resume --retry-failed"
    assert lines[-1] == f"try the failed ones again with: {again}"


def test_a_round_that_failed_makes_its_trial_a_failure_though_it_has_figures(run, capsys):
    run({}, [trial(16), trial(32)])
    run({32: "failed"}, [trial(16), trial(32)], Resume(), rounds=2)
    first, second, *_ = status(run, capsys).splitlines()
    assert first.startswith(f"{trial(32).id}  ok  2.0 s  round 2 failed: the reason of failed  2 of 2 rounds")
    assert second.startswith(f"{trial(16).id}  ok")
    assert json.loads(status(run, capsys, "--json"))["failed"] == 1


def test_rounds_to_come_of_trials_that_have_ended_well_are_said(run, capsys):
    run({}, [trial(16), trial(32)])
    run({32: "ctrl-c"}, [trial(16), trial(32)], Resume(), rounds=3)
    *_, counts, _ = status(run, capsys).splitlines()
    assert counts.startswith("exp stopped before its end: 2 ok of 2 trials with 3 rounds to come, started ")


def test_json_has_counts_trials_and_the_time_that_is_left(run, capsys):
    trials = [trial(length) for length in (16, 32, 64)]
    run({32: "ctrl-c"}, trials)
    found = json.loads(status(run, capsys, "--json"))
    assert (found["experiment"], found["running"], found["total"], found["failed"]) == ("exp", False, 3, 0)
    assert found["counts"] == {"ok": 1, "interrupted": 1, "waiting": 1}
    # One took a second; those with two and four times as many tokens are taken to need as much longer.
    assert (found["seconds_left"], found["ends_at"]) == (6.0, None)
    assert [(one["trial_id"], one["status"], one["rounds_done"]) for one in found["trials"]] == [
        (trials[0].id, "ok", 1), (trials[1].id, "interrupted", 0), (trials[2].id, "waiting", 0)
    ]  # fmt: skip
    *_, counts, step = status(run, capsys).splitlines()
    assert counts.startswith("exp stopped before its end: 1 ok, 1 interrupted, 1 waiting of 3 trials, started ")
    assert counts.endswith(", about 6 s left")
    assert step == found["next"] == f"go on with: burst run exp.yaml --out {run.run_dir} --resume"


def test_a_run_that_runs_has_an_end(run, capsys):
    seen = []

    def look(_trials: object) -> None:  # the second round is about to begin
        if list(run.run_dir.glob("trials/*/record.json")):
            seen.append((status(run, capsys).splitlines()[-1], json.loads(status(run, capsys, "--json"))))

    run.shuffle = look  # called for each round, and for its groups
    run({}, [trial(16), trial(32)], rounds=2)
    line, found = seen[0]
    assert line.startswith("exp runs: 2 ok of 2 trials with 2 rounds to come, started ")
    assert ", about 2 s left (until " in line
    assert (found["running"], found["seconds_left"], found["ends_at"] is None) == (True, 2.0, False)


def test_trials_of_a_search_are_counted(run, capsys):
    outcomes = {64: "ok", 128: "oom", 96: "ok", 112: "ok"}
    run(outcomes, [searched_trial(64), searched_trial(128)], search=Search(until="oom", bisect=16))
    assert json.loads(status(run, capsys, "--json"))["counts"] == {"ok": 3, "oom": 1}


def known(trial_id: str, *seconds: float, **fields: object) -> TrialState:
    return TrialState(
        trial_id=trial_id, **{"status": "ok", "rounds_done": len(seconds), "round_seconds": list(seconds)} | fields
    )


def waits(trial_id: str, **fields: object) -> TrialState:
    return TrialState(trial_id=trial_id, status="waiting", **fields)


def test_the_time_left_is_that_of_the_trials_most_alike():
    finished = [known("train-burst-s64-cp2-00000000", 10.0), known("train-ulysses-s128-cp2-00000000", 30.0)]
    left = {
        "train-burst-s64-cp2-11111111": 10.0,  # alike in all
        "train-ring-s128-cp2-11111111": 30.0,  # in length and CP size
        "train-ring-s128-cp4-11111111": 30.0,  # in length
        "train-ring-s256-cp4-11111111": 50.0,  # in proportion: the median of 40 s and 60 s
    }
    for trial_id, seconds in left.items():
        assert seconds_left([*finished, waits(trial_id)]) == pytest.approx(seconds), trial_id
    assert seconds_left([*finished, *map(waits, left)]) == pytest.approx(sum(left.values()))


def test_the_time_left_counts_rounds_and_what_has_run_and_is_unknown_before_any_trial_has_finished():
    two_more = known("train-burst-s64-cp2-00000000", 10.0, 12.0, rounds=4)
    assert seconds_left([two_more]) == 22.0
    half_way = waits("train-burst-s64-cp2-11111111", running_seconds=4.0)
    assert seconds_left([known("train-burst-s64-cp2-00000000", 10.0), half_way]) == 6.0
    late = waits("train-burst-s64-cp2-11111111", running_seconds=40.0)
    assert seconds_left([known("train-burst-s64-cp2-00000000", 10.0), late]) == 0.0
    assert seconds_left([waits("train-burst-s64-cp2-11111111")]) is None
    assert seconds_left([known("train-burst-s64-cp2-00000000", 10.0, status="oom", rounds=3)]) == 0.0


def test_the_time_left_of_twenty_thousand_trials_is_found():
    many = [known(f"train-m{number}-s64-cp2-00000000", 1.0) for number in range(10_000)]
    more = [waits(f"train-n{number}-s128-cp2-00000000") for number in range(10_000)]
    assert seconds_left([*many, *more]) == pytest.approx(20_000.0)


def test_a_record_that_cannot_be_used_is_counted_and_named(run, capsys):
    run({}, [trial(16), trial(32)])
    (run.run_dir / "trials" / trial(16).id / "record.json").write_text("{")
    assert main(["status", str(run.run_dir), "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["counts"] == {"unusable": 1, "ok": 1}
    assert "record.json is not a record" in printed.err
    assert state_of(run.run_dir).failed == 1


def test_a_finished_run_needs_its_report_alone_until_there_is_one_of_all_records(run, capsys):
    run({}, [trial(16), trial(32)])
    report = f"the report is not that of all records; write it with: burst report {run.run_dir}"
    assert status(run, capsys).splitlines()[-1] == report  # this runner writes none
    assert main(["report", str(run.run_dir)]) == 0
    assert "report" not in status(run, capsys)
    run({}, [trial(16), trial(32), trial(64)], Resume())  # and now it lacks a trial
    os.utime(run.run_dir / "report.html", (0, 0))
    assert status(run, capsys).splitlines()[-1] == report
    assert main(["report", str(run.run_dir)]) == 0
    results = run.run_dir / "results.csv"
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:-1]))
    assert status(run, capsys).splitlines()[-1] == report


def test_a_run_from_before_its_command_was_kept_goes_on_from_its_own_experiment(run, capsys):
    run({32: "ctrl-c"}, [trial(16), trial(32)])
    path = run.run_dir / "run.json"
    for command in (None, "burst run", {}):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"command": command}))
        step = status(run, capsys).splitlines()[-1]
        assert step == f"go on with: burst run {run.run_dir}/experiment.yaml --out {run.run_dir} --resume"


def newest(capsys) -> list[str]:
    """What `burst status` prints without a directory."""
    capsys.readouterr()
    assert main(["status"]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def run_here(tmp_path, monkeypatch):
    """A run where runs lie by default."""
    monkeypatch.chdir(tmp_path)
    return Runner(Path("results", "runs", "exp"))


def test_the_newest_run_that_ended_well_is_one_sentence_and_its_report(run_here, capsys):
    run_here({32: "oom"}, [trial(16), trial(32)])
    assert main(["report", str(run_here.run_dir)]) == 0
    sentence, step = newest(capsys)
    assert sentence.startswith("results/runs/exp: exp has ended: 1 ok, 1 oom of 2 trials, started ")
    assert step == "read results/runs/exp/report.html, or look at its trials with: burst status results/runs/exp"


def test_the_newest_run_with_a_failure_names_it_and_the_command_that_shows_its_logs(run_here, capsys):
    run_here({32: "failed"}, [trial(16), trial(32)])
    logs = run_here.run_dir / "trials" / trial(32).id / "logs"
    sentence, step = newest(capsys)  # of ranks that left no log there is none to show
    assert sentence.endswith(f"; {trial(32).id}  failed  1.0 s  the reason of failed")
    assert step == "try the failed ones again with: burst run exp.yaml --out results/runs/exp --resume --retry-failed"
    logs.mkdir()
    (logs / "rank0.log").write_text("what went wrong\n")
    _, first, second = newest(capsys)
    assert first == f"see what its ranks printed with: burst status results/runs/exp --logs {trial(32).id}"
    assert second == step
    assert status(run_here, capsys).splitlines()[-2:] == [first, second]
    assert main(shlex.split(first.partition(": burst ")[2])) == 0
    assert "what went wrong" in capsys.readouterr().out


def test_the_logs_of_a_failure_are_those_of_its_round(run_here, capsys):
    logs = run_here.run_dir / "trials" / trial(16).id / "logs"
    for number, end in enumerate(("ok", "failed", "ok"), start=1):
        run_here({16: end}, [trial(16)], Resume() if number > 1 else None, rounds=number)
        logs.mkdir()
        (logs / "rank0.log").write_text(f"of round {number}\n")
    step = next(line for line in newest(capsys) if line.startswith("see what its ranks printed"))
    assert step.endswith(f"--logs {trial(16).id} --round 2")
    assert main(shlex.split(step.partition(": burst ")[2])) == 0
    assert "of round 2" in capsys.readouterr().out


def test_the_newest_run_that_was_interrupted_names_the_command_that_resumes_it(run_here, capsys):
    run_here({32: "ctrl-c"}, [trial(16), trial(32), trial(64)])
    sentence, step = newest(capsys)
    assert sentence.startswith("results/runs/exp: exp stopped before its end: 1 ok, 1 interrupted, 1 waiting of 3 ")
    assert step == "go on with: burst run exp.yaml --out results/runs/exp --resume"


@pytest.mark.parametrize(
    ("typed", "next_words"),
    [
        (["--out", "run"], "burst run exp.yaml --out {run} --resume"),
        (["--out=run"], "burst run exp.yaml --out {run} --resume"),
        (["--ou", "run"], "burst run exp.yaml --ou run --out {run} --resume"),
        ([], "burst run exp.yaml --out {run} --resume"),
    ],
)
@pytest.mark.parametrize("name", ["run.20261127-051353", "exp-monday", "elsewhere/run"])
def test_a_run_that_was_renamed_goes_on_where_it_is_now(typed, next_words, name, tmp_path, monkeypatch, capsys):
    """In its old place may be another run."""
    monkeypatch.chdir(tmp_path)
    Runner(tmp_path / "run")({32: "ctrl-c"}, [trial(16), trial(32)])
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    facts["command"] = ["burst", "run", "exp.yaml", *typed]
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts))
    assert next_of(Path("run"), capsys) == f"go on with: {next_words.format(run='run')}"
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "run").rename(tmp_path / name)
    assert next_of(moved, capsys) == f"go on with: {next_words.format(run=moved)}"


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        (["--only", "train-burst-s16-"], False),
        (["--only=*-s16-*"], False),
        (["--again", "train-burst-s16-"], False),
        (["--aga", "train-burst-s16-", "--res"], False),
        (["--stop-b", "06:50", "--retry-f"], False),
        (["--only", "*-s64-*"], True),
        (["--only", "*-s16-*", "--only", "train-burst-s32-"], True),
    ],
)
def test_what_goes_on_with_a_run_names_trials_only_where_some_of_them_are_left(named, kept, run, capsys):
    """`--only` of trials that have ended would run nothing, again and again."""
    run({32: "failed", 64: "ctrl-c"}, [trial(16), trial(32), trial(64)])
    path = run.run_dir / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"command": ["burst", "run", "exp.yaml", *named]}))
    words = f"{shlex.join(named)} " if kept else ""
    resumed = f"burst run exp.yaml {words}--out {run.run_dir} --resume --retry-failed"
    assert next_of(run.run_dir, capsys) == f"go on with: {resumed}"


def next_of(run_dir: Path, capsys) -> str:
    capsys.readouterr()
    assert main(["status", str(run_dir), "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)["next"])


def test_the_newest_run_that_runs_says_which_trial_does(run_here, capsys, monkeypatch):
    seen = []

    def begin(launcher: ScriptedLauncher, job: Job, on_progress: object) -> Outcome:
        (job.trial_dir / "progress.jsonl").write_text('{"step": 1, "of": 4}\n')
        seen.append(newest(capsys))
        return Outcome(status="ok", reason="", wall_seconds=1.0, hosts=["here"])

    monkeypatch.setattr(ScriptedLauncher, "run", begin)
    run_here({}, [trial(16)])
    [[sentence, step]] = seen
    assert sentence.startswith("results/runs/exp: exp runs: 1 running of 1 trial, started ")
    assert f"; {trial(16).id}  running  step 1 of 4  " in sentence
    assert step == "look at its trials with: burst status results/runs/exp"


def test_the_newest_run_is_the_one_that_was_started_last_whatever_was_written_since(run_here, capsys):
    run_here({}, [trial(16)])
    Runner(run_here.run_dir.with_name("later"))({}, [trial(16)])
    os.utime(run_here.run_dir / "run.json", (1, 1))
    assert main(["report", str(run_here.run_dir)]) == 0
    assert newest(capsys)[0].startswith("results/runs/later: ")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: (run / "run.json").write_text("{"), "exp is not the directory of a run (run.json: not readable"),
        (lambda run: (run / "run.json").write_text("[]"), "run.json does not describe a run; run it again with"),
        (lambda run: (run / "run.json").unlink(), "results/runs holds no runs; start one with burst run EXP.yaml"),
    ],
)
def test_a_damaged_newest_run_is_refused_in_one_sentence(run_here, capsys, damage, said):
    run_here({}, [trial(16)])
    damage(run_here.run_dir)
    capsys.readouterr()
    assert main(["status"]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1
