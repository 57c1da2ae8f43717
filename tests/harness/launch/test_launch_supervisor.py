"""The supervisor with real processes: every way a job can end, and that nothing is left running."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness.launch.forkserver import ForkServer
from harness.launch.launcher import Job, Outcome
from harness.launch.supervisor import Patience, Supervisor
from tests.patience import AMPLE, scaled, wait_for_end, wait_until
from tests.processes import parent_of

HERE = Path(__file__).parent


def quick() -> Patience:
    """Little, because tests wait it out, and as much as ranks need at this moment to write what they saw."""
    return Patience(failure=scaled(0.5), terminate=scaled(0.5), poll=0.02)


@pytest.fixture
def supervisor():
    supervisor = Supervisor({**os.environ, "PYTHONPATH": str(HERE)}, preload=(), patience=quick())
    yield supervisor
    supervisor.close()


def job(trial_dir: Path, behaviour: str, ranks: int = 2, deadline: float = AMPLE, **environment: str) -> Job:
    return Job(
        trial_id=behaviour,
        trial_dir=trial_dir,
        command=[sys.executable, "-m", "launch_rank_program", str(trial_dir), behaviour],
        ranks=ranks,
        environment=environment,
        deadline_seconds=deadline,
    )


def pids(trial_dir: Path, pattern: str = "pid*") -> list[int]:
    return [int(pid) for path in trial_dir.glob(pattern) for pid in path.read_text().split()]


def wait_for(path: Path) -> None:
    wait_until(path.exists, f"{path} did not appear")


def test_ranks_get_a_torchrun_environment_a_log_and_a_session_each(supervisor, tmp_path):
    lines: list[dict[str, object]] = []
    outcome = supervisor.run(job(tmp_path, "well", COLOUR="blue"), lines.append)
    assert (outcome.status, outcome.reason) == ("ok", "")
    assert lines == [{"step": 1, "of": 2}, {"step": 2, "of": 2}]
    environments = [json.loads((tmp_path / f"env{rank}.json").read_text()) for rank in range(2)]
    for rank, environment in enumerate(environments):
        assert environment["COLOUR"] == "blue"
        assert (environment["RANK"], environment["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert f"rank {rank} speaks" in (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert (tmp_path / f"session{rank}").read_text().split()[0] == (tmp_path / f"pid{rank}").read_text()
    assert environments[0]["MASTER_PORT"] == environments[1]["MASTER_PORT"]


def test_emulated_nodes_get_one_host_id_each(supervisor, tmp_path):
    four = job(tmp_path, "well", ranks=4)
    supervisor.run(Job(trial_id="x", trial_dir=tmp_path, command=four.command, ranks=4, emulate_nodes=2))
    hosts = [json.loads((tmp_path / f"env{rank}.json").read_text())["NCCL_HOSTID"] for rank in range(4)]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]


def test_one_server_serves_all_jobs_with_one_environment(supervisor, tmp_path):
    parents = []
    for name, colour in (("a", "blue"), ("b", "blue"), ("c", "red")):
        directory = tmp_path / name
        supervisor.run(job(directory, "well", ranks=1, COLOUR=colour))
        parents.append((directory / "session0").read_text().split()[1])
    assert parents[0] == parents[1] != parents[2]


def test_a_foreign_program_runs_without_python(supervisor, tmp_path):
    script = "echo rank $RANK; echo {} > $1/out$RANK"
    command = ["/bin/sh", "-c", script, "sh", str(tmp_path)]
    outcome = supervisor.run(Job(trial_id="x", trial_dir=tmp_path, command=command, ranks=2))
    assert outcome.status == "ok"
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out0", "out1"]


def test_a_program_that_does_not_exist_fails_with_its_name(supervisor, tmp_path):
    outcome = supervisor.run(Job(trial_id="x", trial_dir=tmp_path, command=["no-such-program"], ranks=1))
    assert outcome.status == "failed"
    assert "no-such-program cannot be executed (No such file or directory)" in outcome.reason


@pytest.mark.parametrize(
    ("behaviour", "ranks", "status", "reason"),
    [
        ("rank1_killed", 2, "failed", "rank 1 was killed by SIGKILL before its first step (see logs/rank1.log)"),
        ("rank1_killed_peer_complains", 2, "failed", "rank 1 was killed by SIGKILL before its first step"),
        ("rank1_oom", 3, "oom", "rank 1: CUDA out of memory: tried to allocate 3 GiB"),
        ("refuses", 2, "refused", "8 heads do not divide over 3 ranks; choose cp_size 1, 2, 4 or 8"),
        ("error_then_hangs", 2, "failed", "rank 0: shapes differ (see logs/rank0.log)"),
    ],
)
def test_the_first_rank_that_ends_badly_gives_status_and_reason_and_ends_the_others(
    supervisor, tmp_path, behaviour, ranks, status, reason
):
    """At once: neither the deadline nor the grace of a job that may save is waited for."""
    outcome = supervisor.run(replace(job(tmp_path, behaviour, ranks=ranks), grace_seconds=AMPLE))
    assert (outcome.status, reason in outcome.reason) == (status, True), outcome.reason
    wait_for_end(pids(tmp_path))


def test_the_first_failure_is_the_reason_and_the_others_get_time_to_write_theirs(supervisor, tmp_path):
    outcome = supervisor.run(job(tmp_path, "rank1_raises_others_follow", ranks=3))
    assert outcome.status == "failed"
    assert "rank 1 exited with code 1, its last line: RuntimeError: the first failure" in outcome.reason
    assert sorted(path.name for path in (tmp_path / "errors").iterdir()) == ["rank0.json", "rank2.json"]


def test_a_deaf_rank_past_its_deadline_is_a_timeout_and_is_killed(supervisor, tmp_path):
    deadline = scaled(1.5)
    outcome = supervisor.run(job(tmp_path, "hangs_deaf", deadline=deadline))
    assert outcome.status == "timeout"
    assert f"not finished within its {deadline:g} s before its first step" in outcome.reason
    assert len(pids(tmp_path)) == 2
    assert len(list(tmp_path.glob("deaf*"))) == 2
    wait_for_end(pids(tmp_path))


def test_grandchildren_are_ended_also_those_with_sessions_of_their_own(supervisor, tmp_path):
    outcome = supervisor.run(job(tmp_path, "grandchildren"))
    assert outcome.status == "ok"
    left = pids(tmp_path, "grandchildren*")
    assert len(left) == 4
    wait_for_end(left)


def test_the_next_job_runs_after_the_fork_server_was_killed(supervisor, tmp_path):
    outcome = run_and_kill_server(supervisor, job(tmp_path / "a", "hangs_deaf"))
    assert outcome.status == "failed"
    assert outcome.reason.startswith("the fork server was killed by SIGKILL")
    wait_for_end(pids(tmp_path / "a"))
    assert supervisor.run(job(tmp_path / "b", "well")).status == "ok"


def run_and_kill_server(supervisor: Supervisor, job: Job) -> Outcome:
    def kill() -> None:
        wait_for(job.trial_dir / "deaf0")
        wait_for(job.trial_dir / "deaf1")
        status = Path(f"/proc/{(job.trial_dir / 'pid0').read_text()}/status").read_text()
        server = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid"))
        os.kill(server, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = supervisor.run(job)
    killer.join()
    return outcome


def test_a_fork_server_that_is_killed_between_jobs_costs_none(supervisor, tmp_path):
    assert supervisor.run(job(tmp_path / "before", "well")).status == "ok"
    server = int((tmp_path / "before" / "session0").read_text().split()[1])
    os.kill(server, signal.SIGKILL)
    wait_for_end([server])
    assert supervisor.run(job(tmp_path / "after", "well")).status == "ok"


def test_cancelling_from_another_thread_interrupts_the_job(supervisor, tmp_path):
    def cancel() -> None:
        wait_for(tmp_path / "deaf0")
        supervisor.cancel()

    threading.Thread(target=cancel).start()
    outcome = supervisor.run(job(tmp_path, "hangs_deaf"))
    assert outcome.status == "interrupted"
    wait_for_end(pids(tmp_path))


def test_a_rank_that_is_asked_to_stop_before_it_runs_ends_at_once(tmp_path: Path) -> None:
    """The request is there already when the server forks the rank; it was lost, and a training run went on."""
    for _ in range(3):
        server = ForkServer(os.environ, ())
        try:
            server.start(0, ["sleep", "60"], {}, tmp_path / "rank0.log")
            server.terminate()
            codes: list[int] = []
            give_up = time.monotonic() + scaled(20)
            while not codes and time.monotonic() < give_up:
                codes += [each["returncode"] for each in server.events(0.5) if each["event"] == "exited"]
            assert codes == [-signal.SIGTERM]
        finally:
            server.close()


@pytest.mark.parametrize(("grace", "saved"), [(AMPLE, 2), (None, 0)])
def test_a_job_with_a_grace_of_its_own_may_finish_what_it_does_when_asked_to_stop(supervisor, tmp_path, grace, saved):
    def cancel() -> None:
        wait_for(tmp_path / "ready0")
        wait_for(tmp_path / "ready1")
        supervisor.cancel()

    threading.Thread(target=cancel).start()
    # Without a grace of its own it would save for ever; with one, for longer than the patience of these tests.
    seconds = AMPLE if grace is None else 3 * quick().terminate
    outcome = supervisor.run(replace(job(tmp_path, "saves_when_asked", SECONDS=str(seconds)), grace_seconds=grace))
    assert outcome.status == "interrupted"
    assert len(list(tmp_path.glob("saved*"))) == saved
    wait_for_end(pids(tmp_path))


LAUNCH = """
import os, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_launch_supervisor import job, quick
from harness.launch.supervisor import Supervisor
supervisor = Supervisor({{**os.environ, "PYTHONPATH": {here!r}}}, preload=(), patience=quick())
try:
    supervisor.run(job(Path({trial!r}), {what!r}))
except KeyboardInterrupt:
    sys.exit(77)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 77)])
def test_neither_ranks_nor_their_directories_outlive_a_launcher_that_is_killed_or_interrupted(tmp_path, number, code):
    script = LAUNCH.format(here=str(HERE), trial=str(tmp_path), what="grandchildren_then_hang")
    directories = tmp_path / "directories"
    directories.mkdir()
    launcher = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(directories)})
    wait_for(tmp_path / "grandchildren0")
    wait_for(tmp_path / "grandchildren1")
    assert any(directories.glob("burst-*"))
    launcher.send_signal(number)
    assert launcher.wait(AMPLE) == code
    wait_for_end(pids(tmp_path) + pids(tmp_path, "grandchildren*"))
    wait_until(lambda: not any(directories.iterdir()), "a directory is left")


def test_the_next_run_removes_what_killed_ones_left_and_nothing_of_those_that_live(tmp_path, monkeypatch):
    directories = tmp_path / "directories"
    directories.mkdir()
    launchers, servers, own = {}, {}, {}
    for name in ("killed", "serves", "lives"):
        trial = tmp_path / name
        script = LAUNCH.format(here=str(HERE), trial=str(trial), what="hangs_deaf")
        before = set(directories.iterdir())
        launchers[name] = subprocess.Popen(
            [sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(directories)}
        )
        wait_for(trial / "deaf0")
        wait_for(trial / "deaf1")
        servers[name] = parent_of(pids(trial)[0])
        [own[name]] = set(directories.iterdir()) - before
    theirs = directories / "burst-ranks-theirs"
    theirs.mkdir()
    if os.geteuid() == 0:
        os.chown(theirs, 12345, 12345)
    try:
        for name in ("killed", "serves"):
            launchers[name].send_signal(signal.SIGSTOP)  # it must not see its server end, nor the server that it ends
            os.kill(servers[name], signal.SIGSTOP if name == "serves" else signal.SIGKILL)
            launchers[name].kill()
            launchers[name].wait()
        wait_for_end(pids(tmp_path / "killed"))
        assert own["killed"].exists()
        monkeypatch.setattr(tempfile, "tempdir", str(directories))
        ForkServer(os.environ, ()).close()
        kept = {own["serves"], own["lives"], *([theirs] if os.geteuid() == 0 else [])}
        assert set(directories.iterdir()) == kept
    finally:
        launchers["lives"].kill()
        launchers["lives"].wait()
        os.kill(servers["serves"], signal.SIGCONT)
    wait_for_end([*pids(tmp_path / "serves"), *pids(tmp_path / "lives")])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_fork_server_that_still_imports_ends_with_its_launcher(tmp_path, number):
    (tmp_path / "imports_for_long.py").write_text(
        "import os, pathlib, time\n"
        f"aside = pathlib.Path({str(tmp_path)!r}, 'aside')\n"
        "aside.write_text(str(os.getpid()))\n"
        "aside.rename(aside.with_name('server'))\n"
        "time.sleep(600)\n"
    )
    script = LAUNCH.format(here=str(HERE), trial=str(tmp_path), what="well")
    script = script.replace("preload=()", "preload=('imports_for_long',)")
    script = script.replace(f'"PYTHONPATH": {str(HERE)!r}', f'"PYTHONPATH": {f"{HERE}:{tmp_path}"!r}')
    launcher = subprocess.Popen([sys.executable, "-c", script])
    wait_for(tmp_path / "server")
    launcher.send_signal(number)
    assert launcher.wait(AMPLE) == -number
    wait_for_end(pids(tmp_path, "server"))


def test_a_preload_that_cannot_be_forked_leaves_the_ranks_to_run_by_themselves(tmp_path):
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    path = os.pathsep.join((str(HERE), str(tmp_path)))
    supervisor = Supervisor({**os.environ, "PYTHONPATH": path}, preload=("starts_a_thread",), patience=quick())
    try:
        assert supervisor.run(job(tmp_path, "well")).status == "ok"
    finally:
        supervisor.close()
