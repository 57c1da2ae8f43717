"""Every derived figure of a record, computed on reading so that a corrected formula needs no rerun.

A figure that was not measured, or has no meaning here (an MFU on a CPU), is None: never 0 and never NaN.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.measurement import Extra
from engine.shape import ModelShape
from engine.tasks.products import DIRECTIONS, matrix_products
from harness.metrics.flops import (
    StepFlops,
    counted_flops,
    seconds_at_kernel_speed,
    tokens_per_step,
    work_of,
    work_on_documents,
)
from harness.metrics.hardware import Hardware, hardware_for
from harness.metrics.intervals import median_interval
from harness.records.record import Record

GIB = 1 << 30
TERA = 1e12
NO_ATTENTION = {"forward": 1.0, "backward": 1.0}  # of work without any: no figure depends on it
OWN_GEMMS = "GEMMs of this trial's shapes"

# How every printed figure is defined, by the column it explains; figures and reports print these sentences.
FORMULAS: dict[str, str] = {
    "forward FLOPs": "forward FLOPs = 2 × tokens × matmul weights (layers and LM head; embedding look-up free) "
    "+ 4 × heads × head_dim × visible pairs × layers × sequences; visible pairs exact per mask",
    "tokens_per_gpu_per_second": "tokens/s/GPU = tokens of a step ÷ (median step seconds × ranks)",
    "tflops_per_gpu (train)": "TFLOP/s/GPU = 3 × forward FLOPs ÷ (median step seconds × ranks), "
    "recomputation not counted",
    "tflops_per_gpu (attention)": "TFLOP/s/GPU = 3.5 × 4 × heads × head_dim × visible pairs × sequences "
    "÷ (median seconds of forward + backward × ranks); backward counted 2.5 × forward, as kernels recompute QKᵀ",
    "tflops_per_gpu (lm_head)": "TFLOP/s/GPU = 6 × tokens × vocabulary × hidden ÷ (median seconds of forward + "
    "backward × ranks); logits computed again not counted",
    "tflops_per_gpu (linear)": "TFLOP/s/GPU = 3 × forward FLOPs of one recurrence ÷ (median seconds of forward + "
    "backward × ranks); forward FLOPs = 4 × tokens × value heads × key dim × value dim, and 6 × of the delta rule",
    "mfu": "MFU = 3 × forward FLOPs ÷ (median step seconds × ranks × dense bf16 peak), recomputation not counted",
    "mfu_ceiling": "MFU ceiling = MFU of the same work at measured GEMM and attention kernel speeds, nothing "
    "recomputed by checkpointing and no transfer exposed; GEMMs of the model's own shapes where the trial measured "
    "them after its last step, otherwise a large GEMM on this hardware",
    "ceiling_source": "ceiling source = where and when the speeds behind the ceiling were measured",
    "hfu": "HFU = MFU with activation recomputation and the attention kernels' own QKᵀ recomputation counted",
    "peak_memory_gib": "peak memory = the allocator's peak allocated plus attention's receive windows, "
    "maximum over ranks",
    "peak_rss_gib": "peak host memory = resident set of a rank's process, maximum over ranks",
    "sent_gib_per_gpu": "sent = bytes attention sends per step, maximum over ranks; empty where the method counts none",
    "loss": "loss and gradient norm = means over all target tokens of the whole batch, at the last measured step",
    "step_seconds_low": "interval = 95% interval of the median step, rounds resampled as a whole (cluster bootstrap, "
    "widened for few rounds); empty with fewer than three rounds",
    "step_seconds_iqr": "spread = interquartile range of the measured steps; a step lasts as long as its slowest rank",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Derived figures of one trial; all None unless the trial is ok. Units are in the names, GPU means rank."""

    samples: int | None = None  # measured steps, of all rounds
    rounds: int | None = None  # that gave a figure
    step_seconds_median: float | None = None
    step_seconds_iqr: float | None = None  # needs two samples
    step_seconds_low: float | None = None  # interval of the median, from rounds; needs two of them
    step_seconds_high: float | None = None
    forward_seconds_median: float | None = None
    tokens_per_gpu_per_second: float | None = None
    tokens_per_gpu_per_second_low: float | None = None
    tokens_per_gpu_per_second_high: float | None = None
    tflops_per_gpu: float | None = None  # train: model FLOPs (3 x forward); attention: kernel convention (3.5 x)
    mfu: float | None = None  # model FLOPs over dense bf16 peak
    mfu_ceiling: float | None = None  # MFU of this work at measured kernel speeds, nothing repeated or exposed
    hfu: float | None = None  # the same with everything that is recomputed
    peak_memory_gib: float | None = None  # allocated, maximum over ranks
    peak_reserved_gib: float | None = None
    peak_rss_gib: float | None = None  # host memory, maximum over ranks
    sent_gib_per_gpu: float | None = None  # per step, posted by attention, maximum over ranks
    loss: float | None = None  # of the last measured step
    grad_norm: float | None = None
    tflops_ceiling: float | None = None  # tflops_per_gpu at measured kernel speeds
    peak_tflops: float | None = None  # the peak behind mfu
    ceiling_source: str | None = None  # where and when the speeds behind both ceilings were measured


def metrics_of(record: Record) -> Metrics:
    """Derive all figures of one record.

    Raises ValueError for an ok record without a measurement: such a record has neither a number nor a reason.
    """
    if record.status != "ok":
        return Metrics()
    measured = record.measurement
    if measured is None or not measured.step_seconds:
        raise ValueError(f"record {record.trial_id} is ok but holds no step times; remove it and run the trial again")

    settings = record.settings
    work, tokens = work_of(settings), float(tokens_per_step(settings))
    if isinstance(packed := measured.data.get("packed"), dict):
        tokens = packed["tokens_per_step"]
        work = work_on_documents(work, settings, tokens, packed["pairs_per_step"])
    step = statistics.median(measured.step_seconds)
    interval = median_interval(record.step_seconds_by_round)
    tokens_per_rank = tokens / settings.world_size
    gpu_seconds = step * settings.world_size
    counted = counted_flops(settings, work)

    # The table of peaks holds the bf16 one only: a fraction of it has no meaning for an fp32 run.
    hardware = hardware_for(record.gpu or measured.device) if settings.dtype == "bf16" else None
    peak = hardware.peak_bf16_tflops if hardware else None
    ceiling = ceiling_of(record, work, hardware) if hardware else None
    best = ceiling.seconds if ceiling else None

    return Metrics(
        samples=len(measured.step_seconds),
        rounds=len(record.step_seconds_by_round),
        step_seconds_median=step,
        step_seconds_iqr=interquartile_range(measured.step_seconds),
        step_seconds_low=interval.low if interval else None,
        step_seconds_high=interval.high if interval else None,
        forward_seconds_median=statistics.median(measured.forward_seconds) if measured.forward_seconds else None,
        tokens_per_gpu_per_second=tokens_per_rank / step,
        tokens_per_gpu_per_second_low=tokens_per_rank / interval.high if interval else None,
        tokens_per_gpu_per_second_high=tokens_per_rank / interval.low if interval else None,
        tflops_per_gpu=counted / gpu_seconds / 1e12,
        mfu=work.model / gpu_seconds / 1e12 / peak if peak else None,
        mfu_ceiling=work.model / best / 1e12 / peak if peak and best else None,
        hfu=work.hardware / gpu_seconds / 1e12 / peak if peak else None,
        peak_memory_gib=_largest_gib(measured.peak_allocated_bytes),
        peak_reserved_gib=_largest_gib(measured.peak_reserved_bytes),
        peak_rss_gib=_largest_gib(measured.peak_rss_bytes),
        sent_gib_per_gpu=_largest_gib(measured.sent_bytes) if _traffic_was_counted(record) else None,
        loss=measured.loss[-1] if measured.loss else None,
        grad_norm=measured.grad_norm[-1] if measured.grad_norm else None,
        tflops_ceiling=counted / best / 1e12 if best else None,
        peak_tflops=peak,
        ceiling_source=ceiling.source if ceiling else None,
    )


def interquartile_range(samples: Sequence[float]) -> float | None:
    """Spread of the middle half, in the samples' unit (linear interpolation); None for fewer than two samples."""
    if len(samples) < 2:
        return None
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


def _traffic_was_counted(record: Record) -> bool:
    """Whether the record's bytes are those that attention sent: the engine counts what its own transports send.

    One rank sends none. Ranks whose count is 0 used transports of their own, unless the plan's arithmetic gives 0 too.
    """
    measured = record.measurement
    if measured is None or record.settings.task == "lm_head":  # which runs no attention
        return False
    none_computed = measured.extra.get("computed_sent_bytes") == [0] * len(measured.sent_bytes)
    return any(measured.sent_bytes) or none_computed or record.settings.cp_size == 1


def _largest_gib(bytes_per_rank: Sequence[int]) -> float | None:
    return max(bytes_per_rank) / GIB if bytes_per_rank else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """Least seconds of one GPU for all the work of a step, and where and when the speeds behind it were measured.

    GEMMs are the trial's own where it measured them: a training trial on GPUs does, after its last step. Otherwise, and
    for the attention kernel always, they are those of the hardware file.
    """

    seconds: float
    source: str


def ceiling_of(record: Record, work: StepFlops, hardware: Hardware) -> Ceiling | None:
    """The ceiling of an ok record; None where a speed was measured neither in the trial nor, but for float8, for this
    hardware, for recurrences alone, whose kernels have none, and for attention alone on one rank: that is the kernel
    itself, whose speed is no share of its speed at another length."""
    if record.settings.task == "linear" or (record.settings.task == "attention" and record.settings.cp_size == 1):
        return None
    measured = record.measurement
    assert measured is not None, "an ok record has a measurement"
    own = own_gemm_tflops(record.settings.model, measured.extra.get("gemm_tflops"))
    if own is None and record.settings.linear_dtype != "same" and (work.layers or work.head):
        return None
    kernel = measured.chosen.get("kernel", "")
    seconds = kernel_bound_seconds(work, hardware, kernel, gemm=own)
    if seconds is None:
        return None
    parts = []
    if work.layers or work.head:
        parts.append(_own_source(measured.extra) if own else f"GEMM: {hardware.source_of('gemm_tflops')}")
    if work.attention:
        parts.append(f"attention kernel {kernel}: {hardware.source_of('kernel_ceilings')}")
    return Ceiling(seconds=seconds, source="; ".join(parts))


def kernel_bound_seconds(
    work: StepFlops, hardware: Hardware, kernel: str, *, gemm: float | None = None
) -> float | None:
    """Seconds one GPU needs for `work` at measured GEMM and attention speeds; None if one is not known.

    `gemm`: TFLOP/s of the GEMMs, by default this hardware's. Work without attention, as of task lm_head, needs no speed
    of an attention kernel; attention alone needs none of a GEMM.
    """
    ceiling = hardware.kernel_ceilings.get(kernel) if work.attention else NO_ATTENTION
    gemm = gemm or hardware.gemm_tflops or (None if work.layers or work.head else 1.0)
    if ceiling is None or gemm is None:
        return None
    return seconds_at_kernel_speed(
        work, gemm=gemm, attention_forward=ceiling["forward"], attention_backward=ceiling["backward"]
    )


def own_gemm_tflops(model: ModelShape, measured: Mapping[str, Mapping[str, float]] | None) -> float | None:
    """TFLOP/s of all of a model's products together, from those of each in each direction (`extra.gemm_tflops`).

    The harmonic mean weighted by FLOPs: their total over the seconds that they take one after another. None where a
    product was not measured.
    """
    flops = seconds = 0.0
    for product in matrix_products(model):
        speeds = (measured or {}).get(product.name, {})
        for direction in DIRECTIONS:
            speed = speeds.get(direction)
            if not speed:
                return None
            flops += product.weights
            seconds += product.weights / speed
    return flops / seconds


def _own_source(extra: Extra) -> str:
    """When and where a trial's own GEMMs were measured."""
    how = extra.get("gemm", {})
    when = ", ".join(filter(None, (how.get("where", "in this trial"), how.get("started_at"))))
    return f"{OWN_GEMMS}: {when}"
