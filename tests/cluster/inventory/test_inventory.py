"""An inventory: ranges, exclusions, sites and overrides become nodes that know what is expected of them."""

from pathlib import Path

import pytest

from cluster.files.errors import UsageError
from cluster.inventory.file import load_inventory, read_inventory
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import from_hosts, opened_by
from cluster.inventory.site import DiskLimit, Site, SshDefaults


def write(tmp_path, text, name="lab.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def load(tmp_path, text):
    return load_inventory(write(tmp_path, text))


def names(inventory):
    return [node.name for node in inventory.nodes]


FULL = """\
name: lab
site: site.yaml
ssh: {user: ops, jump: "admin@bastion:2200"}
exclude: [gpu07]
nodes:
  - gpu[01-08]
  - hosts: old[1-4]
    exclude: "old[2-3]"
    address: 10.0.0.[11-14]
    gpus: {count: 4}
    ssh: {port: 2222}
overrides:
  gpu03: {network: {interface: eth1}}
  gpu[03-04]: {gpus: {count: 7}, disks: [{path: /data}]}
"""
SITE = """\
name: h200
gpus: {count: 8, model: H200}
network: {mtu: 9000}
ssh: {user: nobody, key: ~/.ssh/lab}
"""


@pytest.fixture
def full(tmp_path):
    write(tmp_path, SITE, "site.yaml")
    return {node.name: node for node in load(tmp_path, FULL).nodes}


def test_ranges_and_exclusions_leave_the_nodes_in_the_order_they_were_named(full):
    assert list(full) == ["gpu01", "gpu02", "gpu03", "gpu04", "gpu05", "gpu06", "gpu08", "old1", "old4"]


def test_an_address_belongs_to_the_name_beside_it_also_when_others_are_excluded(full):
    assert [full[name].host.target for name in ("old1", "old4")] == ["ops@10.0.0.11:2222", "ops@10.0.0.14:2222"]
    assert full["gpu01"].host.target == "ops@gpu01"


def test_what_is_said_of_a_group_or_a_node_is_laid_over_the_site_key_by_key(full):
    assert (full["gpu01"].site.gpus.count, full["old1"].site.gpus.count) == (8, 4)
    assert full["old1"].site.gpus.model == "H200"
    assert (full["gpu03"].site.network.interface, full["gpu03"].site.network.mtu) == ("eth1", 9000)
    assert full["gpu03"].site.gpus.count == full["gpu04"].site.gpus.count == 7
    assert full["gpu04"].site.disks == (DiskLimit(path="/data"),)
    assert full["gpu04"].site.network.interface is None


def test_login_and_jump_host_come_from_the_nearest_that_says_them(full):
    host = full["gpu01"].host
    assert (host.user, host.key) == ("ops", Path("~/.ssh/lab"))
    assert host.jump == Host(name="bastion", address="bastion", user="admin", port=2200, key=Path("~/.ssh/lab"))


def test_nodes_of_which_the_same_was_said_share_one_site(full):
    assert full["gpu01"].site is full["gpu08"].site
    assert full["gpu01"].site is not full["old1"].site


def test_a_target_wins_over_ssh_and_several_jump_hosts_are_taken_in_their_order(tmp_path):
    text = "nodes: [root@a:23]\nssh: {user: ops, port: 24, jump: 'one, ops@two:25', jump_key: /k}\n"
    (node,) = load(tmp_path, text).nodes
    assert node.host.target == "root@a:23"
    assert node.host.jump.target == "ops@two:25"
    assert node.host.jump.jump.target == "one"
    assert node.host.jump.jump.key == node.host.jump.key == Path("/k")


def test_one_key_names_the_file_with_the_keys_of_hosts_and_jump_hosts(tmp_path):
    text = "nodes: [a, {hosts: b, ssh: {known_hosts: /other}}]\nssh: {known_hosts: ~/lab, jump: 'one, two'}\n"
    for node, known in zip(load(tmp_path, text).nodes, ("~/lab", "/other"), strict=True):
        host, jump = node.host, node.host.jump
        assert {host.known_hosts, jump.known_hosts, jump.jump.known_hosts} == {Path(known)}


@pytest.mark.parametrize(
    ("login", "jump_key"), [("", "/mine"), ("key: /k, ", "/mine"), ("key: /k, jump_key: /j, ", "/j")]
)
def test_a_key_given_by_hand_takes_the_place_of_the_sites_key_on_the_whole_way(tmp_path, login, jump_key):
    inventory = load(tmp_path, f"nodes: [root@a:23, b]\nssh: {{{login}user: ops, jump: 'one, two'}}\n")
    for node in opened_by(inventory, Path("/mine")).nodes:
        assert node.host.key == node.site.ssh.key == Path("/mine")
        assert node.host.jump.key == node.host.jump.jump.key == Path(jump_key)
    assert [node.host.target for node in opened_by(inventory, Path("/mine")).nodes] == ["root@a:23", "ops@b"]


def test_a_site_may_be_a_mapping_and_one_given_by_hand_replaces_it(tmp_path):
    path = write(tmp_path, "site: {name: inline, gpus: {count: 2}}\nnodes: n[1-2]\n")
    other = write(tmp_path, SITE, "other.yaml")
    assert {node.site.gpus.count for node in read_inventory(path).nodes} == {2}
    assert {node.site.name for node in read_inventory(path, other).nodes} == {"h200"}


def test_a_plain_list_is_an_inventory_too(tmp_path):
    path = write(tmp_path, "gpu[01-02]\nops@spare:2222 gpu01\n", "hosts")
    inventory = read_inventory(path)
    assert names(inventory) == ["gpu01", "gpu02", "spare"]
    assert inventory.nodes[0].site == Site()
    other = write(tmp_path, SITE, "other.yaml")
    assert read_inventory(path, other).nodes[0].host.target == "nobody@gpu01"


def test_nodes_are_chosen_by_name_or_range_in_the_inventorys_order(tmp_path):
    inventory = load(tmp_path, "nodes: [head, 'gpu[01-04]']\n")
    assert names(inventory.select(["gpu[02-03]", "head"])) == ["head", "gpu02", "gpu03"]
    with pytest.raises(UsageError, match="gpu05 is no node of the inventory lab; did you mean gpu0"):
        inventory.select(["gpu[04-05]"])


def test_a_host_without_ssh_takes_nothing_from_it():
    here = Host(name="here")
    site = Site(ssh=SshDefaults(user="ops", jump="bastion"))
    assert from_hosts([here], site).nodes[0].host == here


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\n", "lab.yaml: the inventory lacks nodes; add a list"),
        ("", "the inventory is empty"),
        ("nodes: []\n", "no node left; name some"),
        ("nodes: [a]\nexclude: a\n", "no node left"),
        ("nodes: [a]\nnode: [b]\n", ":2: unknown key node; did you mean nodes"),
        ("nodes:\n- {hosts: a, adress: b}\n", ":2: unknown key adress; did you mean address"),
        ("nodes:\n- {address: b}\n", ":2: a group of nodes lacks hosts"),
        ("nodes:\n- a\n- b\n- a\n", ":4: a was already named at .*lab.yaml:2; name every node once"),
        ("nodes:\n- {hosts: [a, a]}\n", ":2: hosts names a node twice"),
        ("nodes:\n- gpu[04-01]\n", r":2: 'gpu\[04-01\]' counts down"),
        ("nodes: [gpu[01-02]]\n", "not readable as YAML"),
        ("nodes:\n- [01, 02]\n", "octal"),
        ("nodes:\n- [a]\n", r":2: a node is a list; expected text; a range in a list is written in quotes"),
        ("nodes:\n- 7\n", ":2: a node is 7; expected text"),
        ("nodes: [a]\nexclude:\n- b\n", ":3: b is no node named above; "),
        ("nodes: ['gpu[1-3]']\noverrides: {gpu4: {gpus: {count: 1}}}\n", ":2: gpu4 is no node named above; did you"),
        ("nodes: [a]\noverrides: [b]\n", ":2: overrides is a list; expected a mapping"),
        ("nodes: [a]\noverrides:\n  a: {gpu: {}}\n", ":3: unknown key overrides.a.gpu; did you mean gpus"),
        ("nodes: [a]\noverrides:\n  a:\n    gpus: {count: -1}\n", ":4: gpus.count is -1"),
        (
            "nodes:\n- {hosts: 'a[1-3]', address: '10.0.0.[1-2]'}\n",
            ":2: address stands for 2 addresses but hosts for 3",
        ),
        (
            "nodes: ['a[1-2]']\noverrides: {'a[1-2]': {address: x}}\n",
            "address stands for 1 addresses but a.* for 2 nodes",
        ),
        ("nodes:\n- {hosts: a, address: x}\n- x\n", ":3: x and a are both x port 22; give every node an address"),
        ("nodes:\n- gpu01\n- GPU01\n", ":3: GPU01 and gpu01 are both GPU01 port 22; give every node an address"),
        ("site: absent.yaml\nnodes: [a]\n", ":1: there is no site file .*absent.yaml; give its path relative"),
        ("site: [a]\nnodes: [a]\n", ":1: site is a list; expected a mapping"),
        (
            "nodes: [a]\nssh: {jump: 'b[1-2]'}\n",
            ":2: the jump host 'b\\[1-2\\]' stands for 2 hosts; expected a single one",
        ),
        ("nodes: [a]\nssh: {jump: ''}\n", "is not a host"),
        ("nodes: [a]\ncontainer: {engine: docker}\n", ":2: container.engine is docker but container.image is empty"),
    ],
)
def test_a_wrong_inventory_is_refused_with_file_line_and_what_to_write(tmp_path, text, message):
    with pytest.raises(UsageError, match=message) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "lab.yaml"))


def test_a_mistake_in_the_site_file_is_shown_there(tmp_path):
    write(tmp_path, "gpus: {count: 8}\nnetwork:\n  mtu: 9\n", "site.yaml")
    with pytest.raises(UsageError, match=r"site.yaml:3: network.mtu is 9; expected 576"):
        load(tmp_path, "site: site.yaml\nnodes: [a]\n")
