"""The lab the cluster tests stand on: its hosts are hosts, and nothing of it stays."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from cluster.inventory.hosts import Host
from cluster.transport.runner import Unreachable
from cluster.transport.ssh import SshOptions, connector
from tests.hosts import lab as lab_module
from tests.hosts.lab import Lab, LabHost, open_lab
from tests.patience import AMPLE, wait_until

if reason := lab_module.unavailable():
    pytest.skip(reason, allow_module_level=True)


def ssh(lab: Lab, host: LabHost, *command: str, seconds: float = AMPLE) -> str:
    connect = connector(SshOptions(known_hosts=lab.known_hosts))
    with connect(Host(name=host.name, address=host.address, user="root", key=lab.key), seconds) as runner:
        completed = runner.run(command, deadline_seconds=seconds)
    assert completed.exit_status == 0, completed
    return completed.stdout.strip()


def names_of(pids: list[int]) -> list[str]:
    names = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            names.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return names


def test_hosts_have_their_own_names_addresses_and_interfaces_and_nothing_stays(tmp_path):
    with open_lab(2, tmp_path) as lab:
        first, second = lab.hosts
        assert [ssh(lab, host, "hostname") for host in lab.hosts] == ["lab1", "lab2"]
        assert f"inet {second.address}/24" in ssh(lab, second, "ip", "-4", "addr", "show", "dev", second.interface)
        assert first.host_key != second.host_key
        assert ssh(lab, first, "sh", "-c", f"ssh-keyscan -t ed25519 {second.address} 2>/dev/null").endswith(
            second.host_key
        )
        (disk := tmp_path / "disk").mkdir()
        lab.mount(first, disk, "1m")
        assert ssh(lab, first, "df", "--output=size", str(disk)).split()[-1] == "1024"
        assert ssh(lab, second, "df", "--output=size", str(disk)).split()[-1] != "1024"
        # A process that leaves its session and its parent is the host's all the same.
        ssh(lab, first, "sh", "-c", "setsid -f sleep 600 >/dev/null 2>&1 </dev/null")
        wait_until(lambda: "sleep" in names_of(lab.processes(first)), "what was started is not on the host")
        assert lab.left_behind()
    assert lab.left_behind() == []
    assert lab.processes(first) == lab.processes(second) == []
    assert lab.tag not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.hosts
def test_a_host_can_be_silent_down_changed_lost_and_back(tmp_path):
    with open_lab(1, tmp_path) as lab:
        [host] = lab.hosts
        lab.freeze(host)
        with pytest.raises(Unreachable, match=r"did not answer|cannot be reached"):
            ssh(lab, host, "true", seconds=2)
        lab.thaw(host)
        lab.replace_host_key(host)
        with pytest.raises(Unreachable, match="another machine may be answering"):
            ssh(lab, host, "true")
        lab.known_hosts.write_text(f"{host.address} {host.host_key}\n")
        lab.kill(host)
        assert lab.processes(host) == []
        with pytest.raises(Unreachable):
            ssh(lab, host, "true", seconds=2)
        lab.revive(host)
        assert ssh(lab, host, "hostname") == "lab1"
        lab.stop_sshd(host)
        with pytest.raises(Unreachable, match="cannot be reached"):
            ssh(lab, host, "true")
