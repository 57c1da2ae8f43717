"""The launcher for several machines, on a Ray cluster of one: jobs, losses, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from harness.cli import main
from harness.launch.launcher import Job
from harness.launch.ray.connection import RayConnection, signal_handlers_kept
from harness.launch.ray.launcher import RayLauncher
from tests.hosts.ray_head import RayHead, ray_head
from tests.patience import AMPLE, wait_for_end, wait_until
from tests.processes import parent_of
from tests.slow import slow

PROJECT = Path(__file__).parents[3]

PROGRAM = """
import json, os, sys, time
trial, behaviour = sys.argv[1:]
open(f"{trial}/pid{os.environ['RANK']}", "w").write(str(os.getpid()))
open(f"{trial}/supervisor", "w").write(str(os.getppid()))
if os.environ["RANK"] == "0":
    with open(f"{trial}/progress.jsonl", "a") as file:
        for step in (1, 2):
            file.write(json.dumps({"step": step, "of": 2}) + chr(10))
    open(f"{trial}/environment.json", "w").write(json.dumps(dict(os.environ)))
if behaviour == "hang":
    time.sleep(600)
"""


def job(trial_dir: Path, behaviour: str) -> Job:
    trial_dir.mkdir(exist_ok=True)
    command = [sys.executable, "-c", PROGRAM, str(trial_dir), behaviour]
    return Job(trial_id=behaviour, trial_dir=trial_dir, command=command, ranks=2, deadline_seconds=AMPLE)


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_head(environment={"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "7"}) as started:
        yield started


def joined(head: RayHead, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of this module's that joins the cluster; Ray can join one cluster in the life of a process."""
    command = [
        sys.executable,
        "-c",
        f"from tests.harness.launch.test_launch_ray import {program}; {program}()",
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), **head.environment}
    return subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=3 * AMPLE, check=False
    )


def launcher_of(address: str) -> RayLauncher:
    return RayLauncher(RayConnection(address), lambda sentence: print(sentence, file=sys.stderr))


def runs_jobs() -> None:
    folder, launcher = Path(sys.argv[2]), launcher_of(sys.argv[1])
    found: dict[str, object] = {"hosts": launcher.machine.nodes, "ranks": launcher.machine.max_ranks}
    try:
        lines: list[dict[str, object]] = []
        outcome = launcher.run(job(folder / "well", "well"), lines.append)
        found["well"] = [outcome.status, outcome.reason, lines]

        def kill_supervisor(line: dict[str, object]) -> None:
            if line["step"] == 2:
                os.kill(parent_of(int((folder / "hang" / "supervisor").read_text())), signal.SIGKILL)

        lost = launcher.run(job(folder / "hang", "hang"), kill_supervisor)
        found["lost"] = [lost.status, lost.reason, list(lost.lost) == lost.hosts]
        wait_for_end([int(path.read_text()) for path in (folder / "hang").glob("pid*")])
    finally:
        launcher.close()
    print(json.dumps(found))


def test_jobs_run_under_a_supervisor_and_a_lost_one_costs_one_job(head, tmp_path):
    done = joined(head, "runs_jobs", head.address, str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["hosts"], found["ranks"]) == (1, 4)  # without GPUs a host has as many ranks as Ray has CPUs of it
    assert found["well"] == ["ok", "", [{"step": 1, "of": 2}, {"step": 2, "of": 2}]]
    status, reason, same = found["lost"]
    assert (status, same) == ("node_lost", True)
    assert "was lost (the supervisor of its ranks has ended) after step 2 of 2" in reason
    assert reason.endswith("; --resume --retry-failed runs it on other hosts")
    environment = json.loads((tmp_path / "well" / "environment.json").read_text())
    assert not {"CUDA_VISIBLE_DEVICES", "RAY_AUTH_TOKEN_PATH"} & environment.keys()
    rendered = json.loads((tmp_path / "well" / "environment" / f"{os.uname().nodename}.json").read_text())
    assert (rendered["address"], rendered["ranks"]) == ("127.0.0.1", [0, 1])


def takes_a_host_of_another() -> None:
    from harness.launch.ray import launcher as module

    module.PLACEMENT_SECONDS = float(sys.argv[2])
    if sys.argv[3] == "differs":
        module.own_versions = lambda: {"torch": "0.1"}
    launcher_of(sys.argv[1])


def hangs() -> None:
    launcher = launcher_of(sys.argv[1])
    try:
        launcher.run(job(Path(sys.argv[2]), "hang"))
    except KeyboardInterrupt:
        sys.exit(77)
    finally:
        launcher.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 77), *slow((signal.SIGKILL, -signal.SIGKILL))])
def test_a_run_has_its_hosts_alone_and_interrupted_or_killed_it_leaves_no_ranks(head, tmp_path, number, code):
    program = subprocess.Popen(
        [
            *(sys.executable, "-c", "from tests.harness.launch.test_launch_ray import hangs; hangs()"),
            *(head.address, str(tmp_path)),
        ],
        cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT), **head.environment}, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until((tmp_path / "environment.json").exists, "no rank has started")
        if number == signal.SIGINT:
            done = joined(head, "takes_a_host_of_another", head.address, "1", "")
            assert "another program of the cluster has reserved its CPUs or GPUs" in done.stderr
            os.killpg(program.pid, number)  # as a terminal does: the whole foreground group
        else:
            program.kill()
        assert program.wait(AMPLE) == code
    finally:
        program.kill()
    wait_for_end([int(path.read_text()) for path in tmp_path.glob("pid*")])


@pytest.mark.slow
def test_a_host_with_other_software_is_left_out_with_the_difference(head):
    done = joined(head, "takes_a_host_of_another", head.address, f"{AMPLE}", "differs")
    assert done.returncode == 1
    [said] = {line for line in done.stderr.splitlines() if line.startswith("left out: ")}
    assert "torch is " in said
    assert said.endswith(" there but 0.1 on this machine; install the same there")


WITHOUT_RAY = """
from harness.launch.ray.connection import import_ray
ray = import_ray()
try:
    ray.put(1)
except ray.exceptions.RaySystemError:
    print("refused")
print(ray.is_initialized())
"""


def test_a_call_without_a_ray_starts_none():
    command = [sys.executable, "-c", WITHOUT_RAY]
    said = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=AMPLE, check=True).stdout
    assert said.split() == ["refused", "False"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ray", "ray://127.0.0.1:10001"], "expected HOST:PORT of the head, as ray start prints it, or auto"),
        (["--ray", "nobody"], "expected HOST:PORT of the head, as ray start prints it, or auto"),
        (["--ray", "auto", "--launcher", "local"], "leave it out with --nodes and --ray"),
        (["--ray", "auto", "--nodes", "lab.yaml"], "--nodes and --ray both name the hosts; give one of them"),
    ],
)
def test_an_address_that_is_none_is_refused_in_one_sentence(arguments, said, capsys, tmp_path):
    experiment = str(PROJECT / "experiments" / "quickstart.yaml")
    assert main(["run", experiment, *arguments, "--out", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "out").exists()


def test_a_cluster_that_does_not_answer_is_said_at_once(tmp_path, monkeypatch, capsys):
    import socket

    with socket.socket() as silent:  # bound and not listening: nobody else can answer at its port either
        silent.bind(("127.0.0.1", 0))
        typed = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", typed)
        experiment = str(PROJECT / "experiments" / "quickstart.yaml")
        for way in (["--ray", "auto"], ["--launcher", "ray"], ["--ray", typed]):
            assert main(["run", experiment, *way, "--out", str(tmp_path / "out")]) == 2
            said = capsys.readouterr().err
            assert "cannot be joined (no Ray answers there); start it again" in said
        assert f"the Ray cluster at {typed} cannot" in said  # Ray itself takes the host's other address for loopback


def test_a_sigterm_that_ray_would_answer_itself_is_a_ctrl_c():
    before = signal.getsignal(signal.SIGTERM)

    @signal_handlers_kept()
    def start_ray() -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as `ray.init` does
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        start_ray()
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_ray_one_sentence_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'burst-harness\[ray\]'"):
        RayConnection("auto")
