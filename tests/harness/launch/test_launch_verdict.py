"""From what the supervisor saw to one status: cases that real processes cannot be made to show at will."""

import json
import os
import signal
from pathlib import Path

import pytest

from harness.launch.launcher import Job, ProgressTail
from harness.launch.verdict import Exit, Watched, judge, oom_kills


@pytest.fixture
def job(tmp_path):
    return Job(trial_id="x", trial_dir=tmp_path, command=["x"], ranks=2, deadline_seconds=9)


def leave_error(trial_dir: Path, rank: int, at: float, **fields: str) -> None:
    path = trial_dir / "errors" / f"rank{rank}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"kind": "failed", "reason": "it broke", "traceback": ""} | fields))
    os.utime(path, (at, at))


def killed(rank: int, at: float = 100.0) -> Exit:
    return Exit(rank=rank, returncode=-signal.SIGKILL, at=at)


def test_sigkill_is_host_oom_only_when_the_kernel_counted_one(job):
    assert judge(job, Watched(exits=[killed(1)], oom_killed=True)) == (
        "host_oom",
        "rank 1 was killed by the kernel because host memory ran out",
    )
    assert judge(job, Watched(exits=[killed(1)]))[0] == "failed"


def test_a_lost_fork_server_is_host_oom_when_the_kernel_counted_one(job):
    assert judge(job, Watched(server_lost="the fork server was killed by SIGKILL", oom_killed=True))[0] == "host_oom"


@pytest.mark.parametrize(("error_at", "expected"), [(99.0, "rank 0: it broke"), (100.01, "rank 1 exited with code 7")])
def test_the_earlier_of_an_error_and_an_exit_is_the_reason(job, error_at, expected):
    leave_error(job.trial_dir, 0, error_at)
    assert judge(job, Watched(exits=[Exit(rank=1, returncode=7, at=100.0)]))[1].startswith(expected)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("starts\nno such option\n\n", ", its last line: no such option"),
        ("Traceback:\nValueError: first\nKeyError: 'second'\n", ", its last line: KeyError: 'second'"),
        (
            "[rank0]: Traceback (most recent call last):\n[rank0]:   in get_batch\n[rank0]: IndexError: tuple index\n"
            "[rank0]:[W1122 23:29:25.3 ProcessGroupNCCL.cpp:1575] Warning: WARNING: not destroyed\n",
            ", its last error: IndexError: tuple index",
        ),
        (
            "Traceback (most recent call last):\n  File x\ntriton.OutOfResources: memory\n/x.py: UserWarning: leaked",
            ", its last error: triton.OutOfResources: memory",
        ),
        (
            "Traceback (most recent call last):\n  File x\nImportError: no apex, go on\nerror: unknown option --x\n",
            ", its last line: error: unknown option --x",
        ),
        ("starts\nWarning: slow\n", ", its last line: Warning: slow"),
        ("", ""),
    ],
)
def test_the_exception_in_a_log_is_the_reason_whatever_the_program_says_as_it_ends(job, log, said):
    (job.trial_dir / "logs").mkdir()
    (job.trial_dir / "logs" / "rank1.log").write_text(log)
    expected = f"rank 1 exited with code 1{said} (see logs/rank1.log)"
    assert judge(job, Watched(exits=[Exit(rank=1, returncode=1, at=100.0)])) == ("failed", expected)


@pytest.mark.parametrize("error_at", [99.0, 101.0])
def test_a_killed_rank_is_the_reason_however_late_its_exit_was_noticed(job, error_at):
    leave_error(job.trial_dir, 0, error_at)
    exits = [Exit(rank=2, returncode=7, at=99.5), killed(1)]
    assert judge(job, Watched(exits=exits))[1].startswith("rank 1 was killed")


@pytest.mark.parametrize(("error_at", "status"), [(49.0, "failed"), (50.2, "timeout")])
def test_what_fails_after_the_deadline_fails_because_of_it(job, error_at, status):
    leave_error(job.trial_dir, 1, error_at)
    watched = Watched(timed_out_at=50.0, exits=[Exit(rank=1, returncode=1, at=error_at + 0.1)])
    assert judge(job, watched)[0] == status


def test_oom_wins_over_an_earlier_error_of_a_peer(job):
    leave_error(job.trial_dir, 0, 1.0)
    leave_error(job.trial_dir, 1, 2.0, kind="oom", reason="no memory")
    assert judge(job, Watched(timed_out_at=50.0)) == ("oom", "rank 1: no memory")


def test_an_unreadable_error_file_is_a_failure_that_says_so(job):
    leave_error(job.trial_dir, 0, 1.0)
    (job.trial_dir / "errors" / "rank0.json").write_text("{")
    status, reason = judge(job, Watched())
    assert (status, "left an unreadable error file" in reason) == ("failed", True)


def test_secrets_of_what_a_program_said_are_in_no_reason(job):
    said = "OSError: 401 for https://bob:hunter2@hub.example/model?token=s3cr3t hf_abcdefghijklmnopqrstuvwx"
    (job.trial_dir / "logs").mkdir(exist_ok=True)
    (job.trial_dir / "logs" / "rank1.log").write_text(said + "\n", encoding="utf-8")
    _, reason = judge(job, Watched(exits=[Exit(rank=1, returncode=1, at=100.0)]))
    assert "OSError: 401 for https://" in reason
    leave_error(job.trial_dir, 0, at=99.0, kind="failed", reason=said)
    _, of_error = judge(job, Watched())
    for text in (reason, of_error):
        assert not [secret for secret in ("hunter2", "s3cr3t", "hf_abc") if secret in text]


def test_a_signal_without_a_name_fails_the_trial_alone(job):
    status, reason = judge(job, Watched(exits=[Exit(rank=1, returncode=-40, at=100.0)]))
    assert (status, "rank 1 was killed by signal 40" in reason) == ("failed", True)


def test_what_is_no_error_file_of_a_rank_is_left_alone(job):
    leave_error(job.trial_dir, 0, at=99.0, kind="failed", reason="it broke")
    folder = job.trial_dir / "errors"
    (folder / "rank0 (copy).json").write_text((folder / "rank0.json").read_text())
    status, reason = judge(job, Watched())
    assert (status, reason.startswith("rank 0: it broke")) == ("failed", True)


def test_a_rank_of_which_nothing_is_known_fails_the_trial(job):
    status, reason = judge(job, Watched(exits=[]))
    assert (status, reason) == ("failed", f"0 of {job.ranks} ranks are known to have ended; see logs/rank0.log")


@pytest.mark.parametrize(
    ("progress", "place"),
    [
        ({"step": 3, "of": 6}, "after step 3 of 6"),
        ({"step": 4, "of": 6, "phase": "update"}, "in step 4 of 6, update"),
        (
            {"step": 1, "of": 6, "phase": "backward", "layer": 12, "layers": 32},
            "in step 1 of 6, backward, layer 12 of 32",
        ),
    ],
)
def test_a_timeout_names_the_last_step_or_the_place_inside_one(job, progress, place):
    reason = judge(job, Watched(timed_out_at=50.0, progress=progress))[1]
    assert reason.startswith(f"not finished within its 9 s {place} (limits.trial_seconds; --set limits.trial_seconds=")


def test_processes_that_would_not_die_are_reported(job):
    watched = Watched(timed_out_at=50.0, left=[41, 42])
    assert "processes 41, 42 did not end after SIGKILL" in judge(job, watched)[1]


@pytest.mark.parametrize(
    ("membership", "counter"),
    [
        ("0::/me\n", "me/memory.events"),
        ("0::/unseen/from/inside\n", "memory.events"),
        ("4:memory:/me\n0::/\n", "memory/me/memory.oom_control"),
        ("4:memory:/unseen\n", "memory/memory.oom_control"),
    ],
)
def test_oom_kills_are_read_from_the_own_cgroup_of_either_version(tmp_path, membership, counter):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(membership)
    (proc / "vmstat").write_text("oom_kill 99\n")
    (cgroups / counter).parent.mkdir(parents=True)
    (cgroups / counter).write_text("oom 5\noom_kill 7\n")
    assert oom_kills(proc, cgroups) == 7


def test_oom_kills_of_the_host_count_where_the_cgroup_has_no_counter(tmp_path):
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 3\n")
    assert oom_kills(tmp_path, tmp_path / "none") == 3


def test_progress_is_read_once_per_whole_line(tmp_path):
    path = tmp_path / "progress.jsonl"
    tail = ProgressTail(path)
    assert tail.new() == []
    path.write_text('{"step": 1}\nnot json\n[1]\n{"st')
    assert tail.new() == [{"step": 1}]
    with open(path, "a") as file:
        file.write('ep": 2}\n')
    assert tail.new() == [{"step": 2}]
    assert tail.new() == []
