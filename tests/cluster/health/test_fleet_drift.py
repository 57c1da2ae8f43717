"""Versions compared between nodes."""

from __future__ import annotations

import pytest

from cluster.discovery.drift import named_twice, version_drift
from cluster.probing.verdict import Verdict

Node = tuple[str, dict[str, Verdict]]  # its name, and its verdicts by check


def node(name: str, driver: str = "580", cuda: str = "13.0", vbios: str = "96.00", model: str = "NVIDIA H200") -> Node:
    facts = {"driver": driver, "cuda": cuda, "vbios": {model: [vbios]}}
    verdicts = {
        "reachability": Verdict(level="ok", summary=""),
        "gpu_versions": Verdict(level="ok", summary="", facts=facts),
    }
    return name, verdicts


def levels(*nodes: Node) -> dict[str, str]:
    return {name: verdict.level for name, verdict in version_drift(dict(nodes)).items()}


def test_nodes_that_agree_are_ok() -> None:
    assert levels(node("a"), node("b"), node("c")) == {"a": "ok", "b": "ok", "c": "ok"}


def test_the_node_that_differs_from_most_is_reported() -> None:
    verdicts = version_drift(dict([node("a"), node("b", driver="570"), node("c")]))
    assert {name: verdict.level for name, verdict in verdicts.items()} == {"a": "ok", "b": "warn", "c": "ok"}
    assert verdicts["b"].summary == "driver 570, but 2 of 3 nodes have 580"


def test_a_host_under_two_names_fails_under_the_second() -> None:
    """As a name and an address, or two containers that were given the same GPUs."""

    def with_uuids(name: str, *uuids: str, driver: str = "580") -> Node:
        _, verdicts = node(name, driver=driver)
        return name, verdicts | {"gpus": Verdict(level="ok", summary="", facts={"uuids": list(uuids)})}

    nodes = [with_uuids("a", "GPU-1", "GPU-2"), with_uuids("b", "GPU-3"), with_uuids("10.0.0.1", "GPU-2"), node("c")]
    verdicts = version_drift(dict(nodes))
    assert {name: verdict.level for name, verdict in verdicts.items()} == {
        "a": "ok", "b": "ok", "10.0.0.1": "fail", "c": "ok",
    }  # fmt: skip
    same = verdicts["10.0.0.1"]
    assert (same.summary, same.action) == ("has the same GPUs as a, so both are one host; name it once", "isolate")
    assert set(named_twice(dict(nodes))) == {"10.0.0.1"}
    assert set(named_twice(dict(reversed(nodes)))) == {"a"}


def test_another_vbios_fails_and_outweighs_another_driver() -> None:
    verdict = version_drift(dict([node("a"), node("b", driver="570", vbios="95.00"), node("c")]))["b"]
    assert (verdict.level, verdict.action) == ("fail", "isolate")
    assert verdict.summary == "VBIOS 95.00, but 2 of 3 nodes have 96.00"


def test_without_a_majority_all_are_reported() -> None:
    verdicts = version_drift(dict([node("a", cuda="13.0"), node("b", cuda="12.8")]))
    assert {name: verdict.summary for name, verdict in verdicts.items()} == {
        "a": "CUDA 13.0, but others have 12.8",
        "b": "CUDA 12.8, but others have 13.0",
    }


def test_only_nodes_with_the_same_gpus_are_compared() -> None:
    old = [node(name, driver="535", vbios="92.00", model="NVIDIA A800-SXM4-80GB") for name in ("x", "y")]
    assert levels(node("a"), node("b"), *old) == {"a": "ok", "b": "ok", "x": "ok", "y": "ok"}
    assert levels(node("a"), old[0]) == {}


@pytest.mark.parametrize(
    ("check", "fact", "usual", "other", "words"),
    [
        ("host_versions", "kernel", "6.8.0-31", "6.8.0-45", "kernel 6.8.0-45, but 2 of 3 nodes have 6.8.0-31"),
        ("host_versions", "ofed", "23.10", "24.04", "OFED 24.04, but 2 of 3"),
        ("adapters", "firmware", {"MT_1": ["28.39"]}, {"MT_1": ["28.36"]}, "adapter firmware 28.36, but 2 of 3"),
        ("adapters", "mtu", "4092", "2044", "MTU of the adapters 2044, but 2 of 3"),
        ("interface", "mtu", 9000, 1500, "MTU of the interface 1500, but 2 of 3 nodes have 9000"),
        ("pkey", "pkeys", ["0x8001 0xffff"], ["0xffff"], "partition keys 0xffff, but 2 of 3 nodes have 0x8001 0xffff"),
    ],
)
def test_whatever_must_match_between_nodes_is_compared(check, fact, usual, other, words):
    nodes = dict([node("a"), node("b"), node("c")])
    for name, value in (("a", usual), ("b", other), ("c", usual)):
        nodes[name][check] = Verdict(level="ok", summary="", facts={fact: value})
    verdicts = version_drift(nodes)
    assert {name: verdict.level for name, verdict in verdicts.items()} == {"a": "ok", "b": "warn", "c": "ok"}
    assert verdicts["b"].summary.startswith(words)
    nodes["b"][check] = Verdict(level="ok", summary="")
    assert version_drift(nodes)["b"].level == "ok", "a node without the value differs from none"


def test_nodes_without_gpus_are_compared_among_themselves() -> None:
    nodes = {}
    for name, kernel in (("x", "6.1"), ("y", "6.1"), ("z", "6.8")):
        nodes[name] = {
            "gpu_versions": Verdict(level="ok", summary="no GPU"),
            "host_versions": Verdict(level="ok", summary="", facts={"kernel": kernel}),
        }
    verdicts = version_drift({**nodes, **dict([node("a")])})
    assert {name: verdict.level for name, verdict in verdicts.items()} == {"x": "ok", "y": "ok", "z": "warn"}
    assert verdicts["x"].summary == "as 2 other nodes without GPUs"


def test_nodes_without_versions_are_left_out() -> None:
    silent = ("z", {"reachability": Verdict(level="unknown", summary="")})
    assert levels(node("a"), silent) == {}
