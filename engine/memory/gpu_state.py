"""The GPUs of this host, and the state of one at one moment: clocks, power, temperature, throttle reasons, driver, and
a digest of it.

`nvidia-smi` tells, because it comes with every driver; what it cannot tell stays None. Asking takes tens of
milliseconds and no memory of the GPU, and needs no torch.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.measurement import GpuState

if TYPE_CHECKING:
    import torch

PATIENCE_SECONDS = 10.0  # a driver without persistence mode takes seconds; one that hangs must not end the trial
DIGEST_CHARACTERS = 12  # of a SHA-256: tells apart the GPUs of any cluster

_LISTING = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
_LISTING_SECONDS = 30
_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "driver_version")
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # before driver 535 only the second

# Bits of nvmlClocksEventReason* in nvml.h.
_REASON_OF_BIT = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGpu:
    """One GPU of this host as nvidia-smi lists it."""

    index: int
    uuid: str
    name: str
    memory_gib: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """One GPU at one moment."""

    digest: str  # tells GPUs apart without naming one; empty where it is not known
    driver: str = ""  # its version; empty where it is not known
    state: GpuState


def read_gpu(device: torch.device) -> GpuReading | None:
    """The GPU of this rank now; None for a CPU. Never raises for what the machine cannot tell."""
    if device.type != "cuda":
        return None
    import torch

    # torch's own view: CUDA_VISIBLE_DEVICES renumbers devices, nvidia-smi does not follow it.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return GpuReading(digest="", state=GpuState()) if uuid is None else read_gpu_named(f"GPU-{uuid}")


def read_gpu_named(uuid: str) -> GpuReading:
    """The GPU with this UUID, `GPU-...`, now. Never raises for what the machine cannot tell."""
    for reasons in _REASONS:
        if (line := _asked(uuid, (*_FIELDS, reasons))) is not None:
            driver, state = parse(line)
            return GpuReading(digest=digest_of(uuid), driver=driver, state=state)
    return GpuReading(digest=digest_of(uuid), state=GpuState())


def query_gpus() -> tuple[list[HostGpu], str]:
    """All GPUs of the host, and one sentence when there are signs of some that cannot be used."""
    try:
        done = subprocess.run(_LISTING, capture_output=True, text=True, timeout=_LISTING_SECONDS, check=False)
        if done.returncode:
            said = (done.stdout + done.stderr).strip().splitlines()
            reason = said[0] if said else "no output"
            return [], f"nvidia-smi exited with {done.returncode} ({reason}); check the driver"
        return parse_gpus(done.stdout), ""
    except FileNotFoundError:
        return [], ""  # no driver, hence no GPU: nothing is wrong
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer within {_LISTING_SECONDS} s; check the driver and the GPUs"
    except (OSError, ValueError) as error:
        return [], str(error)


def parse_gpus(output: str) -> list[HostGpu]:
    """GPUs out of `nvidia-smi --query-gpu=index,uuid,name,memory.total --format=csv,noheader,nounits`.

    Raises ValueError on a line of another form.
    """
    gpus = []
    for line in filter(None, map(str.strip, output.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4 or not cells[0].isdecimal():
            raise ValueError(f"nvidia-smi printed {line!r}; expected index, uuid, name and memory; check the driver")
        index, uuid, name, mib = cells
        # Memory is "[N/A]" where GPU and host share it; 0 says unknown.
        memory_gib = round(int(mib) / 1024, 1) if mib.isdecimal() else 0.0
        gpus.append(HostGpu(index=int(index), uuid=uuid, name=name, memory_gib=memory_gib))
    return gpus


def visible_gpus(gpus: list[HostGpu], visible_devices: str | None) -> list[HostGpu]:
    """The GPUs that CUDA shows under this CUDA_VISIBLE_DEVICES (None: unset), in its order.

    As in CUDA, an entry is an index or the start of a UUID, and the list ends at the first entry that names no GPU.
    """
    if visible_devices is None:
        return gpus
    shown: list[HostGpu] = []
    for entry in map(str.strip, visible_devices.split(",")):
        named = [
            gpu
            for gpu in gpus
            if (entry.isdecimal() and gpu.index == int(entry))
            or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
        ]
        if len(named) != 1 or named[0] in shown:
            break
        shown += named
    return shown


def digest_of(uuid: str) -> str:
    """A name for the GPU that does not tell its UUID."""
    return hashlib.sha256(uuid.lower().encode()).hexdigest()[:DIGEST_CHARACTERS]


def parse(line: str) -> tuple[str, GpuState]:
    """Driver version and state from one line of nvidia-smi's CSV, in the order of the fields, without units."""
    told = [_told(part) for part in line.split(",")]
    if len(told) != len(_FIELDS) + 1:
        return "", GpuState()
    sm, memory, power, temperature, driver, reasons = told
    return driver or "", GpuState(
        sm_mhz=_whole(sm),
        memory_mhz=_whole(memory),
        power_watts=_number(power),
        temperature_c=_whole(temperature),
        throttle=_reasons(reasons),
    )


def _asked(uuid: str, fields: tuple[str, ...]) -> str | None:
    """The line that nvidia-smi prints of one GPU; None where it cannot be asked, or knows no such field or GPU."""
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    lines = done.stdout.splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def _told(part: str) -> str | None:
    """One value, or None for `[N/A]`, `[Not Supported]`, `[Unknown Error]` and their like."""
    text = part.strip()
    return None if not text or text.startswith("[") or text in ("N/A", "Not Supported") else text


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is None or 0 <= value < float("inf") else None


def _whole(text: str | None) -> int | None:
    value = _number(text)
    return None if value is None else round(value)


def _reasons(text: str | None) -> list[str] | None:
    """Names of the bits that are set; a bit without a name here keeps its number, so that none is lost."""
    try:
        bits = int(text, 16) if text is not None else None
    except ValueError:
        return None
    if bits is None:
        return None
    known = [name for bit, name in _REASON_OF_BIT.items() if bits & bit]
    unknown = bits & ~sum(_REASON_OF_BIT)
    return known + ([f"{unknown:#x}"] if unknown else [])
