"""A job on several hosts, without the hosts: the choice of hosts, the ranks on each, and the merged observations."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from cluster.inventory.hosts import Host
from cluster.inventory.nodes import Node
from cluster.inventory.site import NetworkExpectation, Site
from cluster.ray_cluster.quarantine import Quarantine
from cluster.transport.reach import connect_local
from cluster.transport.runner import Unreachable
from harness.launch.launcher import Job
from harness.launch.nodes.actor import NodeActor, left_files, node_environment, receive_files
from harness.launch.nodes.hosts import FRESH_SECONDS, HostEnvironments, HostPool, TooFewHosts
from harness.launch.nodes.watch import lost_sentence, merged, split, troubled
from harness.launch.verdict import Exit, Watched, judge

NODES = [Node(host=Host(name=f"gpu0{number}"), site=Site()) for number in (1, 2, 3)]


def job(tmp_path: Path, ranks: int = 4, **more) -> Job:
    return Job(trial_id="t", trial_dir=tmp_path, command=[sys.executable, "-c", "pass"], ranks=ranks, **more)


class Checks:
    """Replaces node checks over SSH: the reason for each unfit node, and the nodes checked."""

    def __init__(self) -> None:
        self.wrong: dict[str, str] = {}
        self.asked: list[list[str]] = []
        self.now = 0.0

    def unfit(self, nodes):
        self.asked.append([node.name for node in nodes])
        return {node.name: self.wrong[node.name] for node in nodes if node.name in self.wrong}

    def pool(self, folder: Path) -> HostPool:
        return HostPool(NODES, Quarantine(folder), self.unfit, clock=lambda: self.now)


def names(nodes) -> list[str]:
    return [node.name for node in nodes]


def test_hosts_are_checked_before_a_job_and_not_again_a_moment_later(tmp_path):
    checks = Checks()
    pool = checks.pool(tmp_path)
    assert names(pool.take(2)) == ["gpu01", "gpu02"]
    checks.now += FRESH_SECONDS - 1
    assert names(pool.take(3)) == ["gpu01", "gpu02", "gpu03"]
    assert checks.asked == [["gpu01", "gpu02"], ["gpu03"]]
    checks.now += 2
    pool.take(1)
    assert checks.asked[-1] == ["gpu01"]


def test_an_unfit_host_is_quarantined_and_the_next_one_taken(tmp_path):
    checks = Checks()
    checks.wrong = {"gpu01": "gpu01 is not usable; disk fail: / is 99% full"}
    pool = checks.pool(tmp_path)
    assert names(pool.take(2)) == ["gpu02", "gpu03"]
    assert set(Quarantine(tmp_path).entries()) == {"gpu01"}
    with pytest.raises(TooFewHosts, match=r"3 hosts are needed but 2 of 3 can be used \(gpu01: gpu01 is not usable"):
        pool.take(3)
    checks.wrong = {}
    assert names(pool.take(1)) == ["gpu02"]  # others are taken first
    with pytest.raises(TooFewHosts):  # it has been looked at a moment ago
        pool.take(3)
    checks.now += FRESH_SECONDS
    assert names(pool.take(3)) == ["gpu01", "gpu02", "gpu03"]
    assert Quarantine(tmp_path).entries() == {}


def test_a_host_of_an_earlier_runs_quarantine_is_checked_and_not_just_left_out(tmp_path):
    Quarantine(tmp_path).add("gpu02", "its link was lost")
    checks = Checks()
    pool = checks.pool(tmp_path)
    assert names(pool.take(2)) == ["gpu01", "gpu03"]
    assert names(pool.take(3)) == ["gpu01", "gpu02", "gpu03"]
    assert ["gpu02"] in checks.asked


def test_a_host_that_does_not_reach_the_head_ends_its_own_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.launch.nodes.actor.CUT_OFF_SECONDS", 0.2)
    monkeypatch.setattr("harness.launch.nodes.actor.PROBE_SECONDS", 0.1)
    program = "import time; time.sleep(600)"
    whole = Job(trial_id="t", trial_dir=tmp_path / "t", command=[sys.executable, "-c", program], ranks=1)
    actor = NodeActor()
    with socket.socket() as silent:  # bound and not listening: nobody else can answer at its port either
        silent.bind(("127.0.0.1", 0))
        try:
            assert actor.watch(whole, silent.getsockname()).cancelled
        finally:
            actor.close()


def test_a_host_that_was_lost_stays_out_for_the_run_and_one_in_use_is_not_quarantined(tmp_path):
    pool = Checks().pool(tmp_path)
    pool.take(3)
    pool.lose("gpu02", "connection reset")
    pool.without("gpu01", "another run uses it")
    assert names(pool.take(1)) == ["gpu03"]
    assert set(Quarantine(tmp_path).entries()) == {"gpu02"}
    Quarantine(tmp_path).release("gpu02")
    with pytest.raises(TooFewHosts, match="gpu01: another run uses it; gpu02: connection reset"):
        pool.take(2)


def test_ranks_are_dealt_in_equal_runs_and_meet_on_the_first_host(tmp_path):
    parts = split(job(tmp_path, ranks=6), hosts=3, address="10.0.0.1", port=7777)
    assert [list(part.own_ranks) for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert {(part.part.address, part.part.port, part.ranks) for part in parts if part.part} == {("10.0.0.1", 7777, 6)}
    assert list(job(tmp_path).own_ranks) == [0, 1, 2, 3]


def test_what_hosts_saw_is_judged_as_if_one_had_seen_it(tmp_path):
    well = [Exit(rank=rank, returncode=0, at=1.0 + rank) for rank in range(4)]
    seen = {"gpu01": Watched(exits=well[:2], progress={"step": 3, "of": 3}), "gpu02": Watched(exits=well[2:])}
    assert judge(job(tmp_path), merged(seen)) == ("ok", "")
    assert not any(troubled(part, 2) for part in seen.values())

    # Rank 3 is killed on the second host; the first host's ranks then fail for want of a peer, and are cancelled.
    killed = Watched(exits=[well[2], Exit(rank=3, returncode=-9, at=2.0)])
    follows = Watched(exits=[Exit(rank=0, returncode=1, at=2.5)], cancelled=True)
    assert troubled(killed, 2)
    status, reason = judge(job(tmp_path), merged({"gpu01": follows, "gpu02": killed}))
    assert (status, reason.split(" (")[0]) == ("failed", "rank 3 was killed by SIGKILL before its first step")

    late = Watched(timed_out_at=100.0, progress={"step": 1, "of": 9})
    assert judge(job(tmp_path), merged({"gpu01": late, "gpu02": Watched(cancelled=True)}))[0] == "timeout"
    # The second host's deadline is a moment later, and its ranks have lost their peers by then.
    peer = Watched(exits=[Exit(rank=2, returncode=1, at=100.1)])
    assert judge(job(tmp_path), merged({"gpu01": late, "gpu02": peer}))[0] == "timeout"
    broken = Watched(exits=[Exit(rank=2, returncode=1, at=90.0)])
    assert judge(job(tmp_path), merged({"gpu01": late, "gpu02": broken}))[0] == "failed"
    server = merged({"gpu01": Watched(), "gpu02": Watched(server_lost="the fork server exited with code 1")})
    assert judge(job(tmp_path), server)[1].startswith("gpu02: the fork server exited with code 1")


def test_a_loss_names_the_host_the_step_and_who_else_was_ended():
    sentence = lost_sentence({"gpu02": "connection reset"}, {"step": 7, "of": 20}, ["gpu01"])
    assert sentence == (
        "gpu02 was lost (connection reset) after step 7 of 20, the ranks on gpu01 were ended; "
        "--resume --retry-failed runs it on other hosts"
    )


def test_a_part_starts_its_own_ranks_in_a_directory_of_its_host(tmp_path):
    program = "import os, pathlib; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['MASTER_ADDR'])"
    whole = Job(trial_id="t", trial_dir=tmp_path / "t", command=[sys.executable, "-c", program], ranks=4)
    actor = NodeActor()
    try:
        port = actor.reserve()
        [_, part] = split(whole, hosts=2, address="127.0.0.1", port=port)
        actor.stage(str(part.trial_dir), {"trial.json": b"{}"})
        seen = actor.watch(part)
        assert sorted((end.rank, end.returncode) for end in seen.exits) == [(2, 0), (3, 0)]
        assert actor.progress(0) == []
        files = actor.fetch(str(part.trial_dir))
        assert not part.trial_dir.exists()
    finally:
        actor.close()
    assert set(files) == {"trial.json", "logs/rank2.log", "logs/rank3.log"}
    assert files["logs/rank3.log"][0] == b"3 1 127.0.0.1\n"
    receive_files(tmp_path / "here", files)
    log = tmp_path / "here" / "logs" / "rank3.log"
    assert log.read_bytes() == b"3 1 127.0.0.1\n"
    assert log.stat().st_mtime == pytest.approx(files["logs/rank3.log"][1])


def test_files_of_a_host_are_bounded_and_stay_within_the_trial(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.launch.nodes.actor.FETCH_BYTES", 1000)
    monkeypatch.setattr("harness.launch.nodes.actor._LOG_BYTES", 300)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_bytes(b"a" * 5000 + b"end")
    (tmp_path / "measurement.json").write_bytes(b"{}")
    (tmp_path / "core").write_bytes(b"c" * 5000)
    (tmp_path / "link").symlink_to("/etc/passwd")
    files = left_files(tmp_path)
    assert set(files) == {"measurement.json", "logs/rank0.log"}
    assert files["logs/rank0.log"][0] == b"a" * 297 + b"end"
    receive_files(tmp_path / "trial", {"../outside": (b"x", 0.0), "inside": (b"y", 0.0)})
    assert not (tmp_path / "outside").exists()
    assert (tmp_path / "trial" / "inside").exists()


def test_ranks_get_the_nodes_own_gpus_and_nothing_of_rays():
    of_worker = {
        "RAY_AUTH_TOKEN_PATH": "/t", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": "/bin",
        "BURST_CUDA_VISIBLE_DEVICES": "2,3", "BURST_RAY_NODE": "abc/0",
        "LD_PRELOAD": "", "BURST_LD_PRELOAD": "/usr/lib/libjemalloc.so",
    }  # fmt: skip
    assert node_environment(of_worker) == {
        "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "2,3", "BURST_RAY_NODE": "abc/0",
        "LD_PRELOAD": "/usr/lib/libjemalloc.so",
    }  # fmt: skip
    del of_worker["BURST_CUDA_VISIBLE_DEVICES"]
    assert "CUDA_VISIBLE_DEVICES" not in node_environment(of_worker)


def test_a_hosts_routes_and_its_sites_words_win_over_the_trials(tmp_path):
    site = Site(network=NetworkExpectation(interface="lo"), environment={"OMP_NUM_THREADS": "3"})
    node = Node(host=Host(name=os.uname().nodename), site=site)
    given = {"GLOO_SOCKET_IFNAME": "wrong0", "OMP_NUM_THREADS": "1", "OURS": "1", "CUDA_VISIBLE_DEVICES": "7"}
    user = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "7", "HOME": "/root"}
    environments = HostEnvironments(connect_local, "127.0.0.1", user)
    [part, _] = split(job(tmp_path, environment=given), hosts=2, address="10.0.0.1", port=1)
    got = environments.of(node, part, alone=False)
    assert (got["GLOO_SOCKET_IFNAME"], got["OMP_NUM_THREADS"], got["OURS"], got["NCCL_DEBUG"]) == (
        "lo",
        "3",
        "1",
        "INFO",
    )
    assert "CUDA_VISIBLE_DEVICES" not in got
    assert "HOME" not in got
    assert environments.of(node, part, alone=True)["GLOO_SOCKET_IFNAME"] == "wrong0"


def test_a_host_that_cannot_be_asked_for_its_environment_is_unreachable(tmp_path):
    def connect(host, seconds):
        raise Unreachable("down")

    [part] = split(job(tmp_path), hosts=1, address="10.0.0.1", port=1)
    with pytest.raises(Unreachable, match="down"):
        HostEnvironments(connect, "10.0.0.1", {}).of(NODES[0], part, alone=True)


def test_hosts_on_which_an_earlier_attempt_failed_are_taken_only_where_others_are_too_few(tmp_path):
    pool = Checks().pool(tmp_path)
    assert names(pool.take(2, avoid=("gpu01",))) == ["gpu02", "gpu03"]
    assert names(pool.take(2, avoid=("gpu01", "gpu02"))) == ["gpu01", "gpu03"]
    assert names(pool.take(3, avoid=("gpu01", "gpu02", "gpu03"))) == ["gpu01", "gpu02", "gpu03"]
