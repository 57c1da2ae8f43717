"""Files by which a launcher and its ranks talk: the trial of a turn, and what a worker measured, in raw numbers only.

Every file is written aside and renamed. Derived figures are computed on reading. No torch, because programs that only
launch or read use this.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, Required, TypedDict

from engine.atomic import write_atomic
from engine.reader import Meta, from_json, read_json

if TYPE_CHECKING:
    from torch import Tensor

    from engine.settings import Steps

MEASUREMENT_FILE = "measurement.json"
PROGRESS_FILE = "progress.jsonl"
ALLOCATION_RETRIES: Final = "allocation_retries"  # entry of `extra`
WARM_UP: Final = "warm_up"  # likewise
LINK: Final = "link_gib_per_second"  # entry of `extra`
UNCHECKED: Final = "unchecked"  # entry of `extra`
CHECK_UNFINISHED = "the trial ended during its check"
NOT_FINITE = 1e30  # an error of `extra` where a tensor holds NaN or infinity, which JSON has no numbers for
TOKEN_FACTOR = 4.0  # by which the error of a single token may exceed what that of a run of them may be

# No step takes thirty years, no link or GPU is a million times as fast as those of today.
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Speed = Annotated[float, Meta(ge=0, le=1e9)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]
RelativeError = Annotated[float, Meta(ge=0, le=NOT_FINITE)]
Of = Literal["extra_step", "measured_step"]  # the traced step: one more, or the only one that was measured


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


class ErrorPlace(TypedDict, total=False):
    """Where an error is largest: the rank, the first and last token and the head, or the row of a parameter's gradient;
    what the tensor does not have is left out."""

    rank: int | None
    first_token: int | None
    last_token: int | None
    head: int  # of q's heads in out and dq, of the KV heads in dk and dv
    row: int
    error: Required[RelativeError]  # of those tokens; of that row, relative to the norm of the whole tensor


class StepProfile(TypedDict, total=False):
    """Where the time of the traced step went, or the reason for which that is not known."""

    of: Required[Of]
    reason: str
    on: str  # gpu or cpu
    rank: int  # whose events span the longest time
    span_seconds: Seconds
    seconds: dict[str, Seconds]  # by category; they add up to `span_seconds`


class GemmMeasurement(TypedDict, total=False):
    """How the speeds of a trial's own matrix products were measured, or the reason for which they were not."""

    shapes: dict[str, list[int]]  # rows, inputs and outputs by product
    where: str
    started_at: str  # ISO 8601, UTC
    reason: str


class UpstreamRun(TypedDict, total=False):
    """The compared system that ran; see `baselines.upstream.StartedSystem`."""

    flavour: str
    pin: str
    commit: str
    release: str
    command: list[str]
    environment: dict[str, str]
    printed: dict[str, Annotated[float, Meta(ge=-1e18, le=1e18)]]  # what it says of itself, under its own names
    borrowed: dict[str, str]
    builds: dict[str, str]
    ended: str


class WarmUp(TypedDict):
    """How a trial with `steps.settle` warmed up."""

    steps: Annotated[int, Meta(ge=0, le=1 << 40)]  # before the first measured one
    settled: bool  # whether the last two of them agreed


class Extra(TypedDict, total=False):
    """Raw values that only some trials have. A method may add others of its own, of plain JSON values.

    results.csv has a column `extra_<dotted name>` for each.
    """

    error: dict[str, RelativeError]  # by tensor, against float64: Frobenius norm of the difference over that of truth
    error_scale: dict[str, Annotated[float, Meta(ge=-NOT_FINITE, le=NOT_FINITE)]]  # <found, truth> / |truth|^2 - 1
    error_at: dict[str, ErrorPlace]  # by tensor
    checked: dict[str, int]  # the problem that the errors belong to, where it is not the trial's own: tokens, rows
    unchecked: str  # why no errors were measured, where they should have been
    profile: StepProfile
    upstream: UpstreamRun
    warm_up: WarmUp
    allocation_retries: list[Annotated[int, Meta(ge=0, le=1 << 40)]]  # by rank, where one had to repeat an allocation
    computed_sent_bytes: list[Bytes]  # by rank, as the plan computes them
    computed_sent_between_nodes_bytes: list[Bytes]
    held_gib: Annotated[float, Meta(ge=0, le=1e9)]  # what every form of the LM head holds
    link_gib_per_second: dict[str, Speed]  # between nodes, by moment of the trial
    across_gib_per_second: Speed  # the last of them
    link_by_pattern: dict[str, Speed]
    link_latency_seconds: Seconds
    gemm: GemmMeasurement
    gemm_tflops: dict[str, dict[str, Speed]]  # by product and direction


def measured_part(steps: Steps, seconds: Sequence[float]) -> tuple[slice, Extra]:
    """Of all steps of a trial, whose times on the slowest rank these are, those that are measured; and what its record
    says of its warm-up where that was to settle."""
    if not steps.settle:
        return slice(steps.warmup, steps.total), {}
    settled = steps.settled(seconds)
    first = steps.warmup + steps.settle if settled is None else settled
    return slice(first, first + steps.measured), {WARM_UP: {"steps": first, "settled": settled is not None}}


@dataclass(kw_only=True, slots=True)
class Measurement:
    """Raw figures of one trial, gathered on rank 0.

    Times are wall seconds of the slowest rank, one entry per measured step, others excluded. `loss` and `grad_norm`
    hold every step in order, warm-up included: means over all target tokens of the whole sequence (task train).
    """

    step_seconds: list[Seconds]
    forward_seconds: list[Seconds] = field(default_factory=list)
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
    data: dict[str, object] = field(default_factory=dict)  # source of the tokens: origin, sha256, tokenizer
    extra: Extra = field(default_factory=Extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the planner expected of its plan for `checkpoint: auto`. Bytes are of one rank, by the model alone."""

    words: str  # what was chosen, and why
    fits: bool  # whether the planner expected it to
    budget_bytes: int | None  # None: unknown
    allocated_bytes: int
    reserved_bytes: int
    host_bytes: int
    added_seconds: float  # of a step, by repeated work and copies
    step_seconds: float | None = None  # of a step, as `burst plan` says; None where it says nothing
    correction: float = 1.0  # that earlier trials of this machine and shape gave


def finite_error(error: float) -> float:
    """An error as `extra` holds it: NOT_FINITE where it is NaN, infinite or so large."""
    return error if math.isfinite(error) and abs(error) < NOT_FINITE else NOT_FINITE


def relative_error(found: Tensor, truth: Tensor) -> float:
    """How far a tensor is from its float64 truth: the norm of the difference over that of the truth, NOT_FINITE where a
    number is not finite or a truth of 0 was missed."""
    found, truth = found.detach().double(), truth.detach().double()
    return finite_error((found - truth).norm().item() / max(truth.norm().item(), sys.float_info.min))


def relative_errors(found: Sequence[Tensor], truths: Sequence[Tensor]) -> list[float]:
    """`relative_error` of each."""
    return [relative_error(one, truth) for one, truth in zip(found, truths, strict=True)]


def write_json(path: Path, value: object) -> None:
    """Write JSON beside `path`, then rename: a reader sees the old file or the whole new one."""
    write_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_measurement(trial_dir: Path, measurement: Measurement) -> None:
    """Leave the measurement where the launcher looks for it."""
    write_json(trial_dir / MEASUREMENT_FILE, asdict(measurement))


def read_measurement(trial_dir: Path) -> Measurement:
    """Read what a worker left. Raises FileNotFoundError when it left nothing, ValueError for what is no measurement."""
    return from_json(Measurement, read_json(trial_dir / MEASUREMENT_FILE))


TRACE_FILE = "trace.json.gz"  # of a trial, in the Chrome trace format: rank 0's
PROFILE: Final = "profile"  # of `Measurement.extra`: where the time of the traced step went
_REASON = "the trial ended before the trace was read"
_UNDER_WAY: dict[Of, str] = {
    "extra_step": "while one more step was traced",
    "measured_step": "while the trace of the measured step was read",
}


def unfinished(of: Of) -> StepProfile:
    """In place of the numbers, until they are there."""
    return {"of": of, "reason": _REASON}


def cut_off(profile: StepProfile, how: str) -> StepProfile:
    """`profile` of a trial that then ended as `how` says, where it was still unfinished; any other as it is."""
    if profile.get("reason") != _REASON:
        return profile
    return {"of": profile["of"], "reason": f"the trial ended {_UNDER_WAY[profile['of']]}: {how}"}
