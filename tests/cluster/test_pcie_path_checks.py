"""Access control and address translation between GPUs and adapters: lspci's text is written by us after its source,
the trees after the kernel's sysfs documents; the probes run against such trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.checks.links import iommu, pcie_acs
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.transport.reach import LocalRunner
from tests.cluster.gpu_outputs import OUTPUTS
from tests.patience import AMPLE
from tests.programs import shell_program

SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A GPU and an adapter below one PCIe switch, each with an IOMMU group that translates."""
    sys = tmp_path / "sys"
    for name, kind in (("0000:17:00.0", "gpu"), ("0000:18:00.0", "adapter")):
        device = sys / "devices" / SWITCH / name
        (device / "iommu_group").mkdir(parents=True)
        (device / "iommu_group/type").write_text("DMA-FQ\n")
        (device / "vendor").write_text("0x10de\n" if kind == "gpu" else "0x15b3\n")
        (device / "class").write_text("0x030200\n" if kind == "gpu" else "0x020700\n")
        (sys / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (sys / "bus/pci/devices" / name).symlink_to(device)
    (sys / "class/infiniband/mlx5_0").mkdir(parents=True)
    (sys / "class/infiniband/mlx5_0/device").symlink_to(device)
    return tmp_path


def look(probe: Probe, tree: Path, machine: str = "real") -> Output:
    """What the probe prints of the tree; the processor is said to be that of a `real` or `virtual` machine."""
    (tree / "cpuinfo").write_text("flags: fpu hypervisor\n" if machine == "virtual" else "flags: fpu\n")
    script = probe.script.replace("/sys/", f"{tree}/sys/").replace("/proc/cpuinfo", f"{tree}/cpuinfo")
    done = LocalRunner().run(["sh", "-c", script], deadline_seconds=AMPLE)
    return Output(text=done.stdout, exit_status=done.exit_status)


def install_lspci(tree: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (tree / "bin").mkdir()
    shell_program(tree / "bin/lspci", body)
    monkeypatch.setenv("PATH", f"{tree}/bin:/usr/bin:/bin")


def test_access_control_above_a_gpu_and_its_adapter_is_a_warning(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_lspci(tree, monkeypatch, f"cat {OUTPUTS}/lspci_bridge.txt")
    verdict = pcie_acs.judge(look(pcie_acs.probe(Site()), tree), Site())
    assert (verdict.level, verdict.action) == ("warn", "monitor")
    assert "0000:16:00.0 (SrcValid, ReqRedir, CmpltRedir, UpstreamFwd)" in verdict.summary
    assert "0000:17:00.0" not in verdict.summary, "a device is no bridge"
    assert pcie_acs.judge(look(pcie_acs.probe(Site()), tree, "virtual"), Site()).level == "ok"


def test_access_control_that_is_off_is_ok_and_one_that_was_not_read_says_so(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_lspci(tree, monkeypatch, f"sed '/ACSCtl/s/+/-/g' {OUTPUTS}/lspci_bridge.txt")
    verdict = pcie_acs.judge(look(pcie_acs.probe(Site()), tree), Site())
    assert (verdict.level, verdict.summary) == ("ok", "access control is off at 2 bridges above GPUs and adapters")
    shell_program(tree / "bin/lspci", "echo '\tCapabilities: <access denied>'")
    assert "only root may read it" in pcie_acs.judge(look(pcie_acs.probe(Site()), tree), Site()).summary


def test_access_control_needs_two_devices_and_a_tree_that_can_be_read(tree: Path) -> None:
    (tree / "sys/class/infiniband/mlx5_0/device").unlink()
    assert "no two devices" in pcie_acs.judge(look(pcie_acs.probe(Site()), tree), Site()).summary
    assert pcie_acs.judge(Output(text="sh: nothing"), Site()).level == "unknown"
    without = Output(text="machine real\ndevices 9\nlspci absent\nend")
    assert "there is no lspci" in pcie_acs.judge(without, Site()).summary


def test_translated_addresses_of_gpus_and_adapters_are_a_warning(tree: Path) -> None:
    verdict = iommu.judge(look(iommu.probe(Site()), tree), Site())
    assert verdict.level == "warn"
    assert "addresses of 0000:17:00.0, mlx5_0; boot with iommu=pt" in verdict.summary
    assert iommu.judge(look(iommu.probe(Site()), tree, "virtual"), Site()).level == "ok"


@pytest.mark.parametrize("kind", ["identity", None])
def test_addresses_that_pass_through_or_are_not_translated_at_all_are_ok(kind: str | None, tree: Path) -> None:
    for device in ("0000:17:00.0", "0000:18:00.0"):
        group = tree / "sys/devices" / SWITCH / device / "iommu_group/type"
        group.write_text(f"{kind}\n") if kind else group.unlink()
    verdict = iommu.judge(look(iommu.probe(Site()), tree), Site())
    assert (verdict.level, verdict.summary) == ("ok", "passed through, or off, for 2 GPUs and adapters")


def test_without_an_adapter_there_is_nothing_to_join(tree: Path) -> None:
    (tree / "sys/class/infiniband/mlx5_0/device").unlink()
    assert iommu.judge(look(iommu.probe(Site()), tree), Site()).summary == "no GPU and adapter to join"
    assert iommu.judge(Output(text=""), Site()).level == "unknown"
