"""Command lines of a cluster, as whole strings; what nodes must agree on; what is remembered, and for whom."""

from __future__ import annotations

import dataclasses
import json
import shlex
import socket
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.files.errors import UsageError
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import Inventory, Node
from cluster.inventory.site import Container, Mount, NetworkExpectation, RayPorts, Site
from cluster.ray_cluster import container, ray_commands
from cluster.ray_cluster.candidates import Means
from cluster.ray_cluster.down import end_cluster
from cluster.ray_cluster.introduction import absent, mismatch
from cluster.ray_cluster.quarantine import Quarantine
from cluster.ray_cluster.state import ClusterState, Process, StartedNode, StateDirectory, default_directory
from cluster.ray_cluster.status import cluster_status
from cluster.ray_cluster.up import start_cluster
from cluster.transport.reach import connect_local
from cluster.transport.runner import Unreachable
from harness.machine.this_machine import Machine, ranks_of
from tests.patience import AMPLE

PORTS = RayPorts(head_port=7000, worker_port_first=21000, worker_port_last=21099)


def test_the_head_listens_where_the_site_says_and_takes_no_gpus():
    command = ray_commands.head_command("/venv/bin/python", PORTS, address="10.0.0.1", name="gpu01", directory="/tmp/r")
    assert shlex.join(command) == (
        "/venv/bin/python -u -c 'import ray.scripts.scripts as ray; ray.get_ray_client_dependency_error = lambda: "
        "True; ray.main()' start --node-ip-address=10.0.0.1 --node-manager-port=0 "
        "--object-manager-port=0 --temp-dir=/tmp/r --object-store-memory=1073741824 --num-gpus=0 "
        "--include-log-monitor=false --disable-usage-stats --head --port=7000 "
        "--include-dashboard=false --dashboard-host=127.0.0.1 --dashboard-port=8265 --num-cpus=1 "
        "'--resources={\"burst_node_gpu01\": 1}' --min-worker-port=21000 --max-worker-port=21099"
    )


def test_a_worker_joins_the_head_and_a_guest_offers_nothing():
    worker = ray_commands.worker_command(
        "/venv/bin/python", PORTS, address="10.0.0.2", name="gpu02", directory="/tmp/r", head="10.0.0.1:7000"
    )
    assert "--address=10.0.0.1:7000" in worker
    assert '--resources={"burst_node_gpu02": 1}' in worker
    assert "--head" not in worker
    guest = ray_commands.guest_command("/venv/bin/python", address="10.0.0.9", directory="/tmp/g", head="10.0.0.1:7000")
    assert "--num-cpus=0" in guest
    assert not any(part.startswith("--resources") for part in guest)
    for command in (worker, guest):
        assert "token" not in " ".join(command).lower()
    assert ray_commands.SETTINGS["RAY_USAGE_STATS_ENABLED"] == "0"


def test_ports_that_must_be_free_are_those_the_site_fixes():
    assert ray_commands.fixed_ports(PORTS, head=True) == {"head_port": 7000}
    assert ray_commands.fixed_ports(PORTS, head=False) == {}
    assert ray_commands.fixed_ports(RayPorts(node_manager_port=7001), head=False) == {"node_manager_port": 7001}


def test_a_container_gets_what_the_site_says_and_no_privileges():
    image = Container(
        engine="docker",
        image="burst:1",
        mounts=(Mount(source="/data"), Mount(source="/opt/x y", target="/x", read_only=True)),
        extra_arguments=("--device", "/dev/infiniband"),
    )
    command = container.run_command(image, mark="abc/0", name="burst-ray-abc-0")
    assert shlex.join(command) == (
        "docker run --detach --init --name burst-ray-abc-0 --label burst.ray.node=abc/0 --network host --ipc host "
        "--gpus all --ulimit memlock=-1 --ulimit stack=67108864 --mount type=bind,source=/data,target=/data "
        "--mount 'type=bind,source=/opt/x y,target=/x,readonly' --device /dev/infiniband --entrypoint sleep burst:1 "
        "infinity"
    )
    private = Container(engine="docker", image="burst:1", ipc="private", shm_size="64g", gpus="", privileged=True)
    command = container.run_command(private, mark="abc/0", name="n")
    assert shlex.join(command) == (
        "docker run --detach --init --name n --label burst.ray.node=abc/0 --network host --ipc private --shm-size 64g "
        "--ulimit memlock=-1 --ulimit stack=67108864 --privileged --entrypoint sleep burst:1 infinity"
    )


def test_only_containers_with_our_mark_are_looked_for_and_only_by_id_removed():
    assert shlex.join(container.find_command("docker", "abc/0")) == (
        "docker ps --all --quiet --no-trunc --filter label=burst.ray.node=abc/0"
    )
    assert container.remove_command("podman", ["f00d"]) == ["podman", "rm", "--force", "--volumes", "f00d"]
    node = dataclasses.replace(state(Path("/")).nodes[0], python="/opt/python", engine="podman", container_id="f00d")
    inside = dataclasses.replace(node, container=True)
    assert shlex.join(container.interpreter(inside)) == "podman exec --interactive f00d /opt/python"
    assert container.interpreter(node) == ["/opt/python"]


def test_podman_gives_gpus_as_devices_by_name():
    image = Container(engine="podman", image="burst:1", gpus="0", ulimits={})
    assert shlex.join(container.run_command(image, mark="abc/0", name="n")) == (
        "podman run --detach --init --name n --label burst.ray.node=abc/0 --network host --ipc host "
        "--device nvidia.com/gpu=0 --entrypoint sleep burst:1 infinity"
    )


def test_a_difference_in_versions_names_what_and_where():
    same = {"python": "3.11.7", "ray": "2.60.0"}
    assert mismatch({"a": same, "b": same}) == ""
    sentence = mismatch({"a": same, "b": same, "c": {**same, "python": "3.11.9"}})
    assert sentence.startswith("python is 3.11.7 on 2 of 3 nodes but 3.11.9 on c; install the same everywhere")
    assert "code is not known on 2 of 3 nodes but x on c" in mismatch({"a": {}, "b": {}, "c": {"code": "x"}})
    assert absent({"ray": "not installed", "torch": "2.13.0"}) == ["ray"]


@pytest.mark.parametrize(
    ("gpus", "said", "expected"),
    [(8, None, 8), (8, 4, 4), (0, 2, 2), (0, None, 1), (4, 8, "has 4 GPUs")],
)
def test_ranks_of_a_node_are_its_gpus_or_what_the_site_says(gpus, said, expected):
    machine = Machine(hostname="n", device="cuda" if gpus else "cpu", cores=8, memory_gib=64, gpu_count=gpus)
    node = Node(host=Host(name="n"), site=Site(ranks_per_node=said))
    description = {"machine": {name: getattr(machine, name) for name in Machine.__dataclass_fields__}}
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            ranks_of(node, description)
    else:
        assert ranks_of(node, description) == expected


def state(folder: Path) -> ClusterState:
    jump = Host(name="bastion", address="10.9.9.9", key=folder / "key")
    nodes = [
        StartedNode(
            name=name, host=Host(name=name, address=name, user="ops", jump=jump), address=f"10.0.0.{number}",
            interface="eth0", mark=f"abc/{number}", directory=f"/tmp/r{number}", python="/p", folder="/f",
            session=5, processes=(Process(pid="7", started="99"),), description='{"machine": {"x": "\\"é\\n"}}',
        )
        for number, name in enumerate(("gpu01", "gpu02"))
    ]  # fmt: skip
    return ClusterState(
        session="abc", inventory="lab", created_at="2026-01-01T00:00:00+00:00", created_by="me@here",
        known_hosts=folder / "known", head_port=6379, complete=False, versions="ray 2", nodes=tuple(nodes),
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
        ({"schema": 99}, "schema 99, expected 1"),
        ({"nodez": []}, "unknown key nodez; did you mean nodes"),
        ({"nodes": "gpu01"}, "nodes is 'gpu01'; expected a list"),
    ],
)
def test_a_state_that_is_none_is_one_sentence(tmp_path, change, message):
    states = StateDirectory(tmp_path)
    states.save(state(tmp_path))
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UsageError, match=message):
        states.load()


def test_a_state_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="give --state a folder of yours"):
        StateDirectory(tmp_path / "file" / "state").save(state(tmp_path))


def test_nodes_that_lanes_take_out_at_the_same_time_are_all_out(tmp_path):
    quarantine = Quarantine(tmp_path)
    names = [f"gpu{number}" for number in range(64)]
    with ThreadPoolExecutor(len(names)) as lanes:
        list(lanes.map(quarantine.add, names, ["lost"] * len(names)))
    assert set(quarantine.entries()) == set(names)


def take_out(folder: str, name: str) -> None:
    Quarantine(Path(folder)).add(name, "lost")


def test_nodes_that_several_programs_take_out_at_the_same_time_are_all_out(tmp_path):
    names = [f"gpu{number}" for number in range(64)]
    with ProcessPoolExecutor(8) as programs:
        list(programs.map(take_out, [str(tmp_path)] * len(names), names))
    assert set(Quarantine(tmp_path).entries()) == set(names)


def test_nothing_is_written_where_no_node_is_let_in(tmp_path):
    assert Quarantine(tmp_path / "absent").release("gpu1") == []
    assert not (tmp_path / "absent").exists()


def test_quarantine_is_by_exact_name_and_ends_by_itself(tmp_path):
    quarantine = Quarantine(tmp_path, seconds=100)
    assert quarantine.entries() == {}
    quarantine.add("gpu1", "lost", now=1000)
    quarantine.add("gpu2", "full disk", now=1050)
    assert set(quarantine.entries(now=1090)) == {"gpu1", "gpu2"}
    assert "gpu10" not in quarantine.entries(now=1090)
    quarantine.add("gpu3", "lost")
    assert quarantine.release("gpu3", "gpu30") == ["gpu3"]
    assert quarantine.release("gpu3") == []
    quarantine.add("gpu1", "lost", now=1000)
    quarantine.add("gpu2", "full disk", now=1050)
    assert set(Quarantine(tmp_path).entries(now=1101)) == {"gpu2"}


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"gpu1": 5}', '{"gpu1": {}}', '{"gpu1": {"reason": "", "until": 1e400}}']
)
def test_a_quarantine_that_makes_no_sense_is_one_sentence(tmp_path, text):
    (tmp_path / "quarantine.json").write_text(text)
    with pytest.raises(UsageError, match="does not hold a reason and a time for each node; remove it"):
        Quarantine(tmp_path).entries()


def test_release_lets_named_nodes_in_again_and_names_a_wrong_one(tmp_path, capsys):
    from harness.cli import main

    state = ["--state", str(tmp_path)]
    for name in ("gpu01", "gpu02", "gpu03"):
        Quarantine(tmp_path).add(name, "its link was lost")
    assert main(["cluster", "status", *state]) == 2  # no cluster is up, but the quarantine is shown
    assert "gpu02  in quarantine for 15 min: its link was lost" in capsys.readouterr().out
    assert main(["cluster", "release", "gpu04", *state]) == 2
    assert "gpu04 is not in quarantine; those that are: gpu01, gpu02, gpu03" in capsys.readouterr().err
    assert main(["cluster", "release", "gpu[01-02]", *state]) == 0
    assert "released: gpu01, gpu02" in capsys.readouterr().out
    assert set(Quarantine(tmp_path).entries()) == {"gpu03"}


def test_a_passed_check_of_all_kinds_lets_a_node_in_again(tmp_path, monkeypatch, capsys):
    from cluster.cli import main

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    name = socket.gethostname()
    quarantine = Quarantine(default_directory())
    quarantine.add(name, "its link was lost")
    main(["--only", "disk", "--no-history"])
    assert set(quarantine.entries()) == {name}  # one check is not the check
    main(["--free", "--no-history"])
    out = capsys.readouterr()
    usable = out.out.split() == [name] or name in out.out.splitlines()
    assert (quarantine.entries() == {}) == usable, out


def test_a_cluster_that_no_trial_could_use_is_not_started(tmp_path):
    pytest.importorskip("ray")
    states, asked = StateDirectory(tmp_path), []

    def pointless(found):
        asked.extend(one.name for one in found)
        return "no trial can run"

    site = Site(network=NetworkExpectation(interface="lo"))
    inventory = Inventory(name="one", nodes=(Node(host=Host(name="here"), site=site),))
    means = Means(
        connect=connect_local, unfit=lambda nodes: {}, describe=("-c", "print('{}')"), ranks=lambda node, found: 1,
        folder=Path(__file__).resolve().parents[2], say=print, seconds=AMPLE, pointless=pointless,
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"^no trial can run$"):
        start_cluster(inventory, states, means)
    assert (asked, states.load()) == (["here"], None)


def test_down_lets_ended_nodes_in_again_and_remembers_which_were_not_reached_and_who_was_head(tmp_path):
    def connect(host, seconds):
        raise Unreachable(f"{host.address} is silent")

    states = StateDirectory(tmp_path)
    head, worker = (dataclasses.replace(node, begun=node.name == "gpu02") for node in state(tmp_path).nodes)
    states.save(dataclasses.replace(state(tmp_path), complete=True, nodes=(head, worker)))
    for name in ("gpu01", "gpu02"):
        Quarantine(tmp_path).add(name, "lost")
    assert end_cluster(states, states.load(), connect, 1.0) == {"gpu02": "gpu02 is silent"}
    assert set(Quarantine(tmp_path).entries()) == {"gpu02"}
    left = states.load()
    assert (left.ending, left.complete, [node.name for node in left.nodes]) == (True, False, ["gpu02"])
    [shown] = cluster_status(left, connect, 1.0)
    assert (shown.role, shown.state) == ("worker", "unknown")  # first of those that are left, and not the head
