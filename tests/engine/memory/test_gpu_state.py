"""What nvidia-smi prints becomes a GPU's state: values that it cannot tell are None, and no UUID is kept."""

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.measurement import GpuState
from engine.memory.gpu_state import digest_of, parse, parse_gpus, read_gpu, visible_gpus

UUID = "6e1b3c2a-0000-4444-8888-0123456789ab"
GPU = torch.device("cuda", 0)

# Captured from an H100 at rest and right after matrix products; the others have that form, with a GPU at its limits and
# one that leaves fields out.
H100 = "345, 2619, 68.79, 33, 580.159.04, 0x0000000000000001"
H100_BUSY = "1440, 2619, 516.05, 54, 580.159.04, 0x0000000000000004"
CAPPED = "1605, 3201, 699.42, 71, 570.86.15, 0x0000000000000024"
FOUR_H200 = "".join(f"{index}, GPU-{index}abc-{index}, NVIDIA H200, 143771\n" for index in range(4))
CONSUMER = "210, 405, [N/A], 41, 535.183.01, [N/A]"


@pytest.mark.parametrize(
    ("line", "driver", "state"),
    [
        (
            H100,
            "580.159.04",
            GpuState(sm_mhz=345, memory_mhz=2619, power_watts=68.79, temperature_c=33, throttle=["gpu_idle"]),
        ),
        (
            CAPPED,
            "570.86.15",
            GpuState(
                sm_mhz=1605,
                memory_mhz=3201,
                power_watts=699.42,
                temperature_c=71,
                throttle=["sw_power_cap", "sw_thermal_slowdown"],
            ),
        ),
        (
            H100_BUSY,
            "580.159.04",
            GpuState(sm_mhz=1440, memory_mhz=2619, power_watts=516.05, temperature_c=54, throttle=["sw_power_cap"]),
        ),
        (CONSUMER, "535.183.01", GpuState(sm_mhz=210, memory_mhz=405, temperature_c=41)),
        ("[Not Supported], [N/A], N/A, [Unknown Error], [N/A], 0x0", "", GpuState(throttle=[])),
        (
            "1980, 2619, 120.0, 40, 999.1, 0x1000000000000004",
            "999.1",
            GpuState(
                sm_mhz=1980,
                memory_mhz=2619,
                power_watts=120.0,
                temperature_c=40,
                throttle=["sw_power_cap", "0x1000000000000000"],
            ),
        ),
        ("nan, inf, -3, warm, 1.2, zero", "1.2", GpuState()),
        ("No devices were found", "", GpuState()),
    ],
)
def test_a_line_of_nvidia_smi_is_read_and_what_it_cannot_tell_stays_empty(line, driver, state):
    assert parse(line) == (driver, state)


def nvidia_smi(folder: Path, monkeypatch, script: str) -> None:
    """A program of that name before all others, and a torch that sees one GPU."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid=UUID))


def test_the_gpu_is_asked_for_by_its_uuid_and_only_a_digest_is_kept(tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; echo "{H100}"')
    found = read_gpu(GPU)
    assert found is not None
    assert f"--id=GPU-{UUID} " in (tmp_path / "asked").read_text()
    assert (found.driver, found.state.sm_mhz) == ("580.159.04", 345)
    assert found.digest == digest_of(f"GPU-{UUID}")
    assert len(found.digest) == 12
    assert UUID[:8] not in str(found)
    assert digest_of("GPU-other") != found.digest


def test_a_driver_that_knows_the_reasons_by_their_older_name_is_asked_again(tmp_path, monkeypatch):
    refuse = 'echo "Field is not a valid field to query."; exit 2'
    nvidia_smi(tmp_path, monkeypatch, f'case "$*" in *clocks_event*) {refuse};; *) echo "{CAPPED}";; esac')
    found = read_gpu(GPU)
    assert found is not None
    assert found.state.throttle == ["sw_power_cap", "sw_thermal_slowdown"]


@pytest.mark.parametrize("script", ["exit 9", "echo; exit 0", "kill -9 $$", "printf '\\377\\376'"])
def test_a_driver_that_cannot_answer_leaves_the_state_empty(tmp_path, monkeypatch, script):
    nvidia_smi(tmp_path, monkeypatch, script)
    found = read_gpu(GPU)
    assert found is not None
    assert (found.digest, found.driver, found.state) == (digest_of(f"GPU-{UUID}"), "", GpuState())


def test_without_nvidia_smi_or_a_uuid_only_the_state_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid=UUID))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = read_gpu(GPU)
    assert found is not None
    assert (found.digest, found.state) == (digest_of(f"GPU-{UUID}"), GpuState())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace())
    nameless = read_gpu(GPU)
    assert nameless is not None
    assert (nameless.digest, nameless.state) == ("", GpuState())


def test_a_cpu_has_no_state():
    assert read_gpu(torch.device("cpu")) is None


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
