"""`burst cluster env` over several real hosts with interfaces of different names."""

import json

import pytest

from harness.cli import main
from tests.hosts import lab as lab_module
from tests.hosts.lab import open_lab

if reason := lab_module.unavailable():
    pytest.skip(reason, allow_module_level=True)


def test_every_host_gets_the_interface_it_reaches_the_head_by(tmp_path, capsys):
    (tmp_path / "lab").mkdir()
    with open_lab(3, tmp_path / "lab") as lab:
        first, second, third = lab.hosts
        # A second way out, such as docker's bridge, that a guess could fall for.
        lab.run(second, "ip", "link", "add", "docker0", "type", "bridge")
        lab.run(second, "ip", "addr", "add", "172.30.0.1/16", "dev", "docker0")
        lab.run(second, "ip", "link", "set", "docker0", "up")
        lab.run(third, "ip", "link", "set", third.interface, "mtu", "1400")
        inventory = tmp_path / "lab.yaml"
        nodes = json.dumps([{"hosts": host.name, "address": host.address} for host in lab.hosts])
        inventory.write_text(f"nodes: {nodes}\nssh: {{user: root, key: {lab.key}}}\n")
        arguments = ["cluster", "env", str(inventory), "--known-hosts", str(lab.known_hosts), "--json"]
        assert main(arguments) == 0
        found = json.loads(capsys.readouterr().out)
        for host, node in zip(lab.hosts, found["nodes"], strict=True):
            values = {entry["name"]: (entry["value"], entry["reason"]) for entry in node["variables"]}
            assert node["node"] == host.name
            assert values["NCCL_SOCKET_IFNAME"][0] == f"={host.interface}"
            assert values["GLOO_SOCKET_IFNAME"][0] == host.interface
            own = f"as {host.address}" if host is not first else f"own address {host.address}"
            assert own in values["GLOO_SOCKET_IFNAME"][1]
        (drift,) = found["drift"]
        assert drift.endswith(": lab1, lab2 have 1500; lab3 has 1400")
        lab.stop_sshd(third)
        assert main(arguments) == 1
        out, err = capsys.readouterr()
        assert list(json.loads(out)["silent"]) == ["lab3"]
        assert "lab3: " in err
