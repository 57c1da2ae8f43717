"""results/published/h200x1/node_check: what the checks and active tests found on a real GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cluster.checks import discover

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "published" / "h200x1" / "node_check"
CHECKS = json.loads((FOLDER / "check.json").read_text(encoding="utf-8"))["checks"]


def test_every_check_has_run_on_a_real_gpu_and_the_table_says_the_same() -> None:
    assert CHECKS.keys() >= discover().keys(), "run burst check --json on a GPU and publish what it prints"
    rows = re.findall(
        r"^(?:\w+ +| +)(\w+) +(ok|warn|fail|unknown) +(\w+) +(.*)$", (FOLDER / "check.txt").read_text(), re.M
    )
    table = {check: (verdict, action, finding) for check, verdict, action, finding in rows}
    assert table == {name: (one["verdict"], one["action"], one["summary"]) for name, one in CHECKS.items()}


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
    page = (ROOT / "docs" / "nodes.md").read_text(encoding="utf-8")
    assert f"{gemm:g} TFLOP/s in a bf16 product of 8192 x 8192 x 8192, which is {gemm / published:.0%} of" in page
    assert f"{device:.0f} GB/s within the device; {host:g} GB/s from\n" in page


def test_the_records_name_no_device_and_no_path_of_the_machine() -> None:
    for path in FOLDER.iterdir():
        assert not re.search(r"GPU-[0-9a-f]{8}|serial|/opt/|/home/|/root/", path.read_text(encoding="utf-8")), path
