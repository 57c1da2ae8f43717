"""Hosts named by IPv6 addresses: reached over SSH, checked, and given IPv4 addresses in a cluster, or refused."""

from __future__ import annotations

import json
import socket

import pytest

from cluster.inventory.hosts import parse_hosts
from cluster.inventory.nodes import Node
from cluster.inventory.site import Site
from cluster.ray_cluster.candidates import Means, intended, meet
from cluster.ray_cluster.introduction import THIS_MACHINE, Introduction, introduce, own_versions
from cluster.ray_cluster.node import NodeError
from cluster.ray_cluster.node_program import REPLY
from cluster.transport.runner import Completed
from harness.cli import main
from harness.records.provenance import PROJECT_ROOT
from tests.cluster.loopback_sshd import running_sshd
from tests.patience import AMPLE

DESCRIBE = ("-c", "print('{}')")


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
        code = main(["check", target, *sshd.arguments(), "--only", "disk", "--no-history", "--json"])
        report = json.loads(capsys.readouterr().out)
    assert report["checks"]["reachability"]["verdict"] == "ok", report
    assert (code in (0, 1, 2), report["target"]) == (True, target)


def means() -> Means:
    return Means(
        connect=None, unfit=lambda nodes: {}, describe=DESCRIBE, ranks=lambda node, description: 1,  # type: ignore[arg-type]
        folder=PROJECT_ROOT, say=print, seconds=AMPLE,
    )  # fmt: skip


def met(nodes: dict[str, Introduction], toward: dict[str, Introduction] | None = None):
    """`meet` with these answers, by name; `toward` are those to a second question, which names the head's address."""
    hosts = [Node(host=parse_hosts(name)[0], site=Site()) for name in nodes]

    def introduced(node: Node, head: str) -> Introduction:
        return (toward or {})[node.name] if head else nodes[node.name]

    return meet(hosts, introduced, means())


@pytest.fixture(scope="module")
def versions():
    pytest.importorskip("ray")
    return own_versions(PROJECT_ROOT, DESCRIBE, AMPLE)


def answer(versions, address="", login_address="", **interfaces) -> Introduction:
    return Introduction(
        address=address, login_address=login_address, interface="", interfaces={"lo": "127.0.0.1", **interfaces},
        versions=versions, free_ports=(1, 2, 3), description="{}",
    )  # fmt: skip


def test_a_head_named_by_an_ipv6_address_has_its_only_ipv4_address_in_the_cluster(versions):
    first, second = answer(versions, eth0="10.0.0.1"), answer(versions, eth0="10.0.0.2", eth1="10.1.0.2")
    found, left_out = met({"fd00::1": first, "fd00::2": second}, {"fd00::2": answer(versions, address="10.0.0.2")})
    assert ([node.address for node in found.values()], left_out) == (["10.0.0.1", "10.0.0.2"], {})
    assert next(iter(found.values())).interface == "eth0"


def test_a_node_of_several_addresses_becomes_no_head_by_a_guess(versions):
    several = answer(versions, eth0="10.0.0.1", eth1="10.1.0.1")
    found, _ = met(
        {"fd00::1": several, "b": answer(versions, address="10.0.0.2")}, {"fd00::1": answer(versions, "10.0.0.1")}
    )
    assert [*found] == ["b", "fd00::1"]
    with pytest.raises(ValueError, match=r"fd00::1: has no address that the others could use; name one with network\."):
        met({"fd00::1": several})
    reached = answer(versions, login_address="10.1.0.1", eth0="10.0.0.1", eth1="10.1.0.1")
    found, _ = met({"fd00::1": reached})
    assert (found["fd00::1"].address, found["fd00::1"].interface) == ("10.1.0.1", "eth1")


def test_two_names_of_one_machine_are_one_node(versions):
    found, left_out = met({"a": answer(versions, address="10.0.0.1"), "b": answer(versions, address="10.0.0.1")})
    assert ([*found], left_out) == (["a"], {"b": "is the same machine as a (10.0.0.1); name it once"})


def test_a_node_with_other_software_is_left_out_and_where_all_have_other_this_machine_is_named(versions):
    other = answer({**versions, "ray": "1.0"}, address="10.0.0.2")
    found, left_out = met({"a": answer(versions, address="10.0.0.1"), "b": other})
    assert [*found] == ["a"]
    assert left_out["b"].startswith(f"ray is 1.0 there but {versions['ray']} on {THIS_MACHINE}; install the same there")
    with pytest.raises(ValueError, match=f"ray is {versions['ray']} on 1 of 2 nodes but 1.0 on b"):
        met({"b": other})


def test_a_node_without_an_ipv4_address_is_refused_before_anything_starts():
    """Its answer to the question for its facts; the node's own program finds interfaces by their IPv4 addresses."""
    facts = {
        "address": "", "login_address": "", "interface": "", "interfaces": {"lo": "127.0.0.1"}, "free_ports": [1, 2, 3],
        "versions": {"python": "3", "ray": "2", "torch": "2"}, "description": "{}", "description_problem": "",
    }  # fmt: skip
    reply = Completed(stdout=f"{REPLY}{json.dumps(facts)}\n", stderr="", exit_status=0)

    class Node6:
        def run(self, command, *, stdin="", deadline_seconds):
            return reply

    node = intended(Node(host=parse_hosts("fd00::1")[0], site=Site()), "s", 0, means())
    with pytest.raises(NodeError, match=r"^has no IPv4 address, and Ray connects nodes over IPv4 here"):
        introduce(Node6(), ["python"], node, None, "", DESCRIBE, 1.0)
