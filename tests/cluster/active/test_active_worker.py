"""The active tests really run, tiny and on the CPU: one node, and two and three "hosts" that are this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.active.__main__ import interface_towards
from cluster.active.fleet import Plan, run_active, worker_command
from cluster.active.measurement import found, line
from cluster.cli import main
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import Container, NetworkExpectation, Site, Software
from cluster.profiles import load_profiles
from cluster.transport.reach import connect_local
from cluster.transport.runner import Runner
from tests.processes import listens_on
from tests.programs import shell_program

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers share a test machine's cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def local(name: str, site: Site | None = None) -> InventoryNode:
    return InventoryNode(host=Host(name=name), site=site or Site())


def plan(connect: Callable[[Host, float], AbstractContextManager[Runner]] = connect_local) -> Plan:
    return Plan(connect=connect, profiles=load_profiles(), device="cpu", node_seconds=200.0, pair_seconds=100.0)


@pytest.mark.slow
def test_a_node_measures_itself_and_every_two_nodes_each_other() -> None:
    said: list[str] = []
    findings = run_active([local("a"), local("b")], replace(plan(), say=said.append))
    assert set(findings.pairs) == {("a", "b")}
    speed = findings.pairs["a", "b"]
    assert speed is not None
    assert speed > 0
    for node in ("a", "b"):
        tests = findings.verdicts[node]
        assert set(tests) == {"active_gemm", "active_copy", "active_peers", "active_all_reduce", "active_pairs"}
        assert tests["active_pairs"].level == "ok"
        values = tests["active_all_reduce"].facts["values"]
        assert isinstance(values, list)
        assert len(values) == 1
    assert len(said) == 2


def stand_in(path: Path, exchanges: bool) -> str:
    """An interpreter that answers as a worker does, at once; real workers run in the tests beside."""
    lists = ("gemm_tflops", "hbm_gb_per_second", "to_device_gb_per_second", "from_device_gb_per_second")
    speeds = line("speeds", {"gpu": "cpu", **{key: [1.0] for key in lists}})
    answer = line("pair", {"gb_per_second": 40.0}) if exchanges else line("failure", {"reason": "no route to host"})
    port = line("port", {"port": 9}) if exchanges else ""
    body = (
        f"case \"$*\" in *' speeds '*) echo '{speeds}' ;; *'--node 0'*) echo '{port}'; echo '{answer}' ;; "
        f"*) echo '{answer}' ;; esac"
    )
    return str(shell_program(path, body))


def test_a_node_whose_worker_cannot_exchange_is_found_by_the_second_pass(tmp_path: Path) -> None:
    good, bad = stand_in(tmp_path / "good", True), stand_in(tmp_path / "bad", False)
    sites = {name: Site(software=Software(python=bad if name == "c" else good)) for name in "abcd"}
    findings = run_active([local(name, site) for name, site in sites.items()], plan())
    assert {pair for pair, speed in findings.pairs.items() if isinstance(speed, str)} == {
        pair for pair in findings.pairs if "c" in pair
    }
    levels = {node: tests["active_pairs"].level for node, tests in findings.verdicts.items()}
    assert levels == {"a": "ok", "b": "ok", "c": "fail", "d": "ok"}
    assert "no route to host" in findings.verdicts["c"]["active_pairs"].summary


@pytest.mark.parametrize(
    ("site", "words"),
    [
        (Site(software=Software(python="/absent/python")), "/absent/python"),
        (Site(software=Software(python="/bin/false")), "ended without output"),
        (Site(software=Software(python="/bin/echo")), "-m cluster.active speeds"),
        (Site(container=Container(engine="docker", image="burst")), "do not start containers"),
    ],
)
def test_a_node_that_cannot_run_the_worker_is_unknown_and_says_why(site: Site, words: str) -> None:
    findings = run_active([local("a", site)], plan())
    verdict = findings.verdicts["a"]["active"]
    assert verdict.level == "unknown"
    assert words in verdict.summary


def test_without_torch_the_worker_names_its_interpreter() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\nfrom cluster.active.__main__ import main\nsys.exit(main(['speeds']))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"torch is not installed in {sys.executable}" in done.stdout


def test_without_a_gpu_the_worker_says_so() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "cluster.active", "speeds"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "torch sees no GPU" in done.stdout


def test_the_workers_command_is_whole_and_carries_no_secret() -> None:
    site = Site(
        software=Software(python="/opt/env/bin/python", folder="/opt/burst"),
        network=NetworkExpectation(interface="bond0", hcas=("mlx5_0", "mlx5_1:1")),
        environment={"NCCL_DEBUG": "WARN", "HF_TOKEN": "secret", "NCCL_SOCKET_IFNAME": "=eth9"},
    )
    assert worker_command(site, "speeds") == [
        "env", "NCCL_IB_HCA==mlx5_0,mlx5_1:1", "GLOO_SOCKET_IFNAME=bond0", "NCCL_SOCKET_IFNAME==eth9",
        "NCCL_DEBUG=WARN", "PYTHONPATH=/opt/burst", "/opt/env/bin/python", "-m", "cluster.active", "speeds",
        "--attended",
    ]  # fmt: skip


def test_the_store_of_an_exchange_listens_on_the_address_towards_the_other_node_alone() -> None:
    command = [sys.executable, "-m", "cluster.active", "pair", "--device", "cpu", "--node", "0", "--peer", "127.0.0.1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as opener:
        assert opener.stdout is not None
        place = found(opener.stdout.readline(), "port")
        heard = listens_on(opener.pid)
        os.killpg(opener.pid, signal.SIGKILL)
    assert place is not None
    assert heard == {str(place["port"]).rpartition(":")[0]} == {"127.0.0.1"}


def test_the_interface_towards_this_machine_is_loopback() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("::1") is None


@pytest.mark.slow
def test_the_program_adds_what_was_measured_to_its_page(tmp_path, roomy_site, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    page = tmp_path / "page.html"
    code = main(["--active", "cpu", "--only", "disk", "--site", str(roomy_site), "--json", "--html", str(page)])
    printed = capsys.readouterr()
    checks = json.loads(printed.out)["checks"]
    assert {"active_gemm", "active_copy", "active_peers", "active_all_reduce"} <= set(checks)
    assert code in (0, 1)  # a loaded machine's cores may differ in speed, which is what the test is for
    assert "active_gemm" in page.read_text()
    assert "active tests: 1 node by itself" in printed.err


def test_a_worker_ends_when_its_standard_input_ends() -> None:
    command = [sys.executable, "-m", "cluster.active", "pair", "--device", "cpu", "--node", "0", "--peer", "127.0.0.1",
               "--attended"]  # fmt: skip
    worker = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert "port" in worker.stdout.readline()  # now it waits for its partner, for minutes
    worker.stdin.close()
    assert worker.wait(60) == -signal.SIGKILL
    worker.stdout.close()
