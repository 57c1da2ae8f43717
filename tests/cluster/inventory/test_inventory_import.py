"""`burst cluster nodes`: files of hosts become inventories, and inventories become lists, tables and JSON."""

import json

import pytest

from cluster.inventory.file import load_inventory
from cluster.inventory.hosts_file import import_hosts, render_inventory
from harness.cli import main

ETC_HOSTS = """\
127.0.0.1 localhost
127.0.1.1 login.lab login
::1       ip6-localhost ip6-loopback
ff02::1   ip6-allnodes
fe80::7   link

10.0.0.1  gpu01 gpu01.lab   # the first
10.0.0.2  gpu02
10.0.0.3  gpu03
10.0.9.9  head
fd00::5   six
"""


def write(tmp_path, text, name="hosts"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_an_etc_hosts_file_gives_its_nodes_and_leaves_out_what_every_system_has(tmp_path):
    hosts = import_hosts(write(tmp_path, ETC_HOSTS))
    assert [(host.name, host.address) for host in hosts] == [
        ("gpu01", "10.0.0.1"),
        ("gpu02", "10.0.0.2"),
        ("gpu03", "10.0.0.3"),
        ("head", "10.0.9.9"),
        ("six", "fd00::5"),
    ]


@pytest.mark.parametrize(
    "content",
    [ETC_HOSTS, "gpu[01-12]\nops@spare:2222 head\n", "b:1\nb:2\nc\n", "10.0.0.1\n10.0.0.2\n", "fd00::[1-3]\n"],
)
def test_what_was_imported_loads_as_the_same_connections(tmp_path, content):
    hosts = import_hosts(write(tmp_path, content))
    inventory = load_inventory(write(tmp_path, render_inventory(hosts, "hosts"), "lab.yaml"))
    assert [node.host for node in inventory.nodes] == hosts


def test_numbered_neighbours_become_one_range(tmp_path, capsys):
    assert main(["cluster", "nodes", "--import", str(write(tmp_path, ETC_HOSTS))]) == 0
    text = capsys.readouterr().out
    assert "- hosts: gpu[01-03]\n  address: 10.0.0.[1-3]\n- hosts: head\n" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("127.0.0.1 localhost\n", "its addresses are all this machine's own"),
        ("10.0.0.1 a\n10.0.0.2 a\n", "hosts:2: a has the address 10.0.0.2, but 10.0.0.1 before"),
        ("10.0.0.1 a;b\n", "hosts:1: 'a;b' is not a host"),
        ("10.0.0.1 a\ngpu[3-1] b\n", "hosts:2: .*counts down"),
        ("", "names no host"),
    ],
)
def test_a_file_that_names_no_usable_nodes_is_one_sentence_and_exit_2(tmp_path, capsys, content, message):
    import re

    assert main(["cluster", "nodes", "--import", str(write(tmp_path, content))]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err)


@pytest.fixture
def inventory(tmp_path):
    return str(
        write(
            tmp_path,
            "site: {name: h200, gpus: {count: 8, model: H200}}\nnodes: ['gpu[01-03]']\n"
            "ssh: {jump: 'bastion, inner'}\noverrides: {gpu02: {environment: {HF_TOKEN: hunter2}}}\n",
            "lab.yaml",
        )
    )


def test_names_are_one_per_line(inventory, capsys):
    assert main(["cluster", "nodes", inventory, "--names"]) == 0
    assert capsys.readouterr().out == "gpu01\ngpu02\ngpu03\n"


def test_the_table_shows_what_is_expected_of_each_node_and_the_way_to_it(inventory, capsys):
    assert main(["cluster", "nodes", inventory, "gpu[02-03]"]) == 0
    printed = capsys.readouterr().out
    assert "bastion > inner" in printed
    assert printed.count("8 x H200") == 2
    assert "lab: 2 nodes, site h200" in printed
    assert main(["cluster", "nodes", inventory, "gpu02"]) == 0
    assert "lab: 1 node, site h200" in capsys.readouterr().out


def test_json_holds_every_nodes_site_but_no_value_of_its_environment(inventory, capsys):
    assert main(["cluster", "nodes", inventory, "--json"]) == 0
    printed = capsys.readouterr().out
    nodes = json.loads(printed)
    assert [node["name"] for node in nodes] == ["gpu01", "gpu02", "gpu03"]
    assert nodes[1]["site"]["environment"] == ["HF_TOKEN"]
    assert nodes[0]["jump"] == "bastion, inner"
    assert "hunter2" not in printed


@pytest.mark.parametrize("arguments", [[], ["a.yaml", "--import", "b"], ["--import", "b", "--json"], ["absent.yaml"]])
def test_wrong_usage_is_one_sentence_and_exit_2(arguments, capsys):
    assert main(["cluster", "nodes", *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
