"""Ranks that make no progress: which limit ends them, which rank is named, and the stacks that stay."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.files.errors import quantity
from harness.launch import stacks
from harness.launch.launcher import SET, Job, JobLimits, Part, Passed, longest_seconds
from harness.launch.stacks import ask_flight_recorder, places_sentence, py_spy
from harness.launch.supervisor import LocalLauncher, Supervisor
from harness.launch.verdict import Exit, Watched, judge
from harness.machine.this_machine import Machine
from harness.plan.matrix import plan
from harness.plan.predict import step_seconds
from harness.records.provenance import PROJECT_ROOT
from harness.run.attempt import RunContext, job_of
from harness.spec.experiment import load_experiment
from harness.spec.trial import Trial
from tests.harness.launch.test_launch_supervisor import HERE, job, pids, quick
from tests.patience import scaled, wait_for_end

WITHOUT_PY_SPY = pytest.param(False, id="faulthandler")
WITH_PY_SPY = pytest.param(True, id="py-spy")


@pytest.fixture
def supervisor():
    # Time for a rank to write its stack when it is sent SIGTERM.
    supervisor = Supervisor(
        {**os.environ, "PYTHONPATH": str(HERE)}, preload=(), patience=replace(quick(), terminate=scaled(5.0))
    )
    yield supervisor
    supervisor.close()


def may_trace() -> bool:
    """Whether py-spy is installed and may read a process here."""
    program = py_spy()
    if program is None:
        return False
    program_of_sleeper = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(program_of_sleeper, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sleeper:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()  # Python runs: a process that is still starting has no stack to read
        done = subprocess.run([program, "dump", "--pid", str(sleeper.pid)], capture_output=True, check=False)
        sleeper.communicate(b"\n")
    return done.returncode == 0


@pytest.mark.parametrize("traced", [WITH_PY_SPY, WITHOUT_PY_SPY])
def test_a_rank_that_stops_is_a_hang_that_names_it_and_leaves_the_stack_of_each(
    supervisor, tmp_path, monkeypatch, traced
):
    if not traced:
        monkeypatch.setattr(stacks, "py_spy", lambda: None)
    elif not may_trace():
        pytest.skip("py-spy is not installed, or may trace no process here")
    stops = replace(
        job(tmp_path, "stops_after_two_steps", ranks=3), start_seconds=600.0, hang_seconds=(limit := scaled(1.0))
    )
    outcome = supervisor.run(stops)
    assert outcome.status == "hang", outcome
    assert outcome.reason.startswith(
        f"no progress for {quantity(limit)} s after step 2 of 9 (limits.hang_seconds; --set limits.hang_seconds="
        "SECONDS changes it); rank 1 at "
    )
    assert "stacks in stacks/" in outcome.reason
    assert "stuck" in (tmp_path / "stacks" / "rank1.txt").read_text()
    assert all("wait_for" in (tmp_path / "stacks" / f"rank{rank}.txt").read_text() for rank in (0, 2))
    wait_for_end(pids(tmp_path))


def test_start_up_has_a_limit_of_its_own(supervisor, tmp_path):
    limit = scaled(1.5)
    outcome = supervisor.run(replace(job(tmp_path, "hangs_deaf"), start_seconds=limit))
    assert outcome.status == "hang"
    assert outcome.reason.startswith(f"start-up did not end within its {quantity(limit)} s (limits.start_seconds; ")
    wait_for_end(pids(tmp_path))


def test_stacks_are_left_by_a_host_whose_part_is_cancelled_because_another_host_found_a_hang(supervisor, tmp_path):
    part = replace(
        job(tmp_path, "stops_after_two_steps"), part=Part(first_rank=1, ranks=1, address="127.0.0.1", port=1), ranks=2
    )
    begun = threading.Thread(target=lambda: (_wait(tmp_path / "writes_stacks1"), supervisor.cancel(stacks=True)))
    begun.start()
    watched = supervisor.watch(part)
    begun.join()
    assert (watched.cancelled, set(watched.places)) == (True, {1})  # by py-spy, else by the rank itself


def _wait(path: Path) -> None:
    from tests.patience import wait_until

    wait_until(path.exists, f"{path} did not appear")


def limited(**fields: object) -> Job:
    return replace(Job(trial_id="x", trial_dir=Path(), command=["x"], ranks=2, deadline_seconds=100), **fields)


def test_start_up_does_not_count_towards_the_trials_own_limit():
    limits = JobLimits(limited(start_seconds=50.0), started=1000.0)
    assert limits.passed(1049.0) is None
    assert limits.passed(1050.0) == Passed(limit="start", seconds=50.0)
    limits.progressed(1049.0)
    assert limits.passed(1148.0) is None
    assert limits.passed(1149.0) == Passed(limit="trial", seconds=100.0)
    assert longest_seconds(limited(start_seconds=50.0)) == 150.0


def test_a_program_that_does_not_tell_its_start_has_one_limit_and_no_hang_before_its_first_step():
    limits = JobLimits(limited(hang_seconds=10.0), started=0.0)
    assert limits.passed(99.0) is None
    assert limits.passed(100.0) == Passed(limit="trial", seconds=100.0)
    limits.progressed(50.0)
    assert limits.passed(61.0) == Passed(limit="hang", seconds=10.0)


def test_steps_that_take_longer_than_the_limit_move_it():
    moved = "5 times the longest time between two signs of progress before"
    for origins, ends_at, origin in (({}, 49.0, moved), ({"hang": SET}, 19.0, SET)):  # one that is set stays
        job = limited(start_seconds=50.0, hang_seconds=10.0, deadline_seconds=1000.0, limits_from=origins)
        limits = JobLimits(job, started=0.0)
        for at in (1.0, 9.0):
            limits.progressed(at)
        assert limits.passed(ends_at - 0.1) is None  # a step took 8 s
        assert limits.passed(ends_at) == Passed(limit="hang", seconds=ends_at - 9.0, origin=origin)


LONG = """
task: {task}
model: {model}
fixed: {{method: burst, seq_len: 1024k}}
steps: {{warmup: 1, measured: 2}}
"""
H200 = Machine(hostname="here", device="cuda", cores=8, memory_gib=200, gpu_name="NVIDIA H200", gpu_count=1)
UNKNOWN = replace(H200, gpu_name="NVIDIA X1")
A_STEP, STEPS = "4 times the {} s predicted for a step", "4 times the {} s predicted for each of 5 steps"


def the_trial(folder: Path, overrides: Sequence[str], machine: Machine, task: str = "train") -> Trial:
    """The only trial of LONG on a machine."""
    path = folder / "long.yaml"
    path.write_text(LONG.format(task=task, model=PROJECT_ROOT / "experiments" / "models" / "1b.yaml"))
    [trial] = plan(load_experiment(path, overrides=overrides), machine)
    return trial


def job_on(machine: Machine, trial: Trial) -> Job:
    return job_of(
        trial, Path("trial"), RunContext(machine=machine, launcher=LocalLauncher(), environment={}, commit="")
    )


@pytest.mark.parametrize("task", ["train", "attention"])
@pytest.mark.parametrize(
    ("machine", "overrides", "hang", "whole"),
    [
        (H200, (), A_STEP, STEPS),
        (H200, ("limits.hang_seconds=7", "limits.trial_seconds=9", "limits.start_seconds=8"), SET, SET),
        (H200, ("limits.hang_seconds=7",), SET, STEPS),
        (H200, ("limits.trial_seconds=9",), A_STEP, SET),
        (H200, ("fixed.seq_len=4k",), "the default", "the default"),
        (UNKNOWN, (), "the default", "the default"),
        (UNKNOWN, ("limits.trial_seconds=3600",), "the default", SET),
    ],
)
def test_limits_that_nobody_set_follow_the_predicted_time_of_a_step(tmp_path, task, machine, overrides, hang, whole):
    if task == "attention" and machine is H200 and "fixed.seq_len=4k" not in overrides:
        overrides = (*overrides, "fixed.seq_len=8192k")  # where a call takes minutes
    trial = the_trial(tmp_path, overrides, machine, task)
    job, step = job_on(machine, trial), step_seconds(trial.settings, machine) or 0.0
    given = dict(text.split("=") for text in overrides)
    half = float(given.get("limits.trial_seconds", 1200)) / 2
    assert job.hang_seconds == float(given.get("limits.hang_seconds", max(300.0, half, 4 * step + 60)))
    assert job.deadline_seconds == float(given.get("limits.trial_seconds", max(1200.0, 4 * 5 * step + 60)))
    assert job.start_seconds == float(given.get("limits.start_seconds", 600))
    assert job.limits_from["hang"] == hang.format(quantity(step))
    assert job.limits_from["trial"] == whole.format(quantity(step))
    assert job_on(machine, replace(trial, profile=True)).hang_seconds is None


def test_a_step_that_takes_as_long_as_predicted_is_no_hang_and_one_that_does_not_end_says_which_limit_it_passed(
    tmp_path,
):
    job = replace(job_on(H200, the_trial(tmp_path, (), H200)), trial_dir=tmp_path)
    limits = JobLimits(job, started=0.0)
    for at in (100.0, 514.0, 928.0):
        limits.progressed(at)
    assert limits.passed(928.0 + 1716.0) is None
    passed = limits.passed(928.0 + 2071.0)  # five times the longest step, which is more than four times the predicted
    _, reason = judge(job, Watched(timed_out_at=1.0, passed=passed, progress={"step": 2, "of": 3}))
    assert reason.startswith(
        "no progress for 2070 s after step 2 of 3 (limits.hang_seconds, 5 times the longest time between two signs of "
        "progress before; --set limits.hang_seconds=SECONDS changes it)"
    )


def test_a_host_without_rank_0_sees_no_progress_and_waits_for_start_up_and_trial():
    part = Part(first_rank=1, ranks=1, address="10.0.0.1", port=1)
    limits = JobLimits(limited(part=part, start_seconds=50.0, hang_seconds=10.0), started=0.0)
    assert limits.passed(149.0) is None
    assert limits.passed(150.0) == Passed(limit="trial", seconds=150.0)


def test_the_rank_that_is_elsewhere_is_named_first():
    places = {0: "wait (a.py:1)", 1: "wait (a.py:1)", 2: "load (b.py:7)", 3: "wait (a.py:1)"}
    assert places_sentence(places) == "rank 2 at load (b.py:7), ranks 0, 1, 3 at wait (a.py:1)"
    assert places_sentence({0: "wait (a.py:1)", 2: "wait (a.py:1)"}, [1]) == (
        "rank 1 left no stack, ranks 0, 2 at wait (a.py:1)"
    )
    many = {rank: f"f{rank % 6} (a.py:1)" for rank in range(48)}
    assert places_sentence(many).endswith(", 8 ranks at f3 (a.py:1), 16 more elsewhere")


def test_a_rank_without_a_stack_is_named_unless_it_has_ended(tmp_path):
    watched = Watched(
        timed_out_at=9.0,
        passed=Passed(limit="hang", seconds=39.6679, origin="the default"),
        exits=[Exit(rank=3, returncode=0, at=1.0)],
        places={0: "step (a.py:1)", 2: "step (a.py:1)"},
        progress={"step": 6, "of": 9},
    )
    _, reason = judge(limited(trial_dir=tmp_path, ranks=4), watched)
    assert reason == (
        "no progress for 39.7 s after step 6 of 9 (limits.hang_seconds, the default; --set limits.hang_seconds=SECONDS "
        "changes it); rank 1 left no stack, ranks 0, 2 at step (a.py:1); stacks in stacks/"
    )


def test_what_fails_after_a_hang_fails_because_of_it(tmp_path):
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank0.json").write_text(json.dumps({"kind": "failed", "reason": "lost", "traceback": ""}))
    watched = Watched(timed_out_at=1.0, passed=Passed(limit="hang", seconds=7.0), progress={"step": 0, "of": 3})
    status, reason = judge(limited(trial_dir=tmp_path), watched)
    assert (status, reason) == (
        "hang", "no progress for 7 s before its first step (limits.hang_seconds; --set limits.hang_seconds=SECONDS "
        "changes it); see logs/rank0.log for where it stopped",
    )  # fmt: skip


def test_the_flight_recorder_is_asked_by_its_pipe_and_writes_its_file_there(tmp_path):
    pipes, logs = tmp_path / "pipes", tmp_path / "logs"
    for folder in (pipes, logs):
        folder.mkdir()
    os.mkfifo(pipes / "rank0.pipe")
    os.mkfifo(pipes / "rank1.pipe")  # of a rank that is gone: nothing reads it

    def recorder() -> None:  # as the thread of a process group does: it opens the pipe, reads, and writes its file
        with open(pipes / "rank0.pipe", "rb") as pipe:
            pipe.read(1)
        (logs / "flight_rank0").write_bytes(b"collectives")

    listening = threading.Thread(target=recorder)
    listening.start()
    while not (logs / "flight_rank0").exists():  # until the thread has opened its end
        ask_flight_recorder(pipes, logs)
    listening.join()
    assert (logs / "flight_rank0").read_bytes() == b"collectives"
