"""Checks and active tests on the GPUs of this machine, where it has some."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from cluster.active.fleet import worker_command
from cluster.active.measurement import NodeSpeeds, read_speeds
from cluster.checks import select
from cluster.health.nodes import check_nodes
from cluster.inventory.hosts import this_machine
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import Site
from cluster.profiles import load_profiles
from cluster.transport.reach import LocalRunner, connect_local
from tests.patience import AMPLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]


def test_the_drivers_report_is_understood() -> None:
    if load_profiles().find(torch.cuda.get_device_name(0)) is None:
        pytest.skip(f"{torch.cuda.get_device_name(0)} has no profile, so its checks are unknown by design")
    readable = ("gpus", "gpu_ecc", "gpu_rows", "gpu_recovery", "gpu_clocks", "gpu_thermal", "gpu_versions", "nvlink")
    (report,) = check_nodes(
        [InventoryNode(host=this_machine(), site=Site())], connect_local, select(readable, ()), 120.0
    )
    unknown = {name: verdict.summary for name, verdict in report.verdicts.items() if verdict.level == "unknown"}
    assert unknown == {}
    # Not torch's count: CUDA_VISIBLE_DEVICES hides GPUs from torch, the driver lists all of them.
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    assert report.verdicts["gpus"].facts["uuids"] == re.findall(r"^GPU .*\(UUID: (GPU-[^)]+)\)", listed, re.MULTILINE)


@pytest.mark.slow
def test_a_node_measures_its_gpus() -> None:
    command = [word for word in worker_command(Site(), "speeds") if word != "--attended"]
    done = LocalRunner().run(command, deadline_seconds=AMPLE)
    speeds = read_speeds(done.stdout)
    assert isinstance(speeds, NodeSpeeds), (speeds, done.stderr[-2000:])
    count = torch.cuda.device_count()
    assert len(speeds.gemm_tflops) == len(speeds.hbm_gb_per_second) == count
    assert min(speeds.gemm_tflops) > 1
    assert min(speeds.hbm_gb_per_second) > 100
    assert (speeds.all_reduce_gb_per_second is not None) == (count > 1)
