"""What a worker measured: raw numbers only, written aside and renamed. Every derived figure is computed on reading."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.atomic import write_atomic
from engine.old_names import current_resolved
from engine.plain_json import from_json, read_json

MEASUREMENT_FILE = "measurement.json"
PROGRESS_FILE = "progress.jsonl"
ALLOCATION_RETRIES = "allocation_retries"  # entry of `extra`: of each rank, where one had to repeat an allocation
UNCHECKED = "unchecked"  # entry of `extra`: why nothing was compared with a float64 run that would have been
NOT_FINITE = 1e30  # the error of a tensor that holds NaN or infinity, which JSON has no numbers for
CHECK_UNFINISHED = "the trial ended before its check"  # that sentence until the check is done
LINK = "link_gib_per_second"  # entry of `extra`: speed of the link between nodes, by moment of the trial


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """One GPU at one moment, as NVML tells; None for what a machine cannot tell.

    `throttle`: reasons why its clocks were lowered then, by NVML's names (`sw_power_cap`, `hw_thermal_slowdown`).
    """

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    power_watts: float | None = None
    temperature_c: int | None = None
    throttle: list[str] | None = None


@dataclass(kw_only=True, slots=True)
class Measurement:
    """Raw figures of one trial, gathered on rank 0.

    Times are wall seconds of the slowest rank, one entry per measured step, warm-up excluded. `loss` and `grad_norm`
    hold every step in order, warm-up included: means over all target tokens of the whole sequence (task train).
    """

    step_seconds: list[float]
    forward_seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    peak_allocated_bytes: list[int] = field(default_factory=list)  # one per rank; empty without a GPU
    peak_reserved_bytes: list[int] = field(default_factory=list)
    peak_rss_bytes: list[int] = field(default_factory=list)  # one per rank, host memory
    sent_bytes: list[int] = field(default_factory=list)  # one per rank, posted by attention per step
    chosen: dict[str, str] = field(default_factory=dict)  # what every `auto` became: kernel, layout, backward, ...
    device: str = "cpu"  # cpu or the GPU's name
    software: dict[str, str] = field(default_factory=dict)  # python, torch, cuda, nccl, cudnn, flash-attn-4, driver
    gpus: list[str] = field(default_factory=list)  # one per rank: a digest that tells GPUs apart and names none
    gpus_before: list[GpuState] = field(default_factory=list)  # one per rank, before the warm-up
    gpus_after: list[GpuState] = field(default_factory=list)  # and after the last measured step
    data: dict[str, Any] = field(default_factory=dict)  # source of the tokens: origin, sha256, tokenizer
    extra: dict[str, Any] = field(default_factory=dict)  # task-specific raw values, such as errors against float64


def write_json(path: Path, value: Any) -> None:
    """Write JSON beside `path`, then rename: a reader sees the old file or the whole new one."""
    write_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_measurement(trial_dir: Path, measurement: Measurement) -> None:
    """Leave the measurement where the launcher looks for it."""
    write_json(trial_dir / MEASUREMENT_FILE, asdict(measurement))


def read_measurement(trial_dir: Path) -> Measurement:
    """Read what a worker left. Raises FileNotFoundError when it left nothing, ValueError for what is no measurement."""
    data = read_json(trial_dir / MEASUREMENT_FILE)
    found: Measurement = from_json(Measurement, current_measurement(data) if isinstance(data, dict) else data)
    return found


def current_measurement(data: dict[str, Any]) -> dict[str, Any]:
    """A measurement's JSON with what `auto` became under the names of today."""
    chosen = data.get("chosen")
    return data | {"chosen": current_resolved(chosen)} if isinstance(chosen, dict) else data
