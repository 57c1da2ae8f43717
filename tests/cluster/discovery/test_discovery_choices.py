"""Choices and comparisons from facts alone."""

import pytest

from cluster.discovery.drift import NodeNetwork, network_drift
from cluster.discovery.facts import Device, Gpu, Interface, NodeFacts, Port, Route
from cluster.discovery.hcas import choose_hcas, choose_interface, common_depth, nearest
from cluster.discovery.read import interface_for


def port(name, path=(), *, state="ACTIVE", phys="LinkUp", rate=400.0, layer="InfiniBand", numa=None, number=1):
    device = Device(path=path, numa_node=numa)
    return Port(hca=name, number=number, state=state, phys_state=phys, rate_gbps=rate, link_layer=layer, device=device)


def gpu(*path, numa=None):
    return Gpu(address=path[-1] if path else "?", device=Device(path=path, numa_node=numa))


def kept(facts, **wishes):
    return choose_hcas(facts, **wishes).kept


def dropped(facts, **wishes):
    return {choice.name: choice.reason for choice in choose_hcas(facts, **wishes).ports if not choice.kept}


def test_devices_share_the_path_to_their_deepest_common_bridge():
    assert common_depth(Device(path=("r", "a", "b", "g")), Device(path=("r", "a", "c", "h"))) == 2
    assert common_depth(Device(path=("r", "a", "g")), Device(path=("s", "a", "h"))) == 0
    assert common_depth(Device(), Device(path=("r", "g"))) == 0


def test_devices_of_other_root_buses_are_near_by_their_numa_node():
    ports = [port("mlx5_0", ("r1", "x"), numa=0), port("mlx5_1", ("r2", "y"), numa=1)]
    assert nearest([gpu("r3", "g", numa=1)], ports) == {"mlx5_1:1": "nearest to GPU 0 (they share NUMA node 1)"}


@pytest.mark.parametrize("gpus", [[], [gpu()], [gpu("r9", "g")]])
def test_where_nothing_tells_distances_every_port_is_kept(gpus):
    facts = NodeFacts(node="n", gpus=tuple(gpus), ports=(port("mlx5_0", ("r1", "x")), port("mlx5_1", ("r2", "y"))))
    assert kept(facts) == ("mlx5_0:1", "mlx5_1:1")


def test_names_come_in_the_order_people_count_in():
    facts = NodeFacts(node="n", ports=(port("mlx5_10"), port("mlx5_2"), port("mlx5_1", number=2), port("mlx5_1")))
    assert kept(facts) == ("mlx5_1:1", "mlx5_1:2", "mlx5_2:1", "mlx5_10:1")


def test_a_port_that_is_down_is_dropped_and_missed_by_its_gpu():
    near = port("mlx5_0", ("r", "s", "x"), state="DOWN", phys="Polling")
    facts = NodeFacts(node="n", gpus=(gpu("r", "s", "g"),), ports=(near, port("mlx5_1", ("r", "y"))))
    assert kept(facts) == ("mlx5_1:1",)
    assert dropped(facts) == {"mlx5_0:1": "is DOWN with its link Polling"}
    assert choose_hcas(facts).warnings == (
        "GPU 0 reaches the network through a distant adapter: the nearest, mlx5_0:1, is DOWN with its link Polling",
    )


def test_an_active_port_with_its_link_in_trouble_is_dropped():
    facts = NodeFacts(node="n", ports=(port("mlx5_0", phys="LinkErrorRecovery"), port("mlx5_1")))
    assert kept(facts) == ("mlx5_1:1",)


def test_ethernet_in_place_of_dead_infiniband_is_used_with_a_warning():
    facts = NodeFacts(node="n", ports=(port("mlx5_0", state="DOWN"), port("mlx5_1", layer="Ethernet")))
    assert kept(facts) == ("mlx5_1:1",)
    assert choose_hcas(facts).warnings == ("no InfiniBand port is active (mlx5_0:1), so Ethernet adapters are used",)


def test_adapters_that_need_a_plugin_are_left_to_it():
    facts = NodeFacts(node="n", ports=(port("rdmap0", layer="other", rate=100.0),))
    assert kept(facts) == ()
    assert dropped(facts) == {"rdmap0:1": "needs a network plugin: its link layer is not one of verbs"}


def test_the_ports_of_one_adapter_are_separate_when_one_carries_storage():
    device = Device(path=("r", "x"))
    interfaces = tuple(Interface(name=f"ib{n}", device=device, dev_port=n) for n in (0, 1))
    facts = NodeFacts(
        node="n",
        interfaces=interfaces,
        ports=(port("mlx4_0", ("r", "x")), port("mlx4_0", ("r", "x"), number=2)),
        storage_routes=(Route(target="10.8.0.9", interface="ib1"),),
    )
    assert kept(facts) == ("mlx4_0:1",)
    assert dropped(facts) == {"mlx4_0:2": "carries the route to storage 10.8.0.9 (ib1)"}


def test_the_sites_own_list_wins_over_everything_that_discovery_would_do():
    facts = NodeFacts(node="n", ports=(port("mlx5_0"), port("mlx5_1", rate=100.0, state="DOWN"), port("mlx5_2")))
    choice = choose_hcas(facts, wanted=["mlx5_1", "mlx5_9:1"])
    assert (choice.kept, choice.origin) == (("mlx5_1", "mlx5_9:1"), "site")
    assert {port.reason for port in choice.ports if port.kept} == {"named by the site file"}
    assert dropped(facts, wanted=["mlx5_1"]) == dict.fromkeys(("mlx5_0:1", "mlx5_2:1"), "the site file names others")
    assert choice.warnings == (
        "the site names mlx5_1:1, which is DOWN with its link LinkUp",
        "the site names the adapter mlx5_9:1, which this node lacks; correct network.hcas",
    )
    assert kept(facts, wanted=[]) == ()


def test_ports_below_the_rate_the_site_expects_are_a_warning():
    facts = NodeFacts(node="n", ports=(port("mlx5_0", rate=200.0),))
    assert choose_hcas(facts, rate_gbps=400).warnings == ("mlx5_0:1 runs at 200 Gb/s, but the site expects 400",)
    assert choose_hcas(facts, rate_gbps=200).warnings == ()


def test_the_sites_own_interface_wins_and_is_checked():
    facts = NodeFacts(
        node="n",
        interfaces=(Interface(name="eth0", mtu=1500), Interface(name="ens1", up=False, mtu=9000)),
        head_route=Route(target="10.0.0.1", interface="eth0"),
    )
    choice = choose_interface(facts, wanted="ens1", mtu=1500)
    assert (choice.name, choice.origin, choice.reason) == ("ens1", "site", "named by the site file")
    assert choice.warnings == ("interface ens1 is down", "interface ens1 has an MTU of 9000, but the site expects 1500")
    absent = choose_interface(facts, wanted="eth7").warnings
    assert absent == ("interface eth7 is not on this node, which has ens1, eth0",)


def test_a_machine_on_its_own_uses_loopback():
    assert choose_interface(NodeFacts(node="n")).name == "lo"


def network(node, *, hcas=("mlx5_0",), mtu=1500, interface="eth0", driver="580", nccl="2.27.7", rate=400.0):
    facts = NodeFacts(
        node=node,
        interfaces=(Interface(name=interface, mtu=mtu),),
        ports=tuple(port(name, rate=rate) for name in hcas),
        head_route=Route(target="10.0.0.1", interface=interface),
        driver=driver,
        nccl=nccl,
    )
    return NodeNetwork(facts=facts, interface=choose_interface(facts), hcas=choose_hcas(facts))


def test_equal_nodes_do_not_drift_whatever_their_interfaces_are_called():
    assert network_drift([network("a"), network("b", interface="ens1"), network("c", driver=None, nccl=None)]) == []


def test_different_adapters_are_listed_by_node_the_majority_first():
    nodes = [network("a", hcas=("mlx5_1",)), network("b"), network("c")]
    assert network_drift(nodes) == [
        "HCA sets differ, with which NCCL can hang without an error: b, c have 1 (mlx5_0:1); a has 1 (mlx5_1:1)"
    ]


def test_every_kind_of_drift_has_its_sentence():
    other = network("b", hcas=(), mtu=9000, driver="570", nccl="2.26.2")
    beginnings = [sentence.partition(" ")[0] for sentence in network_drift([network("a"), other])]
    assert beginnings == ["HCA", "MTUs", "NVIDIA", "NCCL"]
    slow = network_drift([network("a"), network("b", rate=200.0)])
    assert [sentence.partition(":")[0] for sentence in slow] == [
        "HCA rates or link layers differ, so the slowest sets the pace"
    ]


def test_many_nodes_are_counted_after_the_first_names():
    sentence = network_drift([network(f"n{i}") for i in range(9)] + [network("x", driver="570")])[0]
    assert sentence == "NVIDIA drivers differ: n0, n1, n2, n3, n4, n5 and 3 more have 580; x has 570"


def row(interface, destination, mask, *, flags="0001", metric=0):
    return f"{interface}\t{destination}\t00000000\t{flags}\t0\t0\t{metric}\t{mask}\t0\t0\t0"


HEADER = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"


@pytest.mark.parametrize(
    ("target", "interface"),
    [("10.0.0.9", "eth1"), ("10.1.0.9", "eth2"), ("8.8.8.8", "eth0"), ("127.0.0.1", "lo"), ("fd00::1", "")],
)
def test_the_most_specific_route_wins_then_the_smallest_metric(target, interface):
    rows = [
        row("slow", "00000000", "00000000", metric=9),
        row("eth0", "00000000", "00000000", metric=1),
        row("eth1", "0000000A", "00FFFFFF"),
        row("eth2", "0000000A", "000000FF"),
        row("refused", "0000000A", "FFFFFFFF", flags="0201"),
        row("down", "0900000A", "FFFFFFFF", flags="0000"),
        "not a row",
    ]
    assert interface_for(target, "\n".join([HEADER, *rows])) == interface


def test_a_table_without_a_way_names_no_interface():
    assert interface_for("10.0.0.9", HEADER) == ""
