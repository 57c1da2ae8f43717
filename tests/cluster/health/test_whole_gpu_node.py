"""A whole node with eight GPUs, from the one script of the probes to the report; nvidia-smi answers as in outputs/."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.checks import discover, select
from cluster.files.errors import UsageError
from cluster.health.nodes import NodeReport, check_nodes
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import GpuExpectation, GpuMemoryLimit, Site
from cluster.transport.reach import connect_local
from tests.cluster.gpu_outputs import MODELS, Install, install_node, setting

ROOT = Path(__file__).parents[3]
# What depends on nvidia-smi alone, so that the verdict is that of the outputs and not of this machine.
GPU_CHECKS = ("gpus", "gpu_memory", "gpu_ecc", "gpu_rows", "gpu_recovery", "gpu_clocks", "gpu_thermal", "gpu_versions",
              "gpu_fabric", "nvlink")  # fmt: skip


def check(site: Site, *only: str) -> NodeReport:
    node = InventoryNode(host=Host(name="gpu01"), site=site)
    (found,) = check_nodes([node], connect_local, select(only or GPU_CHECKS, ()), 120.0)
    return found


def eight(model: str) -> Site:
    return Site(gpus=GpuExpectation(count=8, model=model.upper()), gpu_memory=GpuMemoryLimit(tries=1))


@pytest.mark.parametrize("model", MODELS)
def test_a_healthy_node_is_ok_and_usable(model: str, install_nvidia_smi: Install) -> None:
    state = install_node(install_nvidia_smi, model)
    found = check(eight(model))
    assert {name: one.summary for name, one in found.verdicts.items() if one.level != "ok"} == {}
    assert found.usable
    assert set(found.verdicts) == {"reachability", "clock", *GPU_CHECKS}
    calls = (state / "calls").read_text().splitlines()
    assert calls.count("-q") == 1, "seven checks read one report"


def test_one_broken_gpu_makes_the_node_unusable_and_names_its_cure(install_nvidia_smi: Install) -> None:
    install_node(install_nvidia_smi, "h200", setting("ECC Errors/Volatile/DRAM Uncorrectable", "1"))
    found = check(eight("h200"))
    assert (found.level, found.action, found.usable) == ("fail", "reset", False)
    assert [name for name, one in found.verdicts.items() if one.level != "ok"] == ["gpu_ecc"]


def test_a_model_without_a_profile_is_unknown_and_never_usable(install_nvidia_smi: Install) -> None:
    install_node(install_nvidia_smi, "h100", name="NVIDIA H100 NVL")
    found = check(Site())
    assert (found.level, found.usable) == ("unknown", False)
    unknown = {name for name, one in found.verdicts.items() if one.level == "unknown"}
    assert unknown == {"gpu_clocks", "gpu_fabric", "nvlink"}


def test_the_model_is_found_out_even_when_the_gpus_themselves_are_not_asked_for(install_nvidia_smi: Install) -> None:
    install_node(install_nvidia_smi, "a800")
    found = check(Site(), "nvlink")
    assert set(found.verdicts) == {"reachability", "clock", "nvlink"}
    assert found.verdicts["nvlink"].summary == "8 links up on each of 8 GPUs"


def test_a_driver_that_is_gone_is_one_failure_and_hides_the_rest(install_nvidia_smi: Install) -> None:
    install_nvidia_smi("echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9")
    found = check(eight("h200"))
    levels = {name: one.level for name, one in found.verdicts.items() if one.level != "ok"}
    assert {name for name, level in levels.items() if level == "fail"} == {"gpus", "gpu_memory"}
    assert found.action == "reboot"


def test_checks_are_chosen_by_name() -> None:
    assert set(select((), ())) == set(discover())
    assert set(select(("disk", "xid"), ("xid",))) == {"disk"}
    with pytest.raises(UsageError, match="did you mean nvlink"):
        select((), ("nvlinks",))


def test_a_terminal_sees_the_table_fill_and_then_the_whole_one(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, str(ROOT / "check_nodes.py"), "--only", "disk"]
    with subprocess.Popen(command, stdout=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # how Linux ends a terminal after its other side has closed
                break
            shown += chunk
            if not chunk:
                break
    os.close(ours)
    assert process.returncode in (0, 1, 2)
    assert b"of 1 nodes have answered" in shown
    assert shown.rstrip().endswith(b"usable")
