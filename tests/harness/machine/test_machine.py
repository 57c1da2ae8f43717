"""What nvidia-smi prints and CUDA_VISIBLE_DEVICES hides becomes what a trial may use."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from harness.machine.this_machine import Machine, discover

FOUR_H200 = "".join(f"{index}, GPU-{index}abc-{index}, NVIDIA H200, 143771\n" for index in range(4))


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


def test_a_machine_without_driver_is_a_cpu_machine_without_problem(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = discover()
    assert (machine.device, machine.gpu_count, machine.gpu_problem) == ("cpu", 0, "")
    assert 1 <= machine.cores <= len(os.sched_getaffinity(0))
    assert machine.memory_gib > 0


def test_without_gpus_ranks_may_exceed_cores_up_to_a_limit() -> None:
    laptop = Machine(hostname="laptop", device="cpu", cores=2, memory_gib=8)
    server = Machine(hostname="server", device="cpu", cores=64, memory_gib=512)
    assert (laptop.max_ranks, server.max_ranks) == (8, 64)
