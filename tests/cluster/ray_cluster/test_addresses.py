"""Hosts named by IPv6 addresses: reached over SSH, checked, and given IPv4 addresses in a cluster, or refused."""

from __future__ import annotations

import json
import socket

import pytest

from cluster.ray_cluster.node import NodeError
from cluster.ray_cluster.up import own_address
from harness.cli import main
from tests.cluster.loopback_sshd import running_sshd


def no_ipv6() -> str:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return ""
    except OSError as error:
        return f"this machine has no IPv6 ({error.strerror})"


@pytest.mark.skipif(bool(no_ipv6()), reason=no_ipv6())
def test_a_host_with_an_ipv6_address_is_checked_over_ssh(tmp_path, capsys):
    with running_sshd(tmp_path, addresses=("::1",)) as sshd:
        target = sshd.target("[::1]")
        code = main(["cluster", "check", target, *sshd.arguments(), "--only", "disk", "--no-history", "--json"])
        report = json.loads(capsys.readouterr().out)
    assert report["checks"]["reachability"]["verdict"] == "ok", report
    assert (code in (0, 1, 2), report["target"]) == (True, target)


def facts(login: str = "", source: str = "", **interfaces: str) -> dict[str, object]:
    return {"interfaces": {"lo": "127.0.0.1", **interfaces}, "login_address": login, "source_address": source}


def test_a_node_has_the_address_of_its_interface_else_of_its_name_login_or_route():
    two = {"eth0": "10.0.0.1", "ib0": "10.1.0.1"}
    assert own_address(facts(**two), ["10.0.0.1"], "ib0") == "10.1.0.1"
    assert own_address(facts(**two, login="10.1.0.1"), ["10.0.0.1"], None) == "10.0.0.1"
    assert (
        own_address(facts(**two, login="10.1.0.1"), ["192.0.2.1"], None) == "10.1.0.1"
    )  # its name is that of a router
    assert own_address(facts(**two, source="10.0.0.1"), [], None) == "10.0.0.1"
    assert own_address(facts(eth0="10.0.0.1"), [], None) == "10.0.0.1"
    assert own_address(facts(eth0="10.0.0.1"), [], "lo") == "127.0.0.1"
    # Named localhost: Ray would take its other address, and a run find no node at the one that was recorded.
    assert own_address(facts(eth0="10.0.0.1", login="127.0.0.1", source="127.0.0.1"), ["127.0.0.1"], None) == "10.0.0.1"


def test_a_node_of_several_addresses_has_none_by_a_guess():
    refusal = r"^has no address that the others could use \(interfaces: lo 127\.0\.0\.1, eth0 .*name one with"
    for interface in (None, "absent0"):
        with pytest.raises(NodeError, match=refusal):
            own_address(facts(eth0="10.0.0.1", eth1="10.1.0.1"), [], interface)


def test_a_node_without_an_ipv4_address_is_refused_before_anything_starts():
    with pytest.raises(NodeError, match=r"^has no IPv4 address, and Ray connects nodes over IPv4 here"):
        own_address(facts(), [], None)
