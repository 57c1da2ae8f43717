"""Nodes as command lines name them, and how the hosts behind them are reached."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from cluster.files.errors import UsageError
from cluster.inventory.file import named_nodes
from cluster.inventory.hosts import Host, this_machine
from cluster.node_arguments import add_node_arguments
from cluster.transport.reach import LocalRunner, connection
from harness.cli import main
from tests.cluster.loopback_sshd import LoopbackSshd
from tests.patience import AMPLE


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    path = tmp_path / "lab.yaml"
    path.write_text("nodes: ['gpu[01-04]']\n")
    return path


def names(*typed: object) -> list[str]:
    parser = argparse.ArgumentParser()
    add_node_arguments(parser)
    return [node.name for node in named_nodes(parser.parse_args([str(word) for word in typed])).nodes]


def test_an_inventory_may_be_followed_by_names_of_its_nodes(lab: Path) -> None:
    assert names(lab) == ["gpu01", "gpu02", "gpu03", "gpu04"]
    assert names(lab, "gpu04", "gpu[01-02]") == ["gpu01", "gpu02", "gpu04"], "in the inventory's order"


def test_a_plain_list_is_an_inventory_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("a b  # and\nc\n")
    assert names(tmp_path / "hosts.txt", "b") == ["b"]


def test_hosts_need_no_inventory_and_nothing_is_this_machine() -> None:
    assert names("ops@spare:2222", "gpu[1-2]") == ["spare", "gpu1", "gpu2"]
    assert names() == [this_machine().name]


def test_a_file_behind_hosts_is_refused(lab: Path) -> None:
    with pytest.raises(UsageError, match="is a file behind hosts"):
        names("gpu01", lab)


@pytest.mark.parametrize(
    "command",
    [["cluster", "check"], ["cluster", "env"], ["cluster", "nodes"], ["cluster", "up"], ["setup", "image", "push"]],
)
def test_every_command_refuses_a_name_that_is_no_node_of_the_inventory(command, lab, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert main([*command, str(lab), "gpu05"]) == (3 if command[-1] == "check" else 2)
    assert "gpu05 is no node of the inventory lab; did you mean gpu0" in capsys.readouterr().err


def test_the_key_given_by_hand_opens_the_jump_host_too(sshd, lab, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # holds no key
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    login = f"ssh: {{port: {sshd.port}, jump: '{sshd.target('127.0.0.1')}'}}"
    lab.write_text(f"{login}\nnodes: [{{hosts: gpu01, address: 127.0.0.2}}]\n")
    command = [
        "cluster",
        "check",
        str(lab),
        "--known-hosts",
        str(sshd.known_hosts),
        "--only",
        "memlock",
        "--no-history",
        "--json",
    ]
    assert main(command) == 3
    assert "hold no key to offer" in capsys.readouterr().out
    main([*command, "--key", str(sshd.key)])
    assert json.loads(capsys.readouterr().out)["checks"]["reachability"]["verdict"] == "ok"


def test_one_connection_reaches_this_machine_and_others(sshd: LoopbackSshd) -> None:
    user = sshd.target().partition("@")[0]
    far = Host(name="far", address="127.0.0.2", user=user, port=sshd.port, key=sshd.key)
    connect = connection([this_machine(), far], known_hosts=sshd.known_hosts)
    for host in (this_machine(), far):
        with connect(host, 30.0) as runner:
            assert isinstance(runner, LocalRunner) == host.is_local
            assert runner.run(["echo", host.name], deadline_seconds=AMPLE).stdout == f"{host.name}\n"
