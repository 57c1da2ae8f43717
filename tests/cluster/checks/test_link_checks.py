"""Links between GPUs and to their host, on the outputs of four models, and what stands between devices on PCIe: trees
written after the kernel's sysfs documents, lspci's text after its source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.checks import Check
from cluster.checks.links import fabric_manager, iommu, nvlink, pcie, pcie_acs
from cluster.inventory.site import Site
from cluster.probing.probe import Output
from tests.cluster import gpu_outputs
from tests.cluster.gpu_outputs import EIGHT, MODELS, NO_GPUS, OUTPUTS, STRANGER, board, look
from tests.programs import shell_program

LINKS = {"a100": 12, "a800": 8, "h100": 18, "h200": 18}


def links(model: str, status: Callable[[str], str] = str, errors: Callable[[str], str] = str, count: int = 8) -> Output:
    counted = gpu_outputs.nvlink(model, "e", errors, count)
    shown = "\n".join(line for line in counted.splitlines() if not line.endswith(": 0"))
    return Output(text=gpu_outputs.nvlink(model, "s", status, count) + "errors\n" + shown)


@pytest.mark.parametrize("model", MODELS)
def test_all_links_up_without_errors_is_ok(model: str) -> None:
    verdict = nvlink.judge(links(model), EIGHT, board(model))
    assert (verdict.level, verdict.summary) == ("ok", f"{LINKS[model]} links up on each of 8 GPUs")


def test_four_real_gpus_of_a_virtual_machine_have_all_their_links_and_a_broken_one_is_named() -> None:
    status, errors = ((OUTPUTS / f"h200x4_virtual_nvlink_{kind}.txt").read_text() for kind in "se")
    verdict = nvlink.judge(Output(text=f"gpus 4\n{status}errors\n{errors}"), Site(), board("h200"))
    assert (verdict.level, verdict.summary) == ("ok", "18 links up on each of 4 GPUs")
    assert set(verdict.facts["counters"].values()) == {0}  # type: ignore[attr-defined]
    broken = errors.replace("Link 9: Recovery Errors: 0", "Link 9: Recovery Errors: 2", 1)
    verdict = nvlink.judge(Output(text=f"gpus 4\n{status}errors\n{broken}"), Site(), board("h200"))
    assert (verdict.level, verdict.summary) == ("warn", "GPU 0 counts errors on link 9: 2 recovery")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", ["inactive", "absent", "still"])
def test_one_link_less_fails_and_is_named(model: str, how: str) -> None:
    speed = "26.562 GB/s" if model.startswith("h") else "25 GB/s"
    line = f"\t Link 3: {speed}\n"
    other = {"inactive": "\t Link 3: <inactive>\n", "absent": "", "still": "\t Link 3: 0 GB/s\n"}[how]
    verdict = nvlink.judge(links(model, lambda gpu: gpu.replace(line, other)), EIGHT, board(model))
    assert (verdict.level, verdict.action) == ("fail", "reset")
    assert f"GPU 2 has {LINKS[model] - 1} of {LINKS[model]} links up" in verdict.summary
    assert ("(down: 3)" in verdict.summary) == (how != "absent")


@pytest.mark.parametrize(("errors", "level"), [(4, "ok"), (5, "warn")])
def test_five_errors_are_worth_a_look_and_counted(errors: int, level: str) -> None:
    change = f"Link 17: Replay Errors: {errors}"
    verdict = nvlink.judge(
        links("h200", errors=lambda gpu: gpu.replace("Link 17: Replay Errors: 0", change)), EIGHT, board("h200")
    )
    assert verdict.level == level
    assert verdict.facts["counters"]["gpu2 replay"] == errors  # type: ignore[index]


@pytest.mark.parametrize(
    ("line", "level", "action", "words"),
    [
        ("Link 4: Recovery Errors: 1", "warn", "monitor", "link 4: 1 recovery"),
        ("Link 4: CRC Errors: 7", "warn", "monitor", "link 4: 7 crc"),
        ("Link 4: CRC Errors: 4", "ok", "none", "18 links up"),
        ("Link 4: Link recovery failed events: 1", "fail", "reset", "link 4: 1 unrecovered"),
    ],
)
def test_errors_of_a_link_are_told_apart_by_class(line: str, level: str, action: str, words: str) -> None:
    verdict = nvlink.judge(links("h200", errors=lambda gpu: f"{gpu}\t {line}\n"), EIGHT, board("h200"))
    assert (verdict.level, verdict.action) == (level, action)
    assert words in verdict.summary


def test_newer_drivers_count_corrections_and_totals_that_are_no_errors() -> None:
    status = Output(
        text=gpu_outputs.nvlink("h200", "s") + "errors\n" + (OUTPUTS / "blackwell_nvlink_e.txt").read_text()
    )
    verdict = nvlink.judge(status, EIGHT, board("h200"))
    assert verdict.summary == "GPU 0 counts errors on link 0: 2 recovery"


def test_a_lone_gpu_needs_no_links_but_the_last_of_eight_does() -> None:
    alone = Output(text="GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: <inactive>\nerrors\n")
    assert nvlink.judge(alone, Site(), board("h200", 1)).level == "ok"
    assert nvlink.judge(alone, EIGHT, board("h200", 1)).level == "fail"


def test_one_gpu_of_which_no_links_are_listed_is_sound_and_more_are_unknown() -> None:
    # As a virtual machine with one H200 (driver 580.159.04) answered: both forms of nvidia-smi nvlink printed nothing.
    assert nvlink.judge(Output(text="gpus 1\nerrors\n"), Site(), board("h200", 1)).level == "ok"
    assert nvlink.judge(Output(text="gpus 1\nerrors\n"), EIGHT, board("h200", 1)).level == "unknown"
    assert nvlink.judge(Output(text="gpus 8\nerrors\n"), Site(), board("h200")).level == "unknown"


def test_the_probe_tells_how_many_gpus_there_are_where_no_link_is_listed(install_nvidia_smi):
    install_nvidia_smi('case $1 in -L) echo "GPU 0: NVIDIA H200 (UUID: GPU-1)" ;; esac')
    verdict = nvlink.judge(look(nvlink), Site(), board("h200", 1))
    assert (verdict.level, verdict.summary) == ("ok", "one GPU, of which no links are listed")


def test_links_of_an_unknown_model_are_unknown() -> None:
    assert nvlink.judge(links("h100"), EIGHT, STRANGER).level == "unknown"


def test_the_probe_leaves_zeros_on_the_node_and_survives_drivers_without_counters(install_nvidia_smi):
    install_nvidia_smi(f'case $2 in -s) cat {OUTPUTS}/h200_nvlink_s.txt ;; -e) echo "not supported"; exit 3 ;; esac')
    output = look(nvlink)
    assert output.exit_status == 0
    assert nvlink.judge(output, Site(), board("h200", 1)).level == "ok"
    assert output.text.splitlines()[-2:] == ["errors", "no counters: not supported"]


def devices(width: str, highest_width: str, speed: str, highest: str) -> Output:
    """sysfs of eight GPUs, of which the third differs."""
    rows = [f"gpu 0000:{bus}:00.0|16|16|32.0 GT/s PCIe|32.0 GT/s PCIe" for bus in gpu_outputs.BUSES]
    rows[2] = f"gpu 0000:47:00.0|{width}|{highest_width}|{speed}|{highest}"
    return Output(text="\n".join([*rows, "end"]))


@pytest.mark.parametrize(
    ("model", "row", "level", "words"),
    [
        ("h200", ("16", "16", "32.0 GT/s PCIe", "32.0 GT/s PCIe"), "ok", "8 GPUs at generation 5"),
        ("h200", ("8", "16", "32.0 GT/s PCIe", "32.0 GT/s PCIe"), "fail", "8 of 16 lanes"),
        ("a800", ("8", "16", "16.0 GT/s PCIe", "16.0 GT/s PCIe"), "ok", "with 8 lanes or more"),
        ("a800", ("4", "16", "16.0 GT/s PCIe", "16.0 GT/s PCIe"), "fail", "4 of 8 lanes"),
        ("a100", ("16", "16", "16.0 GT/s PCIe", "16.0 GT/s PCIe"), "ok", "generation 4"),
        ("a100", ("16", "16", "8.0 GT/s PCIe", "8.0 GT/s PCIe"), "fail", "generation 3, its model does 4"),
        ("h100", ("16", "16", "2.5 GT/s PCIe", "32.0 GT/s PCIe"), "warn", "again under load"),
        ("h100", ("63", "63", "Unknown", "Unknown"), "unknown", "--skip pcie"),
        ("h100", ("16", "16", "Unknown", "Unknown"), "unknown", "unknown speed"),
        ("h100", ("?", "?", "?", "?"), "unknown", "cannot be read"),
    ],
)
def test_lanes_and_generation_are_those_of_the_model(model, row, level, words):
    verdict = pcie.judge(devices(*row), EIGHT, board(model))
    assert verdict.level == level
    assert words in verdict.summary


def test_pcie_of_an_unknown_model_is_unknown_and_of_no_gpu_ok() -> None:
    healthy = devices("16", "16", "32.0 GT/s PCIe", "32.0 GT/s PCIe")
    assert pcie.judge(healthy, EIGHT, STRANGER).level == "unknown"
    assert pcie.judge(Output(text="end"), Site(), NO_GPUS).level == "ok"
    assert pcie.judge(Output(text="end"), EIGHT, NO_GPUS).level == "unknown"


def service(state: str, init: str = "systemd", process: str = "no") -> Output:
    return Output(text=f"service {state}\ninit {init}\nprocess {process}")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("output", "level"),
    [
        (service("active"), "ok"),
        (service("inactive"), "fail"),
        (service("failed"), "fail"),
        (service(""), "fail"),
        (service("inactive", process="yes"), "ok"),
    ],
)
def test_boards_with_switches_need_their_fabric_manager(output: Output, level: str, model: str) -> None:
    assert fabric_manager.judge(output, EIGHT, board(model)).level == level


def test_in_a_container_the_boards_own_word_counts_where_it_has_one() -> None:
    hidden = service("", init="other")
    assert fabric_manager.judge(hidden, EIGHT, board("h100")).level == "ok"
    assert fabric_manager.judge(hidden, EIGHT, board("a800")).level == "unknown"


def test_a_lone_gpu_and_none_need_no_fabric_manager() -> None:
    assert fabric_manager.judge(service("inactive"), Site(), board("h200", 1)).level == "ok"
    assert fabric_manager.judge(service("inactive"), Site(), NO_GPUS).level == "ok"
    assert fabric_manager.judge(service("inactive"), EIGHT, STRANGER).level == "unknown"


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


def look_at(check: Check, tree: Path, machine: str = "real") -> Output:
    """What the probe prints of the tree; the processor is said to be that of a `real` or `virtual` machine."""
    (tree / "cpuinfo").write_text("flags: fpu hypervisor\n" if machine == "virtual" else "flags: fpu\n")
    return look(check, sys=f"{tree}/sys", proc=tree)


def install_lspci(tree: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (tree / "bin").mkdir()
    shell_program(tree / "bin/lspci", body)
    monkeypatch.setenv("PATH", f"{tree}/bin:/usr/bin:/bin")


def test_access_control_above_a_gpu_and_its_adapter_is_a_warning(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_lspci(tree, monkeypatch, f"cat {OUTPUTS}/lspci_bridge.txt")
    verdict = pcie_acs.judge(look_at(pcie_acs, tree), Site())
    assert (verdict.level, verdict.action) == ("warn", "monitor")
    assert "0000:16:00.0 (SrcValid, ReqRedir, CmpltRedir, UpstreamFwd)" in verdict.summary
    assert "0000:17:00.0" not in verdict.summary, "a device is no bridge"
    assert pcie_acs.judge(look_at(pcie_acs, tree, "virtual"), Site()).level == "ok"


def test_access_control_that_is_off_is_ok_and_one_that_was_not_read_says_so(tree, monkeypatch):
    install_lspci(tree, monkeypatch, f"sed '/ACSCtl/s/+/-/g' {OUTPUTS}/lspci_bridge.txt")
    verdict = pcie_acs.judge(look_at(pcie_acs, tree), Site())
    assert (verdict.level, verdict.summary) == ("ok", "access control is off at 2 bridges above GPUs and adapters")
    shell_program(tree / "bin/lspci", "echo '\tCapabilities: <access denied>'")
    assert "only root may read it" in pcie_acs.judge(look_at(pcie_acs, tree), Site()).summary


def test_access_control_needs_two_devices_and_a_tree_that_can_be_read(tree: Path) -> None:
    (tree / "sys/class/infiniband/mlx5_0/device").unlink()
    assert "no two devices" in pcie_acs.judge(look_at(pcie_acs, tree), Site()).summary
    assert pcie_acs.judge(Output(text="sh: nothing"), Site()).level == "unknown"
    without = Output(text="machine real\ndevices 9\nlspci absent\nend")
    assert "there is no lspci" in pcie_acs.judge(without, Site()).summary


def test_translated_addresses_of_gpus_and_adapters_are_a_warning(tree: Path) -> None:
    verdict = iommu.judge(look_at(iommu, tree), Site())
    assert verdict.level == "warn"
    assert "addresses of 0000:17:00.0, mlx5_0; boot with iommu=pt" in verdict.summary
    assert iommu.judge(look_at(iommu, tree, "virtual"), Site()).level == "ok"


@pytest.mark.parametrize("kind", ["identity", None])
def test_addresses_that_pass_through_or_are_not_translated_at_all_are_ok(kind: str | None, tree: Path) -> None:
    for device in ("0000:17:00.0", "0000:18:00.0"):
        group = tree / "sys/devices" / SWITCH / device / "iommu_group/type"
        group.write_text(f"{kind}\n") if kind else group.unlink()
    verdict = iommu.judge(look_at(iommu, tree), Site())
    assert (verdict.level, verdict.summary) == ("ok", "passed through, or off, for 2 GPUs and adapters")


def test_without_an_adapter_there_is_nothing_to_join(tree: Path) -> None:
    (tree / "sys/class/infiniband/mlx5_0/device").unlink()
    assert iommu.judge(look_at(iommu, tree), Site()).summary == "no GPU and adapter to join"
    assert iommu.judge(Output(text=""), Site()).level == "unknown"
