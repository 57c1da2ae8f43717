"""What ends a run early and what it repeats: retries, failures in a row, numbers of trials, times of the clock."""

import os
import signal
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from harness.base import interrupts
from harness.base.errors import UsageError
from harness.cli import main
from harness.records.record import read_record
from harness.run.bounds import Bounds, StopTime, job_end, stop_time
from harness.run.execution import Resume
from tests.harness.run.test_run_experiment import Runner, trial
from tests.patience import wait_until
from tests.programs import shell_program

NOON = datetime(2026, 12, 24, 12, 0, tzinfo=UTC)


@pytest.fixture
def run(tmp_path):
    return Runner(tmp_path / "run")


@pytest.mark.parametrize("status", ["node_lost", "hang"])
def test_an_infrastructure_failure_is_repeated_on_other_hosts_and_the_earlier_attempts_stay(run, status):
    code, launcher = run({32: f"{status}, then {status}, then ok"}, [trial(32)], bounds=Bounds(retries=2))
    record = run.records()[32]
    assert (code, record.status, record.attempts) == (0, "ok", 3)
    assert [job.avoid for job in launcher.jobs] == [(), ("here",), ("here",)]
    attempts = run.run_dir / "trials" / trial(32).id / "attempts"
    for number in (1, 2):
        earlier = read_record(attempts / str(number) / "record.json")
        assert (earlier.status, earlier.reason) == (status, f"the reason of {status}")


def test_a_trial_that_fails_more_often_than_it_may_be_repeated_has_failed(run):
    code, launcher = run({32: "hang"}, [trial(32), trial(64)], bounds=Bounds(retries=1))
    assert (code, len(launcher.jobs), run.records()[32].status) == (1, 3, "hang")


@pytest.mark.parametrize("status", ["failed", "timeout", "oom", "host_oom"])
def test_an_end_that_says_something_about_the_method_is_not_repeated(run, status):
    _, launcher = run({32: status}, [trial(32)], bounds=Bounds(retries=3))
    assert (len(launcher.jobs), run.records()[32].status) == (1, status)


def test_a_later_round_is_repeated_too_and_keeps_the_figures_of_the_first(run):
    run({}, [trial(32)])
    code, launcher = run({32: "node_lost, then ok"}, [trial(32)], Resume(), rounds=2, bounds=Bounds(retries=1))
    record = run.records()[32]
    assert (code, len(launcher.jobs), record.status) == (0, 2, "ok")
    assert [(one.number, one.status) for one in record.rounds] == [(1, "ok"), (2, "ok")]
    [kept] = (run.run_dir / "trials" / trial(32).id / "attempts").iterdir()
    assert [one.status for one in read_record(kept / "record.json").rounds] == ["ok", "node_lost"]


def test_a_run_ends_after_failures_in_a_row_and_a_result_between_them_starts_the_count_anew(run):
    trials = [trial(length) for length in (16, 32, 64, 128, 256)]
    code, launcher = run(
        {16: "failed", 32: "oom", 64: "failed", 128: "timeout"}, trials, bounds=Bounds(failures_in_a_row=2)
    )
    assert (code, len(launcher.jobs)) == (1, 4)
    assert run.said == [
        f"stopped after 2 failures in a row; the last was {trial(128).id} (timeout: the reason of timeout); go on "
        "with: burst run exp.yaml --resume --retry-failed"
    ]
    code, launcher = run({}, trials, Resume(retry_failed=True), bounds=Bounds(failures_in_a_row=2))
    assert (code, len(launcher.jobs)) == (0, 4)


def test_a_limit_runs_so_many_trials_in_all_their_rounds_and_resume_the_next(run):
    trials = [trial(16, "too short"), *(trial(length) for length in (32, 64, 128))]
    bounds, rounds = Bounds(trials=2), 2
    code, launcher = run({}, trials, bounds=bounds, rounds=rounds)
    ids = [each.id for each in trials[1:3]]
    assert (code, [job.trial_id for job in launcher.jobs]) == (0, ids + ids)
    assert run.said == ["stopped by --limit 2; 1 trial is left; go on with: burst run exp.yaml --resume"]
    code, launcher = run({}, trials, Resume(), bounds=bounds, rounds=rounds)
    assert (code, [job.trial_id for job in launcher.jobs]) == (0, [trials[3].id] * 2)
    assert len(run.said) == 1


def test_the_order_may_be_that_of_the_file_or_of_the_work(run):
    run.shuffle = lambda trials: trials.reverse()
    trials = [trial(64), trial(256), trial(128)]
    lengths = {}
    for order in ("random", "file", "shortest", "longest"):
        _, launcher = run({}, trials, order=order)
        lengths[order] = [int(job.trial_id.split("-s")[1].split("-")[0]) for job in launcher.jobs]
    assert lengths == {
        "random": [128, 256, 64],
        "file": [64, 256, 128],
        "shortest": [64, 128, 256],
        "longest": [256, 128, 64],
    }


def test_nothing_starts_after_the_time_by_which_a_run_is_to_have_ended(run):
    now = datetime.now(UTC)
    stop = StopTime(now + timedelta(seconds=1), "--max-hours 1", started=now - timedelta(hours=1))
    code, launcher = run({}, [trial(32)], bounds=Bounds(stop=stop))
    assert (code, launcher.jobs) == (1, [])
    assert run.said == ["stopped by --max-hours 1 after 0 of 1 trials; go on with: burst run exp.yaml --resume"]


def test_the_earlier_of_two_times_counts_and_ranks_end_a_little_before():
    stop = stop_time("2026-12-24T20:00+00:00", 5.0, now=lambda: NOON)
    assert (stop.at, stop.option) == (NOON + timedelta(hours=5), "--max-hours 5")
    assert stop.ranks_end == stop.at - timedelta(seconds=60)
    assert stop_time(None, 0.1, now=lambda: NOON).ranks_end == NOON + timedelta(seconds=360 - 18)
    assert stop_time(None, None) is None


def test_a_run_ends_before_its_slurm_job_unless_it_is_to_end_earlier():
    end = NOON + timedelta(hours=2)
    stop = stop_time(None, None, now=lambda: NOON, allocation_end=end)
    assert (stop.at, stop.ranks_end) == (end, end - timedelta(seconds=60))
    assert stop.option == "the end of Slurm's job at 2026-12-24T14:00:00"
    assert stop_time(None, 1.0, now=lambda: NOON, allocation_end=end).option == "--max-hours 1"
    # A shell that outlived its job still has the job's variables.
    assert stop_time(None, None, now=lambda: NOON, allocation_end=NOON - timedelta(hours=1)) is None


def test_a_time_of_the_clock_is_the_next_such_time():
    now = NOON.astimezone()
    later = (now + timedelta(minutes=30)).strftime("%H:%M")
    earlier = (now - timedelta(minutes=30)).strftime("%H:%M")
    assert stop_time(later, None, now=lambda: NOON).at == NOON + timedelta(minutes=30)
    assert stop_time(earlier, None, now=lambda: NOON).at == NOON + timedelta(hours=23, minutes=30)


@pytest.mark.parametrize(
    ("before", "hours", "said"),
    [
        ("tomorrow", None, "expected a time such as 06:50"),
        ("25:00", None, "expected a time such as 06:50"),
        ("2026-12-24", None, "expected a time such as 06:50"),
        ("2026-12-24T11:00+00:00", None, "that time is over"),
        (None, 0.0, "expected hours above 0"),
        (None, float("nan"), "expected hours above 0"),
        (None, 1e300, "expected hours above 0"),
    ],
)
def test_a_time_that_is_none_or_over_is_refused(before, hours, said):
    with pytest.raises(UsageError, match=said):
        stop_time(before, hours, now=lambda: NOON)


EXPERIMENT = """\
task: train
model: tiny
sweep: {seq_len: [64, 128]}
fixed: {method: burst, cp_size: 1, dtype: fp32}
steps: {warmup: 1, measured: 1_000_000}
"""


def call_once_begun(run_dir: Path, call: Callable[[], None]) -> None:
    """In another thread, once a trial has made a step that is not among those of an earlier attempt."""
    earlier = len(list(run_dir.glob("trials/*/attempts/*/progress.jsonl")))
    run = len(list(run_dir.glob("trials/*/progress.jsonl")))

    def begun() -> bool:
        moved = len(list(run_dir.glob("trials/*/attempts/*/progress.jsonl"))) - earlier == run
        return moved and bool(list(run_dir.glob("trials/*/progress.jsonl")))

    def wait() -> None:
        wait_until(begun, "no trial has begun")
        call()

    threading.Thread(target=wait, daemon=True).start()


def interrupted(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of a command that a signal ends in this process, whose handlers stay in force in one of its own."""
    handlers = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    with monkeypatch.context() as patch:
        patch.setattr(interrupts, "_current", None)
        patch.setattr("atexit.register", lambda _: None)
        try:
            return main(arguments)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def test_slurms_signal_and_a_time_limit_end_a_run_in_mid_trial_and_resume_goes_on(tmp_path, monkeypatch, capfd):
    """The clock jumps to the end of the time once a trial has made a step, so that no machine is too slow for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    arguments = ["run", "exp.yaml", "--launcher", "local", "--out", "out", "--order", "file"]
    call_once_begun(tmp_path / "out", lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert interrupted(arguments, monkeypatch) == 1
    said = capfd.readouterr().err
    assert f"interrupted after 0 of 2 trials; go on with: burst {' '.join(arguments)} --resume" in said
    [path] = tmp_path.glob("out/trials/*/record.json")
    record = read_record(path)
    assert (record.status, record.reason) == ("interrupted", "stopped by the user; --resume runs it again")

    ahead = timedelta()

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + ahead

    class Timer:
        def __init__(self, seconds: float, function: Callable[..., None], arguments: tuple[int, int]) -> None:
            self.left, self.end = seconds, lambda: function(*arguments)

        def start(self) -> None:
            call_once_begun(tmp_path / "out", self.pass_by)

        def pass_by(self) -> None:
            nonlocal ahead
            ahead = timedelta(seconds=self.left)
            self.end()

        def cancel(self) -> None: ...

    monkeypatch.setattr("harness.run.bounds.datetime", Clock)
    monkeypatch.setattr("harness.run.bounds.threading.Timer", Timer)
    assert interrupted([*arguments, "--resume", "--max-hours", "5"], monkeypatch) == 1
    assert "stopped by --max-hours 5 after 0 of 2 trials; go on with: burst run exp.yaml" in capfd.readouterr().err
    [path] = tmp_path.glob("out/trials/*/record.json")
    record = read_record(path)
    assert (record.status, record.attempts) == ("interrupted", 2)
    assert record.reason == "stopped by --max-hours 5; --resume runs it again"


@pytest.fixture
def sentences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is said of a job's end, where only the programs of the test can be found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return []


def test_without_squeue_the_end_of_a_job_is_the_variables(sentences):
    assert job_end(sentences.append, {}) is None
    assert job_end(sentences.append, {"SLURM_JOB_ID": "x", "SLURM_JOB_END_TIME": "1800000000"}) is None
    end = job_end(sentences.append, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1800000000"})
    assert end is not None
    assert end.timestamp() == 1_800_000_000
    assert sentences == []


def test_the_end_of_a_task_is_read_where_its_number_also_names_the_whole_array(sentences, tmp_path):
    shell_program(tmp_path / "squeue", "echo '8 2026-11-22T10:00:00'; echo '7 2026-11-22T12:00:00'; echo '9 N/A'")
    ends = [job_end(sentences.append, {"SLURM_JOB_ID": job, "PATH": str(tmp_path)}) for job in ("7", "8", "9")]
    assert [end and end.hour for end in ends] == [12, 10, None]
    assert sentences == []
    assert job_end(sentences.append, {"SLURM_JOB_ID": "6", "PATH": str(tmp_path)}) is None
    assert "job 6 is not known (squeue does not list it)" in sentences[0]


def test_an_end_that_nobody_knows_is_said(sentences):
    assert job_end(sentences.append, {"SLURM_JOB_ID": "7"}) is None
    (said,) = sentences
    assert said.startswith("the end of Slurm's job 7 is not known")
