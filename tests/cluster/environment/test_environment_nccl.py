"""NCCL's files on a node, and the variables that are left to NCCL with a reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cluster.discovery.drift import network_drift
from cluster.discovery.facts import Gpu, NodeFacts, Setting
from cluster.environment.ranks import LEFT_ALONE, concern, configured
from cluster.environment.rendering import as_json, env_sh, render_node, table
from cluster.environment.value import Variable
from cluster.inventory.site import Site, Software
from tests.cluster.fake_node import FakeNode, h100


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """A node with GPUs and adapters, whose user has a home of its own."""
    node = FakeNode(tmp_path, monkeypatch)
    node.program("nproc", "echo 128")
    h100(node)
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    return node


def site(tmp_path: Path, **environment: str) -> Site:
    return Site(environment=environment, software=Software(python=str(tmp_path / "bin/python")))


def test_both_files_are_read_and_the_users_comes_first(node: FakeNode) -> None:
    node.file("/etc/nccl.conf", "# ours\n\nNCCL_IB_TC=106\nNCCL_DEBUG=WARN\n")
    node.file("/home/alice/.nccl.conf", "NCCL_DEBUG=INFO")
    rendered = render_node(node.facts(), Site())
    assert [(value.name, value.value, value.origin, value.reason) for value in rendered.configured] == [
        ("NCCL_DEBUG", "INFO", "file", "line 1 of /home/alice/.nccl.conf"),
        ("NCCL_IB_TC", "106", "file", "line 3 of /etc/nccl.conf"),
    ]
    assert "line 4 of /etc/nccl.conf says NCCL_DEBUG=WARN, but line 1 of /home/alice/.nccl.conf comes first" in (
        rendered.warnings
    )
    assert "NCCL_IB_TC" not in env_sh(rendered), "NCCL reads it there by itself"
    assert "NCCL_IB_TC" in table(rendered)


@pytest.mark.parametrize("named", ["/opt/nccl.conf", "~/other.conf"])
def test_the_sites_own_file_takes_the_place_of_the_users(named: str, node: FakeNode, tmp_path: Path) -> None:
    node.file("/home/alice/.nccl.conf", "NCCL_DEBUG=INFO\n")
    node.file(named.replace("~", "/home/alice"), "NCCL_DEBUG=TRACE\n")
    [value] = render_node(node.facts(site(tmp_path, NCCL_CONF_FILE=named)), Site()).configured
    assert (value.value, value.reason) == ("TRACE", f"line 1 of {named.replace('~', '/home/alice')}")


def test_a_line_that_the_environment_replaces_is_a_warning(node: FakeNode) -> None:
    node.file("/etc/nccl.conf", "NCCL_SOCKET_IFNAME=eth\nNCCL_IB_HCA=mlx5\n")
    rendered = render_node(node.facts(), Site())
    assert rendered.configured == ()
    assert rendered.variables["NCCL_SOCKET_IFNAME"] == "=bond0"
    [first, second] = [warning for warning in rendered.warnings if "nccl.conf" in warning]
    assert first.startswith(
        "line 1 of /etc/nccl.conf says NCCL_SOCKET_IFNAME=eth, but the environment wins with =bond0"
    )
    assert "NCCL_IB_HCA=mlx5, but the environment wins with =mlx5_0:1," in second


def test_what_a_file_says_is_judged_as_what_a_site_says(node: FakeNode) -> None:
    node.file("/etc/nccl.conf", "NCCL_IB_GID_INDEX=3\nNCCL_IB_TIMEOUT=99\nNCCL_CROSS_NIC = 1\nnonsense\n")
    warnings = render_node(node.facts(), Site()).warnings
    for sentence in (
        "line 1 of /etc/nccl.conf: NCCL_IB_GID_INDEX=3 is right on one node at best; NCCL finds the index by itself",
        "line 2 of /etc/nccl.conf: NCCL_IB_TIMEOUT=99 is no value of it: NCCL takes 1 to 31",
        "line 3 of /etc/nccl.conf is 'NCCL_CROSS_NIC = 1'; NCCL expects NAME=VALUE without blanks around the name",
        "line 4 of /etc/nccl.conf is 'nonsense'; NCCL expects NAME=VALUE without blanks around the name",
    ):
        assert sentence in warnings


def test_a_file_that_nccl_is_given_must_be_there(node: FakeNode, tmp_path: Path) -> None:
    node.file("/etc/nccl.conf", "NCCL_TOPO_FILE=/opt/topo.xml\nNCCL_TUNER_PLUGIN=libtuner.so\n")
    chosen = site(tmp_path, NCCL_TUNER_CONFIG_PATH="/opt/tuner.csv")
    assert set(node.facts(chosen).absent) == {"/opt/topo.xml", "/opt/tuner.csv"}
    said = "NCCL is given /opt/topo.xml, which cannot be read on this node; install it there"
    assert said in render_node(node.facts(chosen), chosen).warnings
    node.file("/opt/topo.xml", "<system/>")
    node.file("/opt/tuner.csv", "")
    assert node.facts(chosen).absent == ()


def test_nodes_whose_files_differ_are_told_apart() -> None:
    def network(name: str, *settings: tuple[str, str]):  # type: ignore[no-untyped-def]
        conf = tuple(
            Setting(file="/etc/nccl.conf", line=number, name=key, value=value)
            for number, (key, value) in enumerate(settings, start=1)
        )
        return render_node(NodeFacts(node=name, nccl_conf=conf), Site()).network

    same = network("a", ("NCCL_DEBUG", "WARN"), ("NCCL_DEBUG", "INFO"))
    assert network_drift([same, network("b", ("NCCL_DEBUG", "WARN"))]) == []
    assert network_drift([same, network("b")]) == ["settings in nccl.conf differ: a has NCCL_DEBUG=WARN; b has none"]


def test_every_variable_left_to_nccl_has_its_reason_until_something_sets_it(node: FakeNode) -> None:
    node.file("/etc/nccl.conf", "NCCL_IB_TC=106\n")
    rendered = render_node(node.facts(), Site(environment={"NCCL_CROSS_NIC": "0"}))
    names = [left.name for left in rendered.left_alone]
    assert {"NCCL_PXN_DISABLE", "NCCL_TUNER_PLUGIN", "NCCL_COLLNET_ENABLE", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_SL",
            "NCCL_IB_TIMEOUT", "NCCL_P2P_NET_CHUNKSIZE", "NCCL_TOPO_FILE"} <= set(names)  # fmt: skip
    assert not {"NCCL_IB_TC", "NCCL_CROSS_NIC"} & set(names)
    assert "NCCL_IB_SL" not in table(rendered)
    everything = table(rendered, every_one=True)
    assert all(f"  {left.name} " in everything and left.reason in everything for left in rendered.left_alone)
    found = as_json(rendered)
    assert [left["name"] for left in found["left_alone"]] == names
    assert found["nccl_conf"] == [{"name": "NCCL_IB_TC", "value": "106", "place": "line 1 of /etc/nccl.conf"}]
    assert json.dumps(found)


def test_a_node_that_does_not_use_nccl_leaves_nothing_to_it() -> None:
    assert render_node(NodeFacts(node="a"), Site()).left_alone == []
    assert render_node(NodeFacts(node="a", gpus=(Gpu(address="0000:01:00.0"),)), Site()).left_alone != []


@pytest.mark.parametrize("left", LEFT_ALONE, ids=lambda left: left.name)
def test_a_value_that_nccl_does_not_take_is_told_and_its_own_default_is_one(left) -> None:  # type: ignore[no-untyped-def]
    assert concern(left.name, "no such value").startswith(f"{left.name}=no such value is no value of it: NCCL takes ")
    default = left.default.partition(":")[0].partition(" ")[0]
    if default.isdigit():
        assert concern(left.name, default) == ""


def test_a_problem_is_told_without_the_secrets_of_its_value() -> None:
    said = concern("OMPI_AUTH_TOKEN", "hunter2") + concern("UCX_X", "http://u:hunter2@h")
    assert said.count("matters to UCX and MPI alone") == 2
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("NCCL_IB_HCA=^mlx5_1", "leaves adapters out by name"),
        ("NCCL_IB_HCA=mlx5_1", "mlx5_1 also matches mlx5_10"),
        ("NCCL_IB_HCA==mlx5_1:1", ""),
        ("NCCL_SOCKET_IFNAME=eth1", "eth1 also matches eth10"),
        ("NCCL_SOCKET_IFNAME=^docker0", "so any other interface can be chosen"),
        ("NCCL_SOCKET_IFNAME==eth0", ""),
        ("GLOO_SOCKET_IFNAME=^docker0", "which Gloo takes for a name"),
        ("GLOO_SOCKET_IFNAME=eth0,eth1", "names several interfaces"),
        ("GLOO_SOCKET_IFNAME==eth0", "is no interface's name"),
        ("CUDA_VISIBLE_DEVICES=0", "would hide GPUs from every trial"),
        ("MASTER_ADDR=gpu01", "is set for each rank of a trial"),
        ("UCX_TLS=rc", "matters to UCX and MPI alone"),
        ("NCCL_IB_SL=16", "NCCL takes 0 to 15"),
        ("NCCL_IB_TC=106", ""),
        ("NCCL_DEBUG=WARN", ""),
    ],
)
def test_known_problems_of_what_users_set_are_told(setting: str, problem: str) -> None:
    name, _, value = setting.partition("=")
    said = concern(name, value)
    assert said.startswith(f"{setting} ") == bool(problem)
    assert problem in said


def test_a_secret_in_a_file_stays_one() -> None:
    secret = Setting(file="/etc/nccl.conf", line=1, name="NCCL_TOKEN", value="abc")
    taken, warnings = configured([secret], [Variable(name="NCCL_TOKEN", value="xyz", reason="set by the site file")])
    assert (taken, "abc" in str(warnings), "xyz" in str(warnings)) == ((), False, False)
    assert os.linesep not in warnings[0]
