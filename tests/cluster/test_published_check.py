"""results/published/*/node_check: what the checks and active tests found on one real GPU, and on four."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.checks import discover

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "published"
FOLDER, OF_FOUR = PUBLISHED / "h200x1" / "node_check", PUBLISHED / "h200x4" / "node_check"
CHECKS, CHECKS_OF_FOUR = (
    json.loads((folder / "check.json").read_text(encoding="utf-8"))["checks"] for folder in (FOLDER, OF_FOUR)
)


@pytest.mark.parametrize(("folder", "checks"), [(FOLDER, CHECKS), (OF_FOUR, CHECKS_OF_FOUR)], ids=["one", "four"])
def test_every_check_has_run_on_real_gpus_and_the_table_says_the_same(folder: Path, checks: dict[str, Any]) -> None:
    assert checks.keys() >= discover().keys(), "run burst check --json on a GPU and publish what it prints"
    rows = re.findall(
        r"^(?:\w+ +| +)(\w+) +(ok|warn|fail|unknown) +(\w+) +(.*)$", (folder / "check.txt").read_text(), re.M
    )
    table = {check: (verdict, action, finding) for check, verdict, action, finding in rows}
    assert table == {name: (one["verdict"], one["action"], one["summary"]) for name, one in checks.items()}


def test_the_records_of_four_gpus_found_their_links_and_fabric_sound_and_measured_them_with_nccl() -> None:
    assert CHECKS_OF_FOUR["gpus"]["facts"]["models"] == {"NVIDIA H200": 4}
    assert {one["verdict"] for one in CHECKS_OF_FOUR.values()} == {"ok"}
    assert CHECKS_OF_FOUR["nvlink"]["summary"] == "18 links up on each of 4 GPUs"
    assert CHECKS_OF_FOUR["gpu_fabric"]["summary"] == "4 GPUs have joined their fabric"
    active = (OF_FOUR / "active.txt").read_text(encoding="utf-8")
    found = re.search(
        r"active_gemm +ok +none +(\d+) .*median (\d+);.*\n.*\n +active_peers +ok +none +(\d+) GB/s or more.*\n"
        r" +active_all_reduce +ok +none +(\d+) GB/s",
        active,
    )
    assert found is not None, active
    gemm, median, peers, reduced = found.groups()
    page = " ".join((ROOT / "docs" / "notes" / "2026-11-22-node-checks-on-h200.md").read_text(encoding="utf-8").split())
    assert f"{gemm} TFLOP/s on the slowest GPU and {median} at the median" in page
    assert f"{peers} GB/s between the slowest two GPUs" in page
    assert f"{reduced} GB/s in the all-reduce of the four" in page


def test_the_records_found_a_real_gpu_that_is_sound() -> None:
    assert CHECKS["gpus"]["facts"]["models"] == {"NVIDIA H200": 1}
    assert {name for name, one in CHECKS.items() if one["verdict"] != "ok"} == {"nvlink"}
    assert re.search(r"active_gemm +ok .* 676 TFLOP/s .*published is 796", (FOLDER / "active.txt").read_text())
    assert re.search(r"active_copy +ok ", (FOLDER / "active.txt").read_text())


def test_the_speeds_on_the_page_are_those_of_the_record() -> None:
    found = re.search(
        r"([\d.]+) TFLOP/s or more.*published is ([\d.]+)\n.*device memory (\S+) GB/s.*from host (\d+)\.\d GB/s",
        (FOLDER / "active.txt").read_text(encoding="utf-8"),
    )
    assert found is not None
    gemm, published, device, host = map(float, found.groups())
    page = (ROOT / "docs" / "notes" / "2026-11-22-node-checks-on-h200.md").read_text(encoding="utf-8")
    assert f"{gemm:g} TFLOP/s in a bf16 product of 8192 x 8192 x 8192, which is {gemm / published:.0%} of" in page
    assert f"{device:.0f} GB/s within the device; {host:g} GB/s from\n" in page


def test_the_records_name_no_device_and_no_path_of_the_machine() -> None:
    for path in (*FOLDER.iterdir(), *OF_FOUR.iterdir()):
        assert not re.search(r"GPU-[0-9a-f]{8}|serial|/opt/|/home/|/root/", path.read_text(encoding="utf-8")), path
