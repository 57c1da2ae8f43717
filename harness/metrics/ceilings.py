"""The kernels' speeds behind a trial's ceiling, and where and when each was measured.

GEMMs are the trial's own where it measured them: a training trial on GPUs does, after its last step. Otherwise, and for
the attention kernel always, they are those of the hardware file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.measurement import Extra
from engine.settings import ModelShape
from engine.tasks.products import DIRECTIONS, matrix_products
from harness.metrics.flops import StepFlops, seconds_at_kernel_speed
from harness.metrics.hardware import Hardware
from harness.records.record import Record

NO_ATTENTION = {"forward": 1.0, "backward": 1.0}  # of work without any: no figure depends on it


OWN_GEMMS = "GEMMs of this trial's shapes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """Least seconds of one GPU for all the work of a step, and a sentence on the speeds behind it."""

    seconds: float
    source: str


def ceiling_of(record: Record, work: StepFlops, hardware: Hardware) -> Ceiling | None:
    """The ceiling of an ok record; None where a speed was measured neither in the trial nor for this hardware, and for
    attention alone on one rank: that is the kernel itself, whose speed is no share of its speed at another length."""
    if record.settings.task == "attention" and record.settings.cp_size == 1:
        return None
    measured = record.measurement
    assert measured is not None, "an ok record has a measurement"
    own = own_gemm_tflops(record.settings.model, measured.extra.get("gemm_tflops"))
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
