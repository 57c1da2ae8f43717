"""results/published/*/node_check.txt: what the checks and active tests found on one real GPU, and on four."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.checks import discover

ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT / "results" / "published"
FILES = [PUBLISHED / host / "node_check.txt" for host in ("h200x1", "h200x4")]


def printed(file: Path) -> tuple[str, str, dict[str, Any]]:
    """What the three commands in the file printed: the table of the checks, that of the active tests, and JSON."""
    commands = re.split(r"^\$ .*\n", file.read_text(encoding="utf-8"), flags=re.M)[1:]
    table, active, found = commands
    return table, active, json.loads(found)["checks"]


NEWER = {"dcgm", "gcm"}  # than the records; neither tool was on those machines


(TABLE, ACTIVE, CHECKS), (TABLE_OF_FOUR, ACTIVE_OF_FOUR, CHECKS_OF_FOUR) = map(printed, FILES)


@pytest.mark.parametrize(("table", "checks"), [(TABLE, CHECKS), (TABLE_OF_FOUR, CHECKS_OF_FOUR)], ids=["one", "four"])
def test_every_check_has_run_on_real_gpus_and_the_table_says_the_same(table: str, checks: dict[str, Any]) -> None:
    assert checks.keys() >= discover().keys() - NEWER, (
        "run burst cluster check --json on a GPU and publish what it prints"
    )
    rows = re.findall(r"^(?:\w+ +| +)(\w+) +(ok|warn|fail|unknown) +(\w+) +(.*)$", table, re.M)
    said = {check: (verdict, action, finding) for check, verdict, action, finding in rows}
    assert said == {name: (one["verdict"], one["action"], one["summary"]) for name, one in checks.items()}


def test_the_records_of_four_gpus_found_their_links_and_fabric_sound_and_measured_them_with_nccl() -> None:
    assert CHECKS_OF_FOUR["gpus"]["facts"]["models"] == {"NVIDIA H200": 4}
    assert {one["verdict"] for one in CHECKS_OF_FOUR.values()} == {"ok"}
    assert CHECKS_OF_FOUR["nvlink"]["summary"] == "18 links up on each of 4 GPUs"
    assert CHECKS_OF_FOUR["gpu_fabric"]["summary"] == "4 GPUs have joined their fabric"
    found = re.search(
        r"active_gemm +ok +none +(\d+) .*median (\d+);.*\n.*\n +active_peers +ok +none +(\d+) GB/s or more.*\n"
        r" +active_all_reduce +ok +none +(\d+) GB/s",
        ACTIVE_OF_FOUR,
    )
    assert found is not None, ACTIVE_OF_FOUR
    gemm, median, peers, reduced = found.groups()
    page = " ".join((ROOT / "docs" / "notes" / "2026-11-22-node-checks-on-h200.md").read_text(encoding="utf-8").split())
    assert f"{gemm} TFLOP/s on the slowest GPU and {median} at the median" in page
    assert f"{peers} GB/s between the slowest two GPUs" in page
    assert f"{reduced} GB/s in the all-reduce of the four" in page


def test_the_records_found_a_real_gpu_that_is_sound() -> None:
    assert CHECKS["gpus"]["facts"]["models"] == {"NVIDIA H200": 1}
    assert {name for name, one in CHECKS.items() if one["verdict"] != "ok"} == {"nvlink"}
    assert re.search(r"active_gemm +ok .* 676 TFLOP/s .*published is 796", ACTIVE)
    assert re.search(r"active_copy +ok ", ACTIVE)


def test_the_speeds_on_the_page_are_those_of_the_record() -> None:
    found = re.search(
        r"([\d.]+) TFLOP/s or more.*published is ([\d.]+)\n.*device memory (\S+) GB/s.*from host (\d+)\.\d GB/s", ACTIVE
    )
    assert found is not None
    gemm, published, device, host = map(float, found.groups())
    page = (ROOT / "docs" / "notes" / "2026-11-22-node-checks-on-h200.md").read_text(encoding="utf-8")
    assert f"{gemm:g} TFLOP/s in a bf16 product of 8192 x 8192 x 8192, which is {gemm / published:.0%} of" in page
    assert f"{device:.0f} GB/s within the device; {host:g} GB/s from\n" in page


def test_the_records_name_no_device_and_no_path_of_the_machine() -> None:
    for path in FILES:
        assert not re.search(r"GPU-[0-9a-f]{8}|serial|/opt/|/home/|/root/", path.read_text(encoding="utf-8")), path
