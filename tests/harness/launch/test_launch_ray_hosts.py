"""A job on several hosts, without the hosts: the choice of hosts, the ranks on each, and the merged observations."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.inventory.site import NetworkExpectation, Site
from harness.launch.launcher import Job
from harness.launch.ray.host import HostActor, host_environment, left_files, own_folder, receive_files
from harness.launch.ray.job import FRESH_SECONDS, HostsJob, ReservedHost
from harness.launch.ray.launcher import TooFewHosts, choose
from harness.launch.ray.watch import HostLost, lost_sentence, merged, split, troubled
from harness.launch.verdict import Exit, Watched, judge


def job(tmp_path: Path, ranks: int = 4, **more) -> Job:
    return Job(trial_id="t", trial_dir=tmp_path, command=[sys.executable, "-c", "pass"], ranks=ranks, **more)


@dataclass
class Looked:
    """In place of a supervisor: why its host is unfit, and how often it was asked."""

    why: str = ""
    asked: int = 0

    def call(self, method: str) -> str:
        assert method == "unfit"
        self.asked += 1
        return self.why


def reserved(name: str, why: str = "") -> ReservedHost:
    return ReservedHost(
        name=name, address="", node_id=name, ranks=1, machine=None, described=None, member=Looked(why), group=None
    )  # fmt: skip


def names(hosts) -> list[str]:
    return [host.name for host in hosts]


def test_a_host_is_looked_at_before_a_job_and_not_again_a_moment_later():
    host = reserved("gpu01")
    assert [host.unfit(0.0), host.unfit(FRESH_SECONDS - 1), host.member.asked] == ["", "", 1]
    host.unfit(FRESH_SECONDS)
    assert host.member.asked == 2
    busy = reserved("gpu02", "other processes use its GPUs")
    assert [busy.unfit(0.0), busy.unfit(0.0), busy.member.asked] == [busy.member.why, busy.member.why, 2]
    busy.member.why = ""
    assert busy.unfit(1.0) == ""  # at once, and not after a quarantine


def test_the_first_hosts_that_are_fit_are_taken_and_those_to_avoid_only_where_others_are_too_few():
    hosts = [reserved("gpu01"), reserved("gpu02", "3 of its 4 GPUs answer"), reserved("gpu03")]

    def take(count: int, *avoid: str) -> list[str]:
        return names(choose(hosts, count, avoid, lambda host: host.unfit(0.0), {"gpu04": "is no node now"}))

    assert take(1) == ["gpu01"]
    assert take(2) == ["gpu01", "gpu03"]
    assert take(1, "gpu01") == ["gpu03"]
    assert take(2, "gpu01") == ["gpu01", "gpu03"]  # in their order, by which ranks are placed
    with pytest.raises(TooFewHosts) as met:
        take(3)
    assert str(met.value) == (
        "3 hosts are needed but 2 can be used now (gpu04: is no node now; gpu02: 3 of its 4 GPUs answer)"
    )


def test_a_host_that_does_not_reach_the_head_ends_its_own_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.launch.ray.host.CUT_OFF_SECONDS", 0.2)
    monkeypatch.setattr("harness.launch.ray.host.PROBE_SECONDS", 0.1)
    program = "import time; time.sleep(600)"
    whole = Job(trial_id="t", trial_dir=tmp_path / "t", command=[sys.executable, "-c", program], ranks=1)
    actor = HostActor("here", Site(), own_gpus=False)
    with socket.socket() as silent:  # it keeps the port and never listens, so a connection is refused
        silent.bind(("127.0.0.1", 0))
        try:
            assert actor.watch(whole, silent.getsockname()).cancelled
        finally:
            actor.close()


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


def test_a_host_that_does_not_give_its_ranks_files_is_lost_and_keeps_them(tmp_path):
    """How its ranks ended is in them: without them a trial that ran out of memory would be one that failed."""

    class Answering:
        def __init__(self, fetched):
            self.asked, self.fetched = [], fetched

        def call(self, method, *_):
            self.asked.append(method)
            if method == "remove" or isinstance(self.fetched, Exception):
                raise HostLost("a", "no answer")
            return self.fetched

    members = {"a": Answering({"errors/rank0.json": (b"{}", 1.0)}), "b": Answering(HostLost("b", "gone"))}
    hosts = [SimpleNamespace(name=name, member=member) for name, member in members.items()]
    whole = Job(trial_id="t", trial_dir=tmp_path / "t", command=[], ranks=2)
    job = HostsJob(whole, hosts, None, {}, None)
    job._apart = {"a": "/x", "b": "/y"}
    job._fetch()
    assert job.lost == {"b": "no answer"}
    assert (tmp_path / "t" / "errors" / "rank0.json").read_bytes() == b"{}"
    assert {name: member.asked for name, member in members.items()} == {"a": ["fetch", "remove"], "b": ["fetch"]}


def test_a_part_starts_its_own_ranks_in_a_directory_of_its_host(tmp_path):
    program = "import os, pathlib; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['MASTER_ADDR'])"
    whole = Job(trial_id="t", trial_dir=tmp_path / "t", command=[sys.executable, "-c", program], ranks=4)
    actor = HostActor("here", Site(), own_gpus=False)
    try:
        port = actor.reserve()
        [_, part] = split(whole, hosts=2, address="127.0.0.1", port=port)
        actor.stage(str(part.trial_dir), {"trial.json": b"{}"})
        seen = actor.watch(part)
        assert sorted((end.rank, end.returncode) for end in seen.exits) == [(2, 0), (3, 0)]
        assert actor.progress(0) == []
        files = actor.fetch(str(part.trial_dir))
        assert part.trial_dir.exists()  # until they have arrived
        actor.remove(str(part.trial_dir))
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
    monkeypatch.setattr("harness.launch.ray.host.FETCH_BYTES", 1000)
    monkeypatch.setattr("harness.launch.ray.host._LOG_BYTES", 300)
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


def test_ranks_get_the_hosts_own_gpus_and_nothing_of_rays():
    of_worker = {
        "RAY_AUTH_TOKEN_PATH": "/t", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": "/bin",
        "BURST_CUDA_VISIBLE_DEVICES": "2,3", "BURST_RAY_NODE": "abc/0",
        "LD_PRELOAD": "", "BURST_LD_PRELOAD": "/usr/lib/libjemalloc.so",
    }  # fmt: skip
    assert host_environment(of_worker, own_gpus=False) == {
        "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "2,3", "BURST_RAY_NODE": "abc/0",
        "LD_PRELOAD": "/usr/lib/libjemalloc.so",
    }  # fmt: skip
    assigned = of_worker | {"CUDA_VISIBLE_DEVICES": "3"}  # by Ray, which counts the host's GPUs
    assert host_environment(assigned, own_gpus=True)["CUDA_VISIBLE_DEVICES"] == "3"
    del of_worker["BURST_CUDA_VISIBLE_DEVICES"]
    assert "CUDA_VISIBLE_DEVICES" not in host_environment(of_worker, own_gpus=False)


def test_a_hosts_routes_and_its_sites_words_win_over_the_trials(tmp_path):
    site = Site(network=NetworkExpectation(interface="lo"), environment={"OMP_NUM_THREADS": "3"})
    actor = HostActor(os.uname().nodename, site, own_gpus=False)
    given = {"GLOO_SOCKET_IFNAME": "wrong0", "OMP_NUM_THREADS": "1", "OURS": "1", "CUDA_VISIBLE_DEVICES": "7"}
    [part, _] = split(job(tmp_path, environment=given), hosts=2, address="10.0.0.1", port=1)
    got = actor.environment(part, {"NCCL_DEBUG": "INFO"}, "127.0.0.1", alone=False)
    assert {name: got[name] for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "OURS", "NCCL_DEBUG")} == {
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "3", "OURS": "1", "NCCL_DEBUG": "INFO"
    }  # fmt: skip
    assert not {"CUDA_VISIBLE_DEVICES", "HOME"} & got.keys()
    alone = actor.environment(part, {}, "127.0.0.1", alone=True)
    assert alone["GLOO_SOCKET_IFNAME"] == "wrong0"
    actor.close()


def test_a_hosts_folder_is_its_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = own_folder("gpu01")
    assert (own_folder("gpu01"), own_folder("gpu02") == folder) == (folder, False)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to("/etc")
    with pytest.raises(PermissionError, match="belongs to another user"):
        own_folder("gpu01")
