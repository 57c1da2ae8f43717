"""Several hosts as one machine: how a plan counts them and how a trial's ranks spread."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from harness.base.errors import UsageError
from harness.machine.this_machine import Machine, together
from harness.plan.matrix import plan
from harness.run.attempt import RunContext, job_of
from harness.spec.experiment import load_experiment

NODE = Machine(
    hostname="gpu01", device="cuda", cores=64, memory_gib=512, gpu_name="NVIDIA H200", gpu_count=8, gpu_memory_gib=140
)
ROOT = Path(__file__).resolve().parents[3]


def test_nodes_together_have_what_each_of_them_has():
    other = dataclasses.replace(NODE, hostname="gpu02", cores=32, gpu_memory_gib=139)
    pair = together([NODE, other], ranks_per_node=8)
    assert (pair.nodes, pair.max_ranks, pair.cores, pair.gpu_memory_gib) == (2, 16, 32, 139)
    assert pair.gpu_name == "NVIDIA H200"
    mixed = together([NODE, dataclasses.replace(other, gpu_name="NVIDIA A800")], ranks_per_node=8)
    assert mixed.gpu_name == "NVIDIA A800 + NVIDIA H200"
    with pytest.raises(UsageError, match="the nodes have NVIDIA H200 and no GPU; name nodes of one kind"):
        together([NODE, Machine(hostname="cpu", device="cpu", cores=4, memory_gib=8)], ranks_per_node=4)


@pytest.mark.parametrize(
    ("ranks", "hosts"), [(1, 1), (8, 1), (9, 3), (10, 2), (16, 2), (18, 3), (24, 3), (23, None), (25, None), (32, None)]
)
def test_a_trial_takes_the_fewest_hosts_that_hold_it_in_equal_shares(ranks, hosts):
    assert together([NODE] * 3, ranks_per_node=8).nodes_for(ranks) == hosts


def test_one_host_counts_as_before():
    assert NODE.nodes_for(8) == 1
    assert NODE.nodes_for(9) is None
    assert Machine(hostname="l", device="cpu", cores=2, memory_gib=8).nodes_for(8) == 1


def test_a_plan_refuses_what_does_not_spread_and_threads_are_shared_within_a_host():
    experiment = load_experiment(
        ROOT / "experiments" / "quickstart.yaml", None, ["sweep.cp_size=[1,2,4]", "fixed.world_size=0"]
    )
    nodes = [Machine(hostname=name, device="cpu", cores=4, memory_gib=8) for name in ("a", "b", "c")]
    trials = {trial.settings.cp_size: trial for trial in plan(experiment, together(nodes, ranks_per_node=1))}
    assert trials[2].unsupported_reason is None
    assert "4 ranks do not spread evenly over the 3 nodes with 1 each" in (trials[4].unsupported_reason or "")
    host = RunContext(machine=together(nodes, ranks_per_node=1), launcher=None, environment={}, commit="")  # type: ignore[arg-type]
    environment = job_of(trials[2], Path("/t"), host).environment
    assert environment["OMP_NUM_THREADS"] == "4"
    assert "GLOO_SOCKET_IFNAME" not in environment  # each host has its own
    assert job_of(trials[1], Path("/t"), host).environment["GLOO_SOCKET_IFNAME"] == "lo"
