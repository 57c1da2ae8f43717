"""The Ray launcher on one machine: the same jobs, in an actor of a Ray that is private to the launcher."""

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")

from engine.settings import ModelShape, Steps, TrialSettings, to_json
from harness.cli import main
from harness.launch.launcher import Job
from harness.launch.ray.janitor import marked
from harness.launch.ray.launcher import RayLauncher, signal_handlers_kept
from tests.patience import AMPLE, wait_for_end, wait_until
from tests.processes import command_of, parent_of

PROJECT = Path(__file__).parents[2]
SHAPE = ModelShape(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)

PROGRAM = """
import json, os, sys, time
trial, behaviour = sys.argv[1:]
open(f"{trial}/pid{os.environ['RANK']}", "w").write(str(os.getpid()))
open(f"{trial}/supervisor", "w").write(str(os.getppid()))
if os.environ["RANK"] == "0":
    with open(f"{trial}/progress.jsonl", "a") as file:
        for step in (1, 2):
            file.write(json.dumps({"step": step, "of": 2}) + chr(10))
    open(f"{trial}/environment", "w").write(json.dumps(dict(os.environ)))
if behaviour == "hang":
    time.sleep(600)
"""


def job(trial_dir: Path, behaviour: str) -> Job:
    trial_dir.mkdir(exist_ok=True)
    command = [sys.executable, "-c", PROGRAM, str(trial_dir), behaviour]
    return Job(trial_id=behaviour, trial_dir=trial_dir, command=command, ranks=2, deadline_seconds=AMPLE)


WITHOUT_RAY = """
from harness.launch.ray.launcher import import_ray
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


def test_jobs_run_in_an_actor_and_a_lost_actor_costs_one_job(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # another program's Ray, which is not used
    launcher = RayLauncher()
    try:
        lines: list[dict[str, object]] = []
        outcome = launcher.run(job(tmp_path / "well", "well"), lines.append)
        assert (outcome.status, outcome.reason) == ("ok", "")
        assert lines == [{"step": 1, "of": 2}, {"step": 2, "of": 2}]
        environment = (tmp_path / "well" / "environment").read_text()
        assert '"CUDA_VISIBLE_DEVICES": "0,1"' in environment
        assert "RAY_AUTH_TOKEN" not in environment

        (tmp_path / "file").touch()
        with pytest.raises(NotADirectoryError) as met:  # a file system's answer in the actor is as one here
            launcher.run(replace(job(tmp_path / "well", "well"), trial_dir=tmp_path / "file" / "trial"))
        assert met.value.filename == str(tmp_path / "file" / "trial" / "logs")

        def kill_actor(line: dict[str, object]) -> None:
            if line["step"] == 2:
                server = int((tmp_path / "hang" / "supervisor").read_text())
                os.kill(parent_of(server), signal.SIGKILL)

        outcome = launcher.run(job(tmp_path / "hang", "hang"), kill_actor)
        assert outcome.status == "node_lost"
        wait_for_end([int(path.read_text()) for path in (tmp_path / "hang").glob("pid*")])
        assert launcher.run(job(tmp_path / "again", "again")).status == "ok"
    finally:
        launcher.close()


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from test_launch_ray import job
from harness.launch.ray.launcher import RayLauncher
launcher = RayLauncher()
try:
    launcher.run(job(Path({trial!r}), "hang"))
except KeyboardInterrupt:
    sys.exit(77)
finally:
    launcher.close()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 77), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupted_or_killed_program_leaves_neither_ranks_nor_ray(tmp_path, number, code):
    script = SCRIPT.format(here=str(Path(__file__).parent), trial=str(tmp_path))
    program = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        wait_until((tmp_path / "environment").exists, "no rank has started")
        directory = ray_directory(program.pid)
        assert len(marked(directory)) > 3
        wait_until(lambda: len(titled_agents(directory)) == 2, "an agent of Ray lost the mark when it took its title")
        assert niceness_of(marked(directory)) == niceness_of([program.pid])
        if number == signal.SIGINT:
            os.killpg(program.pid, number)  # as a terminal does: the whole foreground group
        else:
            program.kill()
        assert program.wait(AMPLE) == code
    finally:
        program.kill()  # its janitor ends the rest
    wait_for_end([int(path.read_text()) for path in tmp_path.glob("pid*")])
    wait_for_end(marked(directory))
    wait_until(lambda: not Path(directory).exists(), f"{directory} is left")


def titled_agents(directory: str) -> list[int]:
    """Ray's agents that have written their title, and are found by the mark none the less."""
    return [pid for pid in marked(directory) if re.match(r"ray::\w+Agent", command_of(pid))]


def niceness_of(pids: Iterable[int]) -> set[int]:
    """Of those processes that still run."""
    found = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found.add(os.getpriority(os.PRIO_PROCESS, pid))
    return found


def ray_directory(owner: int) -> str:
    """The directory of the Ray that `owner` embeds, from its janitor's arguments."""
    for stat in Path("/proc").glob("[0-9]*/cmdline"):
        arguments = stat.read_text().split("\0") if stat.exists() else []
        if "harness.launch.ray.janitor" in arguments and parent_of(int(stat.parent.name)) == owner:
            return arguments[arguments.index("harness.launch.ray.janitor") + 1]
    raise AssertionError("no janitor")


PRIVATE = """
import json, os, sys
from pathlib import Path
from harness.launch.ray.launcher import RayLauncher
from harness.launch.ray.janitor import marked
launcher = RayLauncher()
try:
    launcher._ready_actor()
    folder = launcher._directory
    processes = [os.getpid(), *marked(folder)]
    sockets = set()
    for link in (link for process in processes for link in Path(f"/proc/{process}/fd").glob("*")):
        try:
            sockets.add(os.readlink(link)[8:-1])
        except OSError:
            pass
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    heard = [line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[9] in sockets]
    print(json.dumps({"mode": os.stat(folder).st_mode & 0o777, "kept": os.listdir(folder), "heard": heard}))
finally:
    launcher.close()
"""


def test_an_embedded_ray_lies_in_a_folder_of_its_own_and_is_heard_on_this_machine_alone():
    done = subprocess.run(
        [sys.executable, "-c", PRIVATE], cwd=PROJECT, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["mode"], found["kept"]) == (0o700, ["ray"])
    assert len(found["heard"]) > 3  # of its servers and of this program
    assert set(found["heard"]) <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_a_ray_that_does_not_start_is_one_sentence(tmp_path):
    """Its folder can hold no file: a /tmp without inodes, seen by the program alone."""
    if any(path.is_relative_to("/tmp") for path in (PROJECT.resolve(), Path(sys.prefix).resolve())):
        pytest.skip("the project or its interpreter is in /tmp, which this test replaces for the program")
    (tmp_path / "exp.yaml").write_text(
        "{task: train, model: tiny, fixed: {method: burst, seq_len: 128}, steps: {warmup: 1, measured: 1}}"
    )
    mounts = f"mount --bind {tmp_path} /mnt && mount -t tmpfs -o nr_inodes=3 none /tmp"
    command = f"{sys.executable} -m harness run /mnt/exp.yaml --launcher ray --out /mnt/out"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mounts} && exec {command}"],
        cwd=PROJECT, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount of its own here: {done.stderr.strip()}")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "burst: Ray did not start (" in done.stderr
    assert "use --launcher local" in done.stderr.splitlines()[-1]


def test_a_ray_that_places_no_supervisor_in_time_ends_a_run_as_a_failure_and_not_as_the_users_error(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("harness.launch.ray.launcher.PLACEMENT_SECONDS", 0.5)
    start = RayLauncher._start_ray

    def started_and_asked_for_what_it_has_not(launcher):
        start(launcher)
        module = importlib.import_module("ray.util.placement_group")  # not before the launcher has imported ray
        place = module.placement_group
        monkeypatch.setattr(module, "placement_group", lambda _bundles, strategy: place([{"CPU": 1e6}], strategy))

    monkeypatch.setattr(RayLauncher, "_start_ray", started_and_asked_for_what_it_has_not)
    (tmp_path / "exp.yaml").write_text(
        "{task: train, model: tiny, fixed: {method: burst, seq_len: 128}, steps: {warmup: 1, measured: 1}}"
    )
    run = ["run", str(tmp_path / "exp.yaml"), "--launcher", "ray", "--out", str(tmp_path / "out")]
    assert main(run) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "burst: Ray did not start (it placed no supervisor within 0.5 s); use --launcher local, which needs none"
    )


def test_jobs_share_ranks_in_the_actor(tmp_path):
    """What ends and hands over ranks is the supervisor's, see test_shared_ranks.py."""
    trial = {"task": "attention", "method": "burst", "seq_len": 64, "dtype": "fp32", "steps": Steps(measured=1)}
    settings = TrialSettings(model=SHAPE, **trial)
    launcher = RayLauncher()
    try:
        turns = []
        for name in ("first", "second"):
            own = job(tmp_path / name, "")
            written = {"settings": to_json(settings), "method": "tests.harness.unruly_method"}
            (own.trial_dir / "trial.json").write_text(json.dumps(written))
            command = [sys.executable, "-m", "engine.worker", str(own.trial_dir)]
            outcome = launcher.run(replace(own, command=command, ranks=1, share=""))
            log = (own.trial_dir / "logs" / "rank0.log").read_text()
            turns.append((outcome.status, outcome.turn, log.partition(" runs")[0].rpartition(" ")[2]))
    finally:
        launcher.close()
    [process] = {process for _, _, process in turns}
    assert [turn[:2] for turn in turns] == [("ok", 1), ("ok", 2)]
    wait_for_end([int(process)])


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
        RayLauncher()
