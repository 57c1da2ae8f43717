"""An exchange between two real hosts: started over SSH, its bytes on the interface between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.active.fleet import Plan, exchange
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import NetworkExpectation, Site
from cluster.profiles import default_profiles
from cluster.transport.ssh import SshOptions, connector
from tests.hosts import lab as lab_module
from tests.hosts.lab import Lab, LabHost, open_lab

if reason := lab_module.unavailable():
    pytest.skip(reason, allow_module_level=True)


def node(lab: Lab, host: LabHost, **network: str) -> InventoryNode:
    login = Host(name=host.name, address=host.address, user="root", key=lab.key)
    threads = {"OMP_NUM_THREADS": "1"}
    return InventoryNode(host=login, site=Site(network=NetworkExpectation(**network), environment=threads))  # type: ignore[arg-type]


def received_bytes(lab: Lab, host: LabHost) -> int:
    return int(lab.run(host, "cat", f"/sys/class/net/{host.interface}/statistics/rx_bytes"))


@pytest.mark.hosts
def test_two_hosts_exchange_over_the_interface_between_them_and_a_wrong_one_is_a_reason(tmp_path: Path) -> None:
    with open_lab(2, tmp_path) as lab:
        one, other = lab.hosts
        connect = connector(SshOptions(known_hosts=lab.known_hosts))
        plan = Plan(connect=connect, profiles=default_profiles(), device="cpu", pair_seconds=100.0)
        before = received_bytes(lab, one)
        speed = exchange(plan, {"a": node(lab, one), "b": node(lab, other)}, ("a", "b"))
        assert isinstance(speed, float), speed
        # Eight exchanges of 64 KiB each way: were the bytes on loopback, the interface would have seen only SSH.
        assert received_bytes(lab, one) - before > 8 * 2**16
        wrong = {"a": node(lab, one), "b": node(lab, other, interface="nowhere0")}
        answer = exchange(plan, wrong, ("a", "b"))
        assert isinstance(answer, str)
        assert answer.startswith("lab2: ")
    assert lab.left_behind() == []
