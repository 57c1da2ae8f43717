"""The nodes of a Slurm job, as its own variables give them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.files.errors import UsageError
from cluster.inventory.allocation import allocated_hosts, allotted, slurm_run
from cluster.inventory.file import load_inventory, read_inventory
from cluster.inventory.site import Site
from cluster.ray_cluster.state import default_directory
from tests.patience import AMPLE

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[01-02,07],login2", "SLURM_TASKS_PER_NODE": "1(x4)"}


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_the_nodes_come_in_slurms_order_and_belong_to_its_job() -> None:
    hosts = allocated_hosts(JOB)
    assert [host.name for host in hosts] == ["gpu01", "gpu02", "gpu07", "login2"]
    assert {(host.slurm_job, host.address == host.name, host.is_local) for host in hosts} == {("7", True, False)}


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({"SLURM_GPUS_PER_NODE": "8"}, [8, 8, 8, 8]),
        ({"SLURM_GPUS_PER_NODE": "h100:4"}, [4, 4, 4, 4]),
        ({"SLURM_GPUS_PER_NODE": "a:2,b:1"}, [3, 3, 3, 3]),
        ({"SLURM_GPUS_ON_NODE": "8"}, [None] * 4),  # of one node alone: each is asked
        ({"SLURM_JOB_GPUS": "0,1"}, [None] * 4),
        ({"SLURM_GPUS_ON_NODE": "0"}, [1, 1, 1, 1]),
        ({"SLURM_TASKS_PER_NODE": "2(x3),1"}, [2, 2, 2, 1]),
    ],
)
def test_a_node_takes_a_rank_for_each_gpu_else_for_each_task(variables: dict[str, str], ranks: list[int]) -> None:
    assert [host.ranks for host in allocated_hosts({**JOB, **variables})] == ranks


def test_addresses_of_cloud_nodes_come_from_the_allocation_too() -> None:
    hosts = allocated_hosts({**JOB, "SLURM_NODE_ALIASES": "gpu01:10.0.0.7:vm1,gpu02:[fd00::2]:vm2"})
    assert [host.address for host in hosts] == ["10.0.0.7", "fd00::2", "gpu07", "login2"]
    assert allocated_hosts({**JOB, "SLURM_NODE_ALIASES": "(null)"}) == allocated_hosts(JOB)


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID is not set"),
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        ({"SLURM_JOB_NODELIST": "gpu[4-1]"}, "counts down"),
        ({"SLURM_GPUS_PER_NODE": "many"}, "SLURM_GPUS_PER_NODE is 'many'"),
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, "expected a number for each of 4 nodes"),
        ({"SLURM_TASKS_PER_NODE": "2(x3),?"}, "expected a number for each of 4 nodes"),
    ],
)
def test_variables_that_name_no_allocation_are_refused_in_one_sentence(variables: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError) as caught:
        allocated_hosts({**JOB, **variables})
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_sites_number_of_ranks_wins_over_the_allocations() -> None:
    host = replace(allocated_hosts(JOB)[0], ranks=4)
    assert allotted(host, Site()).ranks_per_node == 4
    assert allotted(host, Site(ranks_per_node=2)).ranks_per_node == 2


@pytest.mark.usefixtures("in_job")
def test_the_word_slurm_is_an_inventory_and_a_node_of_one(tmp_path: Path) -> None:
    inventory = read_inventory(Path("slurm"))
    assert [(node.name, node.site.ranks_per_node) for node in inventory.nodes][:2] == [("gpu01", 1), ("gpu02", 1)]
    assert inventory.nodes[0].site.ray.head_port == 0  # jobs that share a node share its ports
    file = tmp_path / "own.yaml"
    file.write_text("ssh: {user: ops}\nnetwork: {interface: ib0}\nexclude: ['login2,gpu07']\nnodes: [slurm]\n")
    first, second = load_inventory(file).nodes
    assert (first.name, second.name, first.site.network.interface) == ("gpu01", "gpu02", "ib0")
    assert (first.host.slurm_job, first.host.user) == ("7", None)


@pytest.mark.usefixtures("in_job")
def test_each_start_of_a_job_records_its_cluster_in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first = default_directory()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert slurm_run() == "7.1"
    again = default_directory()
    monkeypatch.delenv("SLURM_JOB_ID")
    assert len({first, again, default_directory()}) == 3


def test_outside_a_job_the_word_slurm_is_refused_in_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness", "plan", "experiments/quickstart.yaml", "--nodes", "slurm"],
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        capture_output=True,
        text=True,
        timeout=AMPLE,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "this program runs in none (SLURM_JOB_ID is not set); submit it with sbatch" in done.stderr
