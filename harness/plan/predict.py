"""Time and memory of a trial on given GPUs, predicted from its settings without running it.

Time is a lower bound: all matrix products and attention, repeated ones included, at the speeds measured on this
hardware in bf16, without waiting, launches and elementwise work.

Memory is that of `engine.checkpoint.planning.memory`, the model that `checkpoint: auto` plans with.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.planning.memory import RankMemory, memory_of
from engine.settings import TrialSettings
from harness.metrics.ceilings import kernel_bound_seconds
from harness.metrics.flops import work_of
from harness.metrics.hardware import Hardware
from harness.metrics.throughput import GIB
from harness.plan.checkpointing import is_native
from harness.spec.methods import method_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one trial; None where nothing is predicted."""

    seconds: float | None  # of a step, or of a call: a lower bound
    gpu_gib: float | None  # allocated on the fullest rank, approximately
    reserved_gib: float | None  # by its allocator
    host_gib: float | None  # of one rank's process, approximately


def predict(settings: TrialSettings, hardware: Hardware) -> Prediction:
    """Time and memory of a trial on GPUs of this kind."""
    memory = engine_memory(settings)
    return Prediction(
        seconds=_seconds(settings, hardware),
        gpu_gib=memory.allocated / GIB if memory else None,
        reserved_gib=memory.reserved / GIB if memory else None,
        host_gib=memory.host / GIB if memory else None,
    )


def engine_memory(settings: TrialSettings) -> RankMemory | None:
    """Of one rank of a training trial that the engine runs; other systems and tasks hold what they hold."""
    native = is_native(method_named(settings.method))
    return memory_of(settings) if settings.task == "train" and native else None


def _seconds(settings: TrialSettings, hardware: Hardware) -> float | None:
    kernels = [settings.kernel] if settings.kernel != "auto" else list(hardware.kernel_ceilings)
    if settings.dtype != "bf16" or not kernels:
        return None
    work = work_of(settings)
    once = kernel_bound_seconds(work, hardware, kernels[0])  # nothing repeated
    if once is None:
        return None
    again = work.recomputed_layers / hardware.gemm_tflops if hardware.gemm_tflops else 0.0  # attention repeats none
    if work.recomputed_attention:
        again += work.recomputed_attention / hardware.kernel_ceilings[kernels[0]]["forward"]
    return (once + again / 1e12) / settings.world_size
