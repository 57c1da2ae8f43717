"""Command lines of a cluster, as whole strings; its state; and `up` and `down` against nodes that do not answer."""

from __future__ import annotations

import dataclasses
import json
import shlex
import socket
from pathlib import Path

import pytest

from cluster.files.errors import UsageError
from cluster.inventory.checkout import mismatch
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import Inventory, InventoryNode
from cluster.inventory.site import Container, Mount, RayPorts, Site
from cluster.ray_cluster import commands, down, up
from cluster.ray_cluster.down import cluster_status, end_cluster, interpreter
from cluster.ray_cluster.state import ClusterState, StartedNode, StateDirectory
from cluster.ray_cluster.up import start_cluster
from cluster.transport.runner import Unreachable
from harness.machine.this_machine import Machine, ranks_of

PORTS = RayPorts(head_port=7000, worker_port_first=21000, worker_port_last=21099)
HERE = {"address": "10.0.0.1", "directory": "/tmp/r"}


def test_the_head_listens_where_the_site_says():
    assert shlex.join(commands.start_command("/venv/bin/python", PORTS, **HERE, head="")) == (
        "/venv/bin/python -u -c 'import ray.scripts.scripts as ray; ray.get_ray_client_dependency_error = lambda: "
        "True; ray.main()' start --head --port=7000 --include-dashboard=false --dashboard-host=127.0.0.1 "
        "--dashboard-port=8265 --node-ip-address=10.0.0.1 --node-manager-port=0 --object-manager-port=0 "
        "--min-worker-port=21000 --max-worker-port=21099 --temp-dir=/tmp/r/ray --object-store-memory=1073741824 "
        "--num-cpus=1 --include-log-monitor=false --disable-usage-stats"
    )


def test_a_worker_joins_the_head_and_no_command_line_holds_a_secret():
    worker = commands.start_command("/venv/bin/python", PORTS, **HERE, head="10.0.0.9:7000")
    assert "--address=10.0.0.9:7000" in worker
    assert "--head" not in worker
    assert "token" not in " ".join(worker).lower()
    assert commands.SETTINGS["RAY_USAGE_STATS_ENABLED"] == "0"


def test_ports_that_must_be_free_are_those_the_site_fixes():
    assert commands.fixed_ports(PORTS, head=True) == {"head_port": 7000}
    assert commands.fixed_ports(dataclasses.replace(PORTS, dashboard=True), head=True) == {
        "head_port": 7000,
        "dashboard_port": 8265,
    }
    assert commands.fixed_ports(PORTS, head=False) == {}
    assert commands.fixed_ports(RayPorts(node_manager_port=7001), head=False) == {"node_manager_port": 7001}


def test_a_container_gets_what_the_site_says_and_no_privileges():
    image = Container(
        engine="docker",
        image="burst:1",
        mounts=(Mount(source="/data"), Mount(source="/opt/x y", target="/x", read_only=True)),
        extra_arguments=("--device", "/dev/infiniband"),
    )
    assert shlex.join(commands.run_container(image, mark="abc/gpu01")) == (
        "docker run --detach --init --name burst-ray-abc-gpu01 --label burst.ray.node=abc/gpu01 --network host "
        "--ipc host --gpus all --ulimit memlock=-1 --ulimit stack=67108864 --mount type=bind,source=/data,target=/data "
        "--mount 'type=bind,source=/opt/x y,target=/x,readonly' --device /dev/infiniband --entrypoint sleep burst:1 "
        "infinity"
    )
    private = Container(
        engine="docker", image="burst:1", ipc="private", gpus="", extra_arguments=("--shm-size=64g", "--privileged")
    )
    assert shlex.join(commands.run_container(private, mark="abc/0")) == (
        "docker run --detach --init --name burst-ray-abc-0 --label burst.ray.node=abc/0 --network host --ipc private "
        "--ulimit memlock=-1 --ulimit stack=67108864 --shm-size=64g --privileged --entrypoint sleep burst:1 infinity"
    )


def test_only_containers_with_our_mark_are_looked_for_and_only_by_id_removed():
    assert shlex.join(commands.find_containers("docker", "abc/0")) == (
        "docker ps --all --quiet --no-trunc --filter label=burst.ray.node=abc/0"
    )
    assert commands.remove_containers("podman", ["f00d"]) == ["podman", "rm", "--force", "--volumes", "f00d"]
    node = dataclasses.replace(state(Path("/")).nodes[0], python="/opt/python")
    inside = dataclasses.replace(node, engine="podman", container_id="f00d")
    assert shlex.join(interpreter(inside)) == "podman exec --interactive f00d /opt/python"
    assert interpreter(node) == ["/opt/python"]


def test_podman_gives_gpus_as_devices_by_name():
    image = Container(engine="podman", image="burst:1", gpus="0", ulimits={})
    assert shlex.join(commands.run_container(image, mark="abc/0")) == (
        "podman run --detach --init --name burst-ray-abc-0 --label burst.ray.node=abc/0 --network host --ipc host "
        "--device nvidia.com/gpu=0 --entrypoint sleep burst:1 infinity"
    )


def test_a_difference_in_versions_names_what_and_where():
    same = {"python": "3.11.7", "ray": "2.60.0"}
    assert mismatch({"a": same, "b": same}) == ""
    sentence = mismatch({"a": same, "b": same, "c": {**same, "python": "3.11.9"}})
    assert sentence.startswith("python is 3.11.7 on 2 of 3 nodes but 3.11.9 on c; install the same everywhere")
    assert "code is not known on 2 of 3 nodes but x on c" in mismatch({"a": {}, "b": {}, "c": {"code": "x"}})


@pytest.mark.parametrize(
    ("gpus", "said", "expected"), [(8, None, 8), (8, 4, 4), (0, 2, 2), (0, None, 1), (4, 8, "has 4 GPUs")]
)
def test_ranks_of_a_node_are_its_gpus_or_what_the_site_says(gpus, said, expected):
    machine = Machine(hostname="n", device="cuda" if gpus else "cpu", cores=8, memory_gib=64, gpu_count=gpus)
    site = Site(ranks_per_node=said)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            ranks_of(machine, site)
    else:
        assert ranks_of(machine, site) == expected


def state(folder: Path) -> ClusterState:
    jump = Host(name="bastion", address="10.9.9.9", key=folder / "key")
    nodes = [
        StartedNode(
            name=name, host=Host(name=name, address=name, user="ops", jump=jump), address=f"10.0.0.{number}",
            mark=f"abc/{name}", directory=f"/tmp/r{number}", python="/p \"é\n", folder="/f",
        )
        for number, name in enumerate(("gpu01", "gpu02"))
    ]  # fmt: skip
    return ClusterState(
        session="abc", inventory="lab \N{GRINNING FACE}", created_at="2026-01-01T00:00:00+00:00", created_by="me@here",
        known_hosts=folder / "known", head_port=6379, nodes=tuple(nodes),
    )  # fmt: skip


def test_the_state_comes_back_whole_and_is_its_owners_alone(tmp_path):
    states = StateDirectory(tmp_path / "state")
    assert states.load() is None
    states.save_token("secret")
    states.save(state(tmp_path))
    assert states.load() == state(tmp_path)
    assert states.token() == "secret"
    assert "secret" not in (states.path / "cluster.json").read_text()
    assert {path.stat().st_mode & 0o777 for path in states.path.iterdir()} == {0o600}
    assert states.path.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in states.path.iterdir()) == ["cluster.json", "token"]
    states.clear()
    assert states.load() is None
    assert list(states.path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "schema 99, expected 2"),
        ({"nodez": []}, "unknown key nodez; did you mean nodes"),
        ({"nodes": "gpu01"}, "nodes is 'gpu01'; expected a list"),
    ],
)
def test_a_state_that_is_none_is_one_sentence(tmp_path, change, message):
    states = StateDirectory(tmp_path)
    states.save(state(tmp_path))
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}, ensure_ascii=False))
    with pytest.raises(UsageError, match=message):
        states.load()


def test_a_state_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="give --state a folder of yours"):
        StateDirectory(tmp_path / "file" / "state").save(state(tmp_path))


def test_a_mark_names_the_state_directory_and_the_node(tmp_path):
    one, other = StateDirectory(tmp_path / "a"), StateDirectory(tmp_path / "b")
    assert len({one.mark("gpu1"), one.mark("gpu10"), other.mark("gpu1")}) == 3
    assert one.mark("gpu1") == StateDirectory(tmp_path / "a").mark("gpu1")


def silent(host, seconds):
    raise Unreachable(f"{host.address} is silent")


def test_what_down_does_not_reach_is_named_and_hinders_nothing(tmp_path):
    states = StateDirectory(tmp_path)
    states.save_token("secret")
    states.save(state(tmp_path))
    assert end_cluster(states, states.load(), silent, 1.0) == {"gpu01": "gpu01 is silent", "gpu02": "gpu02 is silent"}
    left = states.load()
    assert (left.nodes, [node.name for node in left.left]) == ((), ["gpu01", "gpu02"])
    assert not states.token_path.exists()


def looks(monkeypatch, **found):
    """Answers of the nodes, by name; None: the node does not answer."""

    def look(state, node, connect, seconds):
        if found[node.name] is None:
            raise Unreachable("silent")
        return {"processes": 3, "raylet": True, "gcs": True, "reaches_head": True, **found[node.name]}

    monkeypatch.setattr(down, "_look", look)


@pytest.mark.parametrize(
    ("head", "states"),
    [
        ({}, ["up", "up"]),
        ({"gcs": False}, ["down", "down"]),
        ({"raylet": False}, ["down", "down"]),
        (None, ["unknown", "down"]),
    ],
)
def test_without_its_head_no_node_is_up(tmp_path, monkeypatch, head, states):
    looks(monkeypatch, gpu01=head, gpu02={})
    shown = cluster_status(state(tmp_path), silent, 1.0)
    assert [(node.role, node.state) for node in shown] == list(zip(["head", "worker"], states, strict=True))
    looks(monkeypatch, gpu01={}, gpu02={"reaches_head": False})
    assert [node.state for node in cluster_status(state(tmp_path), silent, 1.0)] == ["up", "down"]


INVENTORY = Inventory(
    name="two",
    nodes=tuple(InventoryNode(host=Host(name=name, address=name), site=Site()) for name in ("gpu01", "gpu02")),
)


def test_a_head_that_answers_no_login_but_runs_is_not_replaced(tmp_path):
    states = StateDirectory(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = dataclasses.replace(state(tmp_path).nodes[0], address="127.0.0.1")
        running = dataclasses.replace(state(tmp_path), head_port=server.getsockname()[1], nodes=(node,))
        states.save(running)
        with pytest.raises(UsageError, match=r"^the head gpu01 answers no login \(gpu01 is silent\), but its Ray does"):
            start_cluster(INVENTORY, states, print, connect=silent)
    assert states.load() == running


def test_a_cluster_of_another_run_is_left_alone(tmp_path, monkeypatch):
    states = StateDirectory(tmp_path)
    states.save(dataclasses.replace(state(tmp_path), of_run=True))
    looks(monkeypatch, gpu01={}, gpu02={})
    with pytest.raises(UsageError, match="belongs to another burst run"):
        start_cluster(INVENTORY, states, print, connect=silent)


def test_up_again_leaves_what_is_up_and_names_a_node_that_does_not_answer(tmp_path, monkeypatch):
    states, said = StateDirectory(tmp_path), []
    states.save(state(tmp_path))
    looks(monkeypatch, gpu01={}, gpu02=None)
    again = start_cluster(INVENTORY, states, said.append, connect=silent)
    assert [(node.name, node.silent) for node in again.nodes] == [("gpu01", False), ("gpu02", True)]
    assert said == ["left out: gpu02: silent; it stays part of the cluster as far as it is"]


def test_a_lost_head_hinders_no_new_cluster_and_stays_recorded_until_it_answers(tmp_path, monkeypatch):
    """Here nothing can start on the other node either: the record of the lost head stays all the same."""
    states, said = StateDirectory(tmp_path), []
    states.save(dataclasses.replace(state(tmp_path), nodes=state(tmp_path).nodes[:1]))
    monkeypatch.setattr(up, "_answers", lambda state: False)
    monkeypatch.setattr(up, "end_nodes", lambda nodes, connect, seconds: {
        node.name: "silent" for node in nodes if node.name == "gpu01"
    })  # fmt: skip
    monkeypatch.setattr(up, "unfit_nodes", lambda nodes, *_: {node.name: f"{node.name} is busy" for node in nodes})
    with pytest.raises(UsageError, match="none of the 2 nodes is usable"):
        start_cluster(INVENTORY, states, said.append, connect=silent)
    assert said[0] == "the head gpu01 is lost (gpu01 is silent); starting a new cluster"
    assert said[1:] == [
        "left out: gpu01: silent; the next up ends what an earlier cluster left there",
        "left out: gpu02 is busy",
        "gpu01 may still run its part of the cluster (gpu01 is silent); the next up or down ends it",
    ]
    assert [node.name for node in states.load().left] == ["gpu01"]


def test_where_no_node_starts_each_is_named_once_with_why(tmp_path, monkeypatch):
    monkeypatch.setattr(up, "end_nodes", lambda nodes, connect, seconds: {})
    monkeypatch.setattr(up, "unfit_nodes", lambda nodes, *_: {})
    with pytest.raises(UsageError) as refused:
        start_cluster(INVENTORY, StateDirectory(tmp_path), lambda _: None, connect=silent)
    why = "no head could be started: gpu01: gpu01 is silent; gpu02: gpu02 is silent"
    assert str(refused.value) == why
