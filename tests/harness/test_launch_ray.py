"""The Ray launcher on one machine: the same jobs, in an actor of a Ray that is private to the launcher."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")

from engine.settings import ModelShape, Steps, TrialSettings, to_json
from harness.launch import Job
from harness.launch.ray import RayLauncher
from harness.launch.ray_janitor import marked
from tests.patience import AMPLE, wait_for_end, wait_until

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


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_jobs_run_in_an_actor_and_a_lost_actor_costs_one_job(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # somebody else's Ray: not ours to use
    launcher = RayLauncher()
    try:
        lines: list[dict[str, object]] = []
        outcome = launcher.run(job(tmp_path / "well", "well"), lines.append)
        assert (outcome.status, outcome.reason) == ("ok", "")
        assert lines == [{"step": 1, "of": 2}, {"step": 2, "of": 2}]
        environment = (tmp_path / "well" / "environment").read_text()
        assert '"CUDA_VISIBLE_DEVICES": "0,1"' in environment
        assert "RAY_AUTH_TOKEN" not in environment

        def kill_actor(line: dict[str, object]) -> None:
            if line["step"] == 2:
                server = int((tmp_path / "hang" / "supervisor").read_text())
                os.kill(parent(server), signal.SIGKILL)

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
from harness.launch.ray import RayLauncher
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
    wait_until((tmp_path / "environment").exists, "no rank has started")
    directory = ray_directory(program.pid)
    assert len(marked(directory)) > 3
    if number == signal.SIGINT:
        os.killpg(program.pid, number)  # as a terminal does: the whole foreground group
    else:
        program.kill()
    assert program.wait(AMPLE) == code
    wait_for_end([int(path.read_text()) for path in tmp_path.glob("pid*")])
    wait_for_end(marked(directory))
    wait_until(lambda: not Path(directory).exists(), f"{directory} is left")


def ray_directory(owner: int) -> str:
    """The directory of the Ray that `owner` embeds, as its janitor was told."""
    for stat in Path("/proc").glob("[0-9]*/cmdline"):
        arguments = stat.read_text().split("\0") if stat.exists() else []
        if "harness.launch.ray_janitor" in arguments and parent(int(stat.parent.name)) == owner:
            return arguments[arguments.index("harness.launch.ray_janitor") + 1]
    raise AssertionError("no janitor")


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


def test_without_ray_one_sentence_names_the_other_launcher(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="use --launcher local"):
        RayLauncher()
