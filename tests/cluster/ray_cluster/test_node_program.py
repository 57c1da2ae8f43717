"""The program that is sent to nodes, run here: it ends what it started and touches nothing else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cluster.inventory.site import RayPorts
from cluster.ray_cluster import commands
from cluster.ray_cluster.node import NodeError, ask, on_all
from cluster.ray_cluster.node_program import FOLDERS
from cluster.transport.reach import LocalRunner
from cluster.transport.runner import Unreachable
from harness.launch.ray.host import host_environment
from tests.patience import AMPLE, running, scaled, wait_until

# Stands for `ray start`: leaves a daemon in its own session that keeps the mark, one that overwrote its environment,
# as Ray's agents do with their titles, and returns.
PROGRAM = """
import os, subprocess, sys
marked = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
bare = subprocess.Popen(["sleep", "600"], env={})
deaf = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE)
away = subprocess.Popen(["sleep", "600"], start_new_session=True)
deaf.stdout.readline()
open(sys.argv[1], "w").write(f"{marked.pid} {bare.pid} {deaf.pid} {away.pid} {os.environ['RAY_AUTH_TOKEN_PATH']}")
"""


def request(action: str, **fields: Any) -> dict[str, Any]:
    return ask(LocalRunner(), [sys.executable], action, seconds=AMPLE, **fields)


def start(
    folder: Path, mark: str, program: str = PROGRAM, wait_seconds: float = AMPLE, ports: dict[str, int] | None = None
) -> dict[str, Any]:
    return request(
        "start",
        mark=mark,
        directory=str(folder / "own"),
        token="s3cret",
        command=[sys.executable, "-c", program, str(folder / "said")],
        environment={"PYTHONPATH": "/x"},
        wait_seconds=wait_seconds,
        ports=ports,
    )


def stop(folder: Path, mark: str) -> dict[str, Any]:
    return request("stop", mark=mark, directory=str(folder / "own"))


def test_stop_ends_every_process_that_start_left_and_no_other(tmp_path):
    bystander = subprocess.Popen(["sleep", "600"], env={"BURST_RAY_NODE": "test/10"}, start_new_session=True)
    try:
        start(tmp_path, "test/1")
        *pids, token = (tmp_path / "said").read_text().split()
        assert Path(token).read_text() == "s3cret"
        assert Path(token).stat().st_mode & 0o777 == 0o600
        assert Path(token).parent.stat().st_mode & 0o777 == 0o700
        assert request("status", mark="test/1", head="127.0.0.1:1") == {
            "processes": 4, "raylet": False, "gcs": False, "reaches_head": False
        }  # fmt: skip
        assert stop(tmp_path, "test/1") == {"ended": 4, "left": []}
        assert not any(running(int(pid)) for pid in pids)
        assert not (tmp_path / "own").exists()
        assert bystander.poll() is None
        assert stop(tmp_path, "test/1") == {"ended": 0, "left": []}
    finally:
        bystander.kill()
        bystander.wait()


def test_stop_ends_a_start_that_is_under_way_when_its_caller_has_died(tmp_path):
    program = "import sys, time; open(sys.argv[1], 'w'); time.sleep(600)"
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(start, tmp_path, "test/2", program)
        wait_until((tmp_path / "said").exists, "the start has not begun")
        assert stop(tmp_path, "test/2")["left"] == []
        with pytest.raises(NodeError, match="exited with"):  # the program of `start` itself is ended, too
            starting.result()
    assert not (tmp_path / "own").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_folder_that_cannot_be_removed_is_named(tmp_path):
    folder = tmp_path / "own" / "mounted"
    folder.mkdir(parents=True)
    (tmp_path / "own" / "token").touch()
    subprocess.run(["mount", "-t", "tmpfs", "burst", str(folder)], check=True)
    try:
        assert stop(tmp_path, "test/3") == {"ended": 0, "left": [str(tmp_path / "own")]}
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_port_in_use_is_named_before_anything_is_started(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            NodeError, match=f"^head_port {port} is in use there; set another in the site's ray section"
        ):
            start(tmp_path, "test/5", ports={"head_port": port})
    assert not (tmp_path / "own").exists()


def test_a_folder_that_start_did_not_make_stays(tmp_path):
    (tmp_path / "own").mkdir()
    with pytest.raises(NodeError, match=r"own cannot be made there \(File exists\); give ray.temp_dir a folder"):
        start(tmp_path, "test/4")
    stop(tmp_path, "test/4")
    assert (tmp_path / "own").exists()


def test_a_start_that_fails_is_a_sentence_of_ours_with_rays_log_and_leaves_nothing(tmp_path):
    with pytest.raises(NodeError, match=r"^Ray ended with exit code 3 as it started$") as caught:
        start(tmp_path, "test/6", "import sys; print('\\x1b[31mno route\\x1b[0m'); sys.exit(3)")
    assert caught.value.log == "==> ray-start.log <==\nno route\n"
    assert not (tmp_path / "own").exists()


@pytest.mark.slow
def test_rays_own_refusal_is_in_the_log_without_the_token(tmp_path):
    pytest.importorskip("ray")
    own = tmp_path / ("long" * 25)  # Ray refuses paths of sockets that are too long
    command = commands.start_command(
        sys.executable, RayPorts(object_store_gib=0.1), address="127.0.0.1", directory=str(own), head=""
    )
    with pytest.raises(NodeError, match=r"^Ray ended with exit code 1 as it started$") as caught:
        request(
            "start", mark="test/8", directory=str(own), token="s3cret", command=command,
            environment=dict(commands.SETTINGS), wait_seconds=AMPLE,
        )  # fmt: skip
    assert "validate_socket_filename failed" in caught.value.log
    assert "s3cret" not in caught.value.log
    assert not own.exists()


@pytest.mark.slow
def test_a_worker_that_does_not_reach_the_head_is_not_started(tmp_path):
    refusal = r"^does not reach the head at 127\.0\.0\.1:{} \(Connection refused\)"
    with socket.socket() as silent:  # it keeps the port and never listens, so a connection is refused
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(NodeError, match=refusal.format(port)):
            request(
                "start", mark="test/9", directory=str(tmp_path / "own"), token="s3cret", command=["false"],
                environment={}, wait_seconds=AMPLE, reach=f"127.0.0.1:{port}",
            )  # fmt: skip
    assert not (tmp_path / "own").exists()


def test_what_ray_would_take_from_the_ranks_is_kept_and_the_short_path_is_completed(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/lib/x86_64-linux-gnu/libc.so.6")
    monkeypatch.setenv("PATH", "/opt/own:/bin")
    program = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    start(tmp_path, "test/11", program)
    found = json.loads((tmp_path / "said").read_text())
    assert host_environment(found, own_gpus=False)["LD_PRELOAD"] == "/lib/x86_64-linux-gnu/libc.so.6"
    assert found["PATH"].startswith("/opt/own:/bin:")
    assert set(FOLDERS) <= set(found["PATH"].split(":"))
    stop(tmp_path, "test/11")


def test_a_start_that_takes_too_long_says_so_and_leaves_nothing(tmp_path):
    seconds, program = scaled(0.5), "import time; print('thinking', flush=True); time.sleep(600)"
    with pytest.raises(NodeError, match=f"^Ray was not ready within {seconds:g} s$"):
        start(tmp_path, "test/7", program, seconds)
    assert not (tmp_path / "own").exists()


def test_facts_name_addresses_a_free_port_and_whether_a_dashboard_could_start(monkeypatch, tmp_path):
    facts = request("facts", toward="127.0.0.1", dashboard=False)
    assert facts["interfaces"]["lo"] == facts["source_address"] == "127.0.0.1"
    assert 0 < facts["free_port"] < 65536
    assert facts["dashboard"]
    (tmp_path / "ray").mkdir()  # a Ray without its extra
    (tmp_path / "ray" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = request("facts", toward="", dashboard=True)
    assert (facts["dashboard"], facts["source_address"]) == (False, "")


def test_an_interpreter_that_is_none_is_one_sentence():
    with pytest.raises(NodeError, match=r"false exited with 1 \(no reason given\); check software\.python"):
        ask(LocalRunner(), ["false"], "status", seconds=AMPLE, mark="m", head="127.0.0.1:1")
    with pytest.raises(NodeError, match="/no/python does not exist"):
        ask(LocalRunner(), ["/no/python"], "status", seconds=AMPLE, mark="m", head="127.0.0.1:1")
    with pytest.raises(NodeError, match="status was not done within 1 s"):
        ask(LocalRunner(), ["sh", "-c", "sleep 600"], "status", seconds=1, mark="m", head="127.0.0.1:1")


def test_where_one_node_fails_the_others_still_answer():
    def work(number: int) -> int:
        if number == 1:
            raise Unreachable("down")
        time.sleep(0.01)
        return number

    assert on_all([0, 1, 2], work) == [0, "down", 2]
    assert on_all([], work) == []
