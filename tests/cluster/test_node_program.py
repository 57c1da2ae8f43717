"""The program that is sent to nodes, run here: it ends what it started and touches nothing else."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.inventory.site import RayPorts
from cluster.ray_cluster import ray_commands
from cluster.ray_cluster.node import NodeError, ask, on_all
from cluster.ray_cluster.node_program import FOLDERS, cause
from cluster.transport.reach import LocalRunner
from cluster.transport.runner import Unreachable
from harness.launch.nodes.actor import node_environment
from tests.patience import AMPLE, running, scaled
from tests.processes import content

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


def test_stop_ends_every_process_that_start_left_and_no_other(tmp_path):
    bystander = subprocess.Popen(["sleep", "600"], env={"BURST_RAY_NODE": "test/10"})
    try:
        started = start(tmp_path, "test/1")
        *pids, token = (tmp_path / "said").read_text().split()
        assert Path(token).read_text() == "s3cret"
        assert Path(token).stat().st_mode & 0o777 == 0o600
        assert Path(token).parent.stat().st_mode & 0o777 == 0o700
        known = {"mark": "test/1", "session": started["session"], "processes": started["processes"]}
        assert request("status", **known)["processes"] == 4
        stopped = request("stop", directory=str(tmp_path / "own"), **known)
        assert stopped == {"ended": 4, "left": []}
        assert not any(running(int(pid)) for pid in pids)
        assert not (tmp_path / "own").exists()
        assert bystander.poll() is None
        assert request("stop", directory=str(tmp_path / "own"), **known) == {"ended": 0, "left": []}
    finally:
        bystander.kill()
        bystander.wait()


def test_stop_finds_what_was_started_when_nothing_was_recorded_of_it(tmp_path):
    start(tmp_path, "test/2")
    *pids, _ = map(str, (tmp_path / "said").read_text().split())
    stopped = request("stop", mark="test/2", directory=str(tmp_path / "own"), session=0, processes=[])
    assert stopped["left"] == []
    bare = int(pids[1])  # neither marked nor in a session known to be ours: it may be of another program
    assert [running(int(pid)) for pid in pids] == [False, True, False, False]
    os.kill(bare, signal.SIGKILL)


def test_a_number_given_out_again_is_not_ours(tmp_path):
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        processes = [{"pid": str(bystander.pid), "started": "1"}]
        stopped = request("stop", mark="test/3", directory="", session=bystander.pid, processes=processes)
        assert stopped == {"ended": 0, "left": []}
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


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
    request("stop", mark="test/4", directory=str(tmp_path / "own"), session=0, processes=[])
    assert (tmp_path / "own").exists()


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path):
    with pytest.raises(NodeError, match="ray start exited with 3: no route"):
        start(tmp_path, "test/6", "import sys; print('no route'); sys.exit(3)")
    assert not (tmp_path / "own").exists()


# As Ray 2.60 printed them, shortened. The exception is followed by advice; without one, the error is.
TRACEBACK = """\
2026-11-22 05:56:53,304\tINFO scripts.py:1043 -- Local node IP: 10.0.0.1
2026-11-22 05:56:53,304\tWARNING authentication_token_setup.py:73 -- Token authentication is disabled.
Traceback (most recent call last):
  File "parameter.py", line 343, in update_pre_selected_port
    raise ValueError(
\x1b[31mValueError: Ray component worker_ports is trying to use port 17001, which is used by others.\x1b[0m
Port information: {'gcs': 'random'}
If you allocate ports, please make sure the same port is not used by multiple components.
"""
PANIC = """\
2026-11-22 05:57:56,007\tERR utils.py:1281 -- `--resources={x` is not a valid JSON string
2026-11-22 05:57:56,007\tPANIC utils.py:1286 -- Valid values look like this: `--resources='{"A": 1}'`
Error: Valid values look like this: `{}`
"""
UNREACHED = """\
2026-11-22 05:56:57,349\tINFO scripts.py:1234 -- Local node IP: 10.0.0.2
[2026-11-22 05:57:02,368 W 27048 27048] rpc_client.h:153: Failed to connect to GCS at address 10.0.0.1:6379 within 5 s.
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            TRACEBACK,
            "ValueError: Ray component worker_ports is trying to use port 17001, which is used by others.",
        ),
        (PANIC, "`--resources={x` is not a valid JSON string"),
        (UNREACHED, "Failed to connect to GCS at address 10.0.0.1:6379 within 5 s."),
        ("no route\n\n", "no route"),
        ("", "it printed nothing"),
    ],
)
def test_the_line_that_says_why_ray_did_not_start_is_found(text, line):
    assert cause(text) == line


def test_ray_says_itself_why_it_did_not_start_and_its_log_comes_back(tmp_path):
    pytest.importorskip("ray")
    own = tmp_path / ("long" * 25)  # Ray refuses paths of sockets that are too long
    command = ray_commands.head_command(
        sys.executable, RayPorts(head_port=0, object_store_gib=0.1), address="127.0.0.1", name="n", directory=f"{own}/r"
    )
    with pytest.raises(NodeError, match="ray start exited with 1: OSError: validate_socket_filename failed") as caught:
        request(
            "start", mark="test/8", directory=str(own), token="s3cret", command=command,
            environment=dict(ray_commands.SETTINGS), wait_seconds=AMPLE,
        )  # fmt: skip
    assert caught.value.log.startswith("==> ray-start.log <==\n")
    assert "Traceback" in caught.value.log
    assert "s3cret" not in caught.value.log
    assert not own.exists()


def test_a_head_opens_no_port_for_ray_client():
    """Ray would, wherever grpc is installed."""
    pytest.importorskip("ray")
    pytest.importorskip("grpc")
    own = Path(tempfile.mkdtemp(prefix="burst-", dir="/tmp")) / "own"
    command = ray_commands.head_command(
        sys.executable, RayPorts(head_port=0, object_store_gib=0.1), address="127.0.0.1", name="n", directory=f"{own}/r"
    )
    try:
        started = request(
            "start", mark="test/12", directory=str(own), token="s3cret" * 8, command=command,
            environment=dict(ray_commands.SETTINGS), wait_seconds=AMPLE,
        )  # fmt: skip
        lines = [content(int(one["pid"]), "cmdline") for one in started["processes"]]
        assert any(b"gcs_server" in line for line in lines)
        assert not any(b"ray.util.client.server" in line for line in lines)
    finally:
        request("stop", mark="test/12", directory=str(own), session=0, processes=[])
        own.parent.rmdir()


def test_a_worker_that_does_not_reach_the_head_is_not_started(tmp_path):
    refusal = r"^does not reach the head at 127\.0\.0\.1:{} \(Connection refused\)"
    with socket.socket() as silent:  # it keeps its port to the end and never listens: nobody else can answer there
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
    assert node_environment(found)["LD_PRELOAD"] == "/lib/x86_64-linux-gnu/libc.so.6"
    assert found["PATH"].startswith("/opt/own:/bin:")
    assert set(FOLDERS) <= set(found["PATH"].split(":"))
    request("stop", mark="test/11", directory=str(tmp_path / "own"), session=0, processes=[])


def test_a_start_that_takes_too_long_says_so_and_leaves_nothing(tmp_path):
    seconds, program = scaled(0.5), "import time; print('thinking', flush=True); time.sleep(600)"
    with pytest.raises(NodeError, match=f"was not ready within {seconds:g} s: thinking"):
        start(tmp_path, "test/7", program, seconds)
    assert not (tmp_path / "own").exists()


def test_facts_name_address_versions_and_what_the_node_says_of_itself(tmp_path):
    common = {"toward": "127.0.0.1", "folder": str(tmp_path), "ports": 2}
    facts = request("facts", candidates=["127.0.0.1"], interface=None, describe=["-c", "print('{}')"], **common)
    assert (facts["address"], facts["interface"], facts["description"]) == ("127.0.0.1", "lo", "{}")
    assert len(set(facts["free_ports"])) == 2
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    facts = request("facts", candidates=["192.0.2.1"], interface=None, describe=["-c", "raise OSError('x')"], **common)
    assert (facts["address"], facts["description"]) == ("127.0.0.1", "")
    assert facts["description_problem"] == "OSError: x"
    facts = request("facts", candidates=[], interface="absent0", describe=["-c", ""], **common)
    assert facts["address"] == ""


def test_an_interpreter_that_is_none_is_one_sentence():
    with pytest.raises(NodeError, match=r"false exited with 1 \(no message\); check software\.python"):
        ask(LocalRunner(), ["false"], "status", seconds=AMPLE, mark="m", session=0, processes=[])
    with pytest.raises(NodeError, match="/no/python does not exist"):
        ask(LocalRunner(), ["/no/python"], "status", seconds=AMPLE, mark="m", session=0, processes=[])
    with pytest.raises(NodeError, match="status was not done within 1 s"):
        ask(LocalRunner(), ["sh", "-c", "sleep 600"], "status", seconds=1, mark="m", session=0, processes=[])


def test_where_one_node_fails_the_others_still_answer():
    def work(number: int) -> int:
        if number == 1:
            raise Unreachable("down")
        time.sleep(0.01)
        return number

    assert on_all([0, 1, 2], work) == [0, "down", 2]
    assert on_all([], work) == []
