"""A plan's way to records, with a launcher whose outcomes the test decides and which leaves real files."""

import csv
import dataclasses
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.files.progress import Progress
from engine.measurement import Measurement, write_measurement
from engine.settings import TrialSettings
from engine.shape import ModelShape
from harness.base.errors import UsageError
from harness.cli import main
from harness.launch.launcher import Job, Outcome
from harness.machine.this_machine import Machine
from harness.records.record import Record, read_record, write_record
from harness.records.stored import read_records
from harness.report.results import RunRecords
from harness.run import attempt
from harness.run.attempt import RunContext
from harness.run.execution import ExecutionOptions, Resume, run_experiment
from harness.run.progress import PlainView
from harness.run.rounds import Shuffle
from harness.spec.trial import Trial

MODEL = ModelShape(name="m", layers=1, hidden=16, ffn=32, heads=2, kv_heads=2, head_dim=8, vocab=32)

HERE = Machine(hostname="here", device="cpu", cores=2, memory_gib=8.0)

PORT_TAKEN = (
    "rank 0: DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, "
    "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use (see logs/rank0.log)"
)


class ScriptedLauncher:
    """Ends each job as its length says; an implementation of the protocol, so that runs are tested without torch."""

    name = "scripted"

    def __init__(self, outcomes: dict[int, str]) -> None:
        self.outcomes = outcomes
        self.jobs: list[Job] = []

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        self.jobs.append(job)
        seq_len = int(job.trial_id.split("-s")[1].split("-")[0])
        status = self.outcomes.get(seq_len, "ok")
        if ", then " in status:  # the first attempt ends so, later ones as the rest says
            first, _, rest = status.partition(", then ")
            status, self.outcomes[seq_len] = first, rest
        if status.startswith("port taken"):
            once = status.endswith("once")
            if not once or [earlier.trial_id for earlier in self.jobs].count(job.trial_id) == 1:
                return Outcome(status="failed", reason=PORT_TAKEN, wall_seconds=1.0, hosts=["here"])
            status = "ok"
        if status == "ctrl-c":
            raise KeyboardInterrupt
        if status == "ok":
            write_measurement(job.trial_dir, Measurement(step_seconds=[0.5], loss=[1.0]))
        elif status == "ok, but silent":
            status = "ok"
        reason = "" if status == "ok" else f"the reason of {status}"
        return Outcome(status=status, reason=reason, wall_seconds=1.0, hosts=["here"])  # type: ignore[arg-type]

    def close(self) -> None:
        pass


def trial(seq_len: int, unsupported_reason: str | None = None) -> Trial:
    settings = TrialSettings(task="train", method="burst", model=MODEL, seq_len=seq_len)
    return Trial(
        experiment="exp",
        title="An experiment",
        settings=settings,
        deadline_seconds=60,
        unsupported_reason=unsupported_reason,
    )


def in_order(_trials: Any) -> None:
    """A round's order that is the plan's."""


OPTIONS = {one.name for one in dataclasses.fields(ExecutionOptions)}


class Runner:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.said: list[str] = []
        self.shuffle: Shuffle = in_order  # of the plan

    def __call__(
        self,
        outcomes: dict[int, str],
        trials: list[Trial],
        resume: Resume | None = None,
        environment: dict[str, str] | None = None,
        commit: str = "abc",
        changes: str = "",
        machine: Machine = HERE,
        experiment: str = "exp",
        **how: Any,
    ) -> tuple[int, ScriptedLauncher]:
        launcher = ScriptedLauncher(outcomes)
        code = run_experiment(
            experiment,
            trials,
            RunContext(
                machine=machine, launcher=launcher, environment=environment or {}, commit=commit, changes=changes
            ),
            self.run_dir,
            view=PlainView(Progress("", out=lambda _: None)),
            say=self.said.append,
            resume=resume,
            again=["burst", "run", "exp.yaml"],
            options=ExecutionOptions(
                shuffle=self.shuffle, **{key: how.pop(key) for key in list(how) if key in OPTIONS}
            ),
            **how,
        )
        return code, launcher

    def records(self) -> dict[int, Record]:
        return {record.settings.seq_len: record for record in read_records(self.run_dir)}


@pytest.fixture
def run(tmp_path):
    return Runner(tmp_path / "run")


def test_every_trial_leaves_a_record_and_a_row(run):
    code, launcher = run(
        {64: "oom"}, [trial(32), trial(64), trial(128, unsupported_reason="too long for this machine")]
    )
    assert code == 0
    assert [job.trial_id for job in launcher.jobs] == [trial(32).id, trial(64).id]
    records = run.records()
    assert {length: (record.status, record.reason) for length, record in records.items()} == {
        32: ("ok", ""),
        64: ("oom", "the reason of oom"),
        128: ("refused", "too long for this machine"),
    }
    assert records[32].measurement == Measurement(step_seconds=[0.5], loss=[1.0])
    assert (records[32].launcher, records[128].launcher) == ("scripted", "")
    with open(run.run_dir / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["seq_len"], row["status"]) for row in rows] == [("32", "ok"), ("64", "oom"), ("128", "refused")]


def test_the_worker_finds_its_settings_and_the_record_keeps_no_path_and_no_secret(run):
    run({}, [trial(32)], environment={"NCCL_DEBUG": "INFO", "NCCL_API_KEY": "hunter2", "HOME": "/home/me"})
    record = run.records()[32]
    assert (run.run_dir / "trials" / record.trial_id / "trial.json").exists()
    assert record.command == ["python", "-m", "engine.worker", "TRIAL_DIR"]
    assert record.environment["NCCL_DEBUG"] == "INFO"
    assert record.environment["NCCL_API_KEY"] == "<redacted>"
    assert "HOME" not in record.environment
    assert record.commit == "abc"


@pytest.mark.parametrize("status", ["failed", "timeout", "node_lost", "hang"])
def test_what_went_wrong_gives_exit_code_1_and_the_command_to_try_again(run, status):
    code, launcher = run({32: status}, [trial(32), trial(64)])
    assert (code, len(launcher.jobs)) == (1, 2)
    assert run.said[-1] == "1 of 2 trials failed; try them again with: burst run exp.yaml --resume --retry-failed"


def test_the_first_error_of_a_file_system_ends_the_run_though_results_cannot_be_written_either(run):
    run({}, [trial(32)])
    (run.run_dir / "results.csv").unlink()
    (run.run_dir / "results.csv").mkdir()
    (run.run_dir / "trials" / trial(64).id).write_text("in the way")
    with pytest.raises(FileExistsError, match=trial(64).id):
        run({}, [trial(32), trial(64)], Resume())


def test_a_trial_that_lost_its_port_is_tried_once_more(run):
    code, launcher = run({32: "port taken once"}, [trial(32)])
    record = run.records()[32]
    assert (code, len(launcher.jobs)) == (0, 2)
    assert (record.status, record.attempts) == ("ok", 2)
    first = read_record(run.run_dir / "trials" / trial(32).id / "attempts" / "1" / "record.json")
    assert (first.status, first.reason, first.attempts) == ("failed", PORT_TAKEN, 1)


def test_a_trial_that_loses_its_port_twice_has_failed(run):
    code, launcher = run({32: "port taken"}, [trial(32)])
    assert (code, len(launcher.jobs)) == (1, 2)
    assert (run.records()[32].status, run.records()[32].attempts) == ("failed", 2)


def test_an_ok_trial_without_a_measurement_has_failed(run):
    code, _ = run({32: "ok, but silent"}, [trial(32)])
    assert (code, run.records()[32].status) == (1, "failed")
    assert "no measurement could be read" in run.records()[32].reason


def test_ctrl_c_records_the_running_trial_and_leaves_the_others_to_resume(run):
    trials = [trial(32), trial(64), trial(128)]
    code, _ = run({64: "ctrl-c"}, trials)
    assert code == 1
    assert {length: record.status for length, record in run.records().items()} == {32: "ok", 64: "interrupted"}
    assert run.said == ["interrupted after 1 of 3 trials; go on with: burst run exp.yaml --resume"]

    code, launcher = run({}, trials, Resume())
    assert code == 0
    assert [job.trial_id for job in launcher.jobs] == [trials[1].id, trials[2].id]
    assert run.records()[64].attempts == 2


def test_a_trial_that_is_stopped_took_no_time_below_0_whatever_the_clock_says(run, monkeypatch):
    """The clock may be set back while it runs; a negative time counts against that of the trials that are left."""
    monkeypatch.setattr(attempt, "now", lambda: "2999-01-01T00:00:00+00:00")
    run({64: "ctrl-c"}, [trial(64)])
    [stopped] = run.records()[64].rounds
    assert (stopped.started_at, stopped.wall_seconds >= 0) == ("2999-01-01T00:00:00+00:00", True)


def test_resume_keeps_results_and_failures_and_retry_failed_only_results(run):
    trials = [trial(32), trial(64), trial(128)]
    run({64: "oom", 128: "failed"}, trials)
    code, launcher = run({}, trials, Resume())
    assert (code, launcher.jobs) == (1, [])
    code, launcher = run({}, trials, Resume(retry_failed=True))
    assert (code, [job.trial_id for job in launcher.jobs]) == (0, [trials[2].id])
    assert run.records()[64].status == "oom"


def test_a_trial_runs_again_beside_the_others_and_what_it_left_stays_among_its_attempts(run):
    trials = [trial(32), trial(64)]
    run({64: "oom"}, trials)
    before = run.records()
    code, launcher = run({}, trials, Resume(again=frozenset({trials[0].id})), only=trials[:1])
    assert (code, [job.trial_id for job in launcher.jobs]) == (0, [trials[0].id])
    now = run.records()
    assert (now[32].attempts, now[64]) == (2, before[64])
    [kept] = (run.run_dir / "trials" / trials[0].id / "attempts").glob("*/record.json")
    assert read_record(kept) == before[32]
    code, launcher = run({}, trials, Resume(again=frozenset({trials[1].id})), only=trials[1:])
    assert run.records()[64].status == "ok"


def test_resume_on_a_machine_that_can_runs_what_another_refused(run):
    run({}, [trial(32), trial(64, unsupported_reason="needs 4 GPUs")])
    _, launcher = run({}, [trial(32), trial(64)], Resume())
    assert [job.trial_id for job in launcher.jobs] == [trial(64).id]
    assert run.records()[64].status == "ok"


def test_what_is_stated_of_a_run_stays_with_it_when_a_new_one_moves_it_aside(run):
    run({}, [trial(1024)])
    (run.run_dir / "provenance.yaml").write_text("reasons:\n- {about: [conditions], says: the host was shared}\n")
    run({}, [trial(1024)], records=RunRecords(run.run_dir))
    [earlier] = [path for path in run.run_dir.parent.glob("run.*") if path.is_dir()]
    assert (earlier / "provenance.yaml").exists()
    assert "the host was shared" not in (run.run_dir / "results.csv").read_text()


def test_other_settings_are_another_trial_when_resuming(run):
    run({}, [trial(32)])
    other = dataclasses.replace(trial(32), settings=dataclasses.replace(trial(32).settings, seed=1))
    _, launcher = run({}, [other], Resume(mix=True))
    assert [job.trial_id for job in launcher.jobs] == [other.id]


def test_a_plan_in_which_nothing_can_run_touches_no_directory(run):
    run({}, [trial(32)])
    with pytest.raises(UsageError, match="the plan's only trial cannot run: too long"):
        run({}, [trial(32, unsupported_reason="too long")])
    assert run.records()[32].status == "ok"


def test_an_unreadable_record_is_named_when_resuming(run):
    run({}, [trial(32)])
    path = run.run_dir / "trials" / trial(32).id / "record.json"
    path.write_text("{")
    with pytest.raises(UsageError, match=r"record\.json is not a record of schema 1 \("):
        run({}, [trial(32)], Resume())


def test_a_record_that_makes_no_sense_is_named_before_anything_runs(run):
    run({}, [trial(32)])
    path = run.run_dir / "trials" / trial(32).id / "record.json"
    path.write_text(path.read_text().replace('"causal"', '"sideways"'))
    with pytest.raises(UsageError, match="mask 'sideways' is unknown"):
        run({}, [trial(16), trial(32)], Resume())
    assert run.records().keys() == {32}


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_a_file_system_that_fails_in_mid_run_loses_no_finished_trial(run, monkeypatch, number):
    written = []

    def failing(trial_dir: Path, record: Record) -> None:
        if written:
            raise OSError(number, os.strerror(number), str(trial_dir / "record.json"))
        written.append(trial_dir / "record.json")
        write_record(trial_dir, record)

    monkeypatch.setattr("harness.run.attempt.write_record", failing)
    trials = [trial(32), trial(64)]
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):  # one sentence of the command line: cli.main
        run({}, trials)
    (first,) = written
    kept = first.read_bytes()
    monkeypatch.undo()
    code, launcher = run({}, trials, Resume())
    assert code == 0
    assert [job.trial_id for job in launcher.jobs] == [trial(64).id]
    assert first.read_bytes() == kept


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_a_file_systems_error_is_one_sentence_of_the_command_line(tmp_path, monkeypatch, capfd, number):
    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "results/trials/x/record.json")

    monkeypatch.setattr("harness.commands.status.StatusCommand.run", failing)
    assert main(["status", str(tmp_path)]) == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert os.strerror(number) in said
    assert "record.json" in said


def test_under_torchrun_a_run_is_refused_before_it_touches_its_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert main(["run", "experiments/quickstart.yaml", "--scale", "smoke", "--out", str(tmp_path / "run")]) == 2
    assert "burst run starts the ranks itself; leave torchrun out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
