"""Whole machines, read with the real script from trees that look like theirs: which interface and which adapters."""

import pytest

from cluster.discovery.hcas import choose_hcas, choose_interface
from cluster.inventory.site import Site, Storage
from tests.cluster.fake_node import FakeNode, a800, h100, roce


@pytest.fixture
def node(tmp_path, monkeypatch):
    return FakeNode(tmp_path, monkeypatch)


def reasons(facts, **wishes):
    return {port.name: port.reason for port in choose_hcas(facts, **wishes).ports if not port.kept}


def test_h100_uses_the_adapter_beside_each_gpu_and_none_that_serves_storage(node):
    h100(node)
    facts = node.facts()
    choice = choose_hcas(facts)
    assert choice.kept == (
        "mlx5_0:1", "mlx5_3:1", "mlx5_4:1", "mlx5_5:1", "mlx5_6:1", "mlx5_9:1", "mlx5_10:1", "mlx5_11:1",
    )  # fmt: skip
    assert reasons(facts) == {
        "mlx5_1:1": "carries the route to storage 10.8.0.100 (ibs0)",
        "mlx5_7:1": "no GPU is nearest to it",
        "mlx5_bond_0:1": "is a bond of Ethernet, and this node has InfiniBand",
    }
    assert choice.ports[0].reason == "nearest to GPU 0 (they share 0000:20:00.0)"
    assert choice.warnings == ()
    interface = choose_interface(facts)
    assert (interface.name, interface.reason) == ("bond0", "carries the route to the head 10.0.0.1, as 10.0.0.11")


def test_facts_of_a_machine_are_read_as_its_kernel_shows_them(node):
    h100(node)
    facts = node.facts()
    assert (facts.driver, facts.nccl, facts.unread) == ("580.95.05", "2.27.7", ())
    gpu = facts.gpus[0]
    assert (gpu.address, gpu.name, gpu.compute_capability) == ("0000:40:00.0", "NVIDIA H100 80GB HBM3", 9.0)
    assert gpu.device.path == ("pci0000:10", "0000:10:01.0", "0000:20:00.0", "0000:20:01.0", "0000:40:00.0")
    assert gpu.device.numa_node == 0
    bond = facts.interface("bond0")
    assert (bond.is_bond, bond.lower, bond.addresses, bond.mtu) == (True, ("eth0", "eth1"), ("10.0.0.11",), 1500)
    port = next(port for port in facts.ports if port.name == "mlx5_10:1")
    assert (port.state, port.phys_state, port.rate_gbps, port.link_layer) == ("ACTIVE", "LinkUp", 400.0, "InfiniBand")


def test_a800_uses_the_four_adapters_that_two_gpus_share_each(node):
    a800(node)
    facts = node.facts()
    assert choose_hcas(facts).kept == ("mlx5_2:1", "mlx5_3:1", "mlx5_5:1", "mlx5_6:1")
    assert choose_hcas(facts).ports[2].reason == "nearest to GPUs 0, 1 (they share 0000:20:00.0)"
    assert reasons(facts) == dict.fromkeys(("mlx5_0:1", "mlx5_1:1", "mlx5_4:1"), "runs at 100 Gb/s, others at 200")


def test_the_head_itself_uses_the_interface_that_holds_its_address(node):
    a800(node)
    assert node.facts().head_route.interface == "ens1"  # the kernel's answer is lo, which no other node could reach
    interface = choose_interface(node.facts())
    assert (interface.name, interface.reason) == ("ens1", "holds the head's own address 10.0.0.1")


def test_without_infiniband_ethernet_adapters_near_gpus_are_used(node):
    roce(node)
    assert choose_hcas(node.facts()).kept == ("rocep0s0:1", "rocep1s0:1")
    assert reasons(node.facts()) == {"mlx5_0:1": "runs at 100 Gb/s, others at 400"}


def test_storage_behind_a_vlan_on_a_bond_is_found_at_its_adapter(node):
    roce(node)
    node.interface("bond1", lower=("enp1s0",), bond=True)
    node.interface("bond1.40", address="10.40.0.2", lower=("bond1",))
    node.route("10.40.0.9", "bond1.40")
    choice = choose_hcas(node.facts(Site(storage=Storage(servers=("10.40.0.9",)))))
    assert choice.kept == ("rocep0s0:1",)
    lost = "rocep1s0:1, carries the route to storage 10.40.0.9 (bond1.40)"
    assert choice.warnings == (f"GPU 1 reaches the network through a distant adapter: the nearest, {lost}",)


def test_an_adapter_that_is_the_only_one_serves_gpus_and_storage(node):
    node.gpu("pci0000:10/0000:10:01.0/0000:11:00.0")
    node.hca("mlx5_0", "pci0000:20/0000:20:01.0/0000:21:00.0", numa=1)
    node.interface("ib0", "pci0000:20/0000:20:01.0/0000:21:00.0", address="10.8.0.1")
    node.route("10.8.0.9", "ib0")
    node.mount("10.8.0.9:/export /data nfs4 rw,addr=10.8.0.9 0 0")
    assert choose_hcas(node.facts()).kept == ("mlx5_0:1",)


def test_no_adapter_at_all(node):
    node.gpu("pci0000:10/0000:10:01.0/0000:11:00.0")
    node.interface("eth0", address="10.0.0.2")
    node.route("10.0.0.1", "eth0")
    assert choose_hcas(node.facts()).ports == ()


def test_without_ip_the_kernels_route_table_decides(node):
    node.interface("docker0")
    node.interface("eth0")
    node.interface("ens1")
    node.interface("ens2")
    node.without_ip()
    node.table_row("docker0", "0.0.0.0", "0.0.0.0", metric=100)
    node.table_row("eth0", "0.0.0.0", "0.0.0.0", metric=50)
    node.table_row("ens1", "10.0.0.0", "255.255.255.0")
    node.table_row("ens2", "10.0.0.0", "255.255.0.0")
    assert node.facts(head="10.0.0.1").head_route.interface == "ens1"
    assert node.facts(head="10.0.7.1").head_route.interface == "ens2"
    assert node.facts(head="192.0.2.9").head_route.interface == "eth0"
    assert {found.name for found in node.facts().interfaces} == {"docker0", "eth0", "ens1", "ens2"}


def test_no_way_to_the_head_names_no_interface(node):
    node.interface("eth0", address="10.0.0.2")
    choice = choose_interface(node.facts(head="10.0.0.1"))
    assert choice.name == ""
    assert choice.warnings == (
        "no route to the head 10.0.0.1: check the address, or name network.interface in the site",
    )


def test_gpus_without_a_driver_are_found_on_the_bus(node):
    node.gpu("pci0000:10/0000:10:01.0/0000:11:00.0")
    node.program("nvidia-smi", "echo 'NVIDIA-SMI has failed because it could not communicate'; exit 9")
    facts = node.facts()
    assert [gpu.address for gpu in facts.gpus] == ["0000:11:00.0"]
    assert facts.driver is None
    assert len(facts.unread) == 1
    assert "cannot talk to the driver" in facts.unread[0]


def test_names_that_are_no_names_do_not_get_into_facts(node):
    node.program("ip", """echo '[{"ifname": "a;reboot", "mtu": 1500}, {"ifname": "eth0", "mtu": 1500}]'""")
    assert [found.name for found in node.facts().interfaces] == ["eth0"]
    node.program("ip", """case "$*" in *get*) echo '[{"dev": "$(reboot)"}]' ;; esac""")
    assert node.facts().head_route.interface == ""
