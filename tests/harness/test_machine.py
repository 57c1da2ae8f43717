"""What nvidia-smi prints and CUDA_VISIBLE_DEVICES hides becomes what a trial may use."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from harness.machine.this_machine import Machine, discover, parse_gpus, visible_gpus

FOUR_H200 = "".join(f"{index}, GPU-{index}abc-{index}, NVIDIA H200, 143771\n" for index in range(4))


def test_gpus_are_read_from_nvidia_smi() -> None:
    gpus = parse_gpus(FOUR_H200)
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert {(gpu.name, gpu.memory_gib) for gpu in gpus} == {("NVIDIA H200", 140.4)}


def test_memory_the_driver_does_not_know_is_zero() -> None:
    assert parse_gpus("0, GPU-1, NVIDIA GB10, [N/A]\n")[0].memory_gib == 0.0


def test_output_of_another_form_is_an_error_that_quotes_it() -> None:
    with pytest.raises(ValueError, match="No devices were found"):
        parse_gpus("No devices were found\n")


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("GPU-3abc", [3]),
        ("1,7,2", [1]),  # CUDA ignores what follows an entry that names no GPU
        ("1,1", [1]),
        ("GPU-", []),  # ambiguous
    ],
)
def test_visible_devices_are_those_cuda_shows(visible: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible_gpus(parse_gpus(FOUR_H200), visible)] == indices


def _nvidia_smi(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_a_machine_with_gpus_holds_one_rank_per_visible_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _nvidia_smi(tmp_path, f"printf '{FOUR_H200}'")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    machine = discover()
    assert (machine.device, machine.gpu_count, machine.max_ranks) == ("cuda", 2, 2)
    assert (machine.gpu_name, machine.gpu_memory_gib, machine.gpu_problem) == ("NVIDIA H200", 140.4, "")


def test_a_broken_driver_is_reported_and_the_cpu_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _nvidia_smi(tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    machine = discover()
    assert machine.device == "cpu"
    assert "exited with 18 (Failed to initialize NVML" in machine.gpu_problem


def test_a_machine_without_driver_is_a_cpu_machine_without_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = discover()
    assert (machine.device, machine.gpu_count, machine.gpu_problem) == ("cpu", 0, "")
    assert 1 <= machine.cores <= len(os.sched_getaffinity(0))
    assert machine.memory_gib > 0


def test_without_gpus_ranks_may_exceed_cores_up_to_a_limit() -> None:
    laptop = Machine(hostname="laptop", device="cpu", cores=2, memory_gib=8)
    server = Machine(hostname="server", device="cpu", cores=64, memory_gib=512)
    assert (laptop.max_ranks, server.max_ranks) == (8, 64)
