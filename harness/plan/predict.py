"""What a trial would take on given GPUs, without running it: time from below, memory about."""

from __future__ import annotations

from dataclasses import dataclass

from engine.settings import TrialSettings
from harness.metrics.flops import work_of
from harness.metrics.hardware import Hardware
from harness.metrics.throughput import kernel_bound_seconds
from harness.plan.memory_model import GIB, training_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one trial; None where nothing is known to predict from."""

    seconds: float | None  # of a step, or of a call: no less than this
    gpu_gib: float | None  # the fullest rank's, about
    host_gib: float | None  # one rank's process, about


def predict(settings: TrialSettings, hardware: Hardware) -> Prediction:
    """A trial on GPUs of this kind.

    Time is that of all matrix products and attention, repeated ones included, at the hardware measured on this hardware
    in bf16: what is not hidden, launches and everything elementwise come on top. Memory is `harness.plan.memory_model`'s.
    """
    memory = training_memory(settings) if settings.task == "train" else None
    return Prediction(
        seconds=_seconds(settings, hardware),
        gpu_gib=memory.gpu / GIB if memory else None,
        host_gib=memory.host / GIB if memory else None,
    )


def _seconds(settings: TrialSettings, hardware: Hardware) -> float | None:
    kernels = [settings.kernel] if settings.kernel != "auto" else list(hardware.kernel_ceilings)
    if settings.dtype != "bf16" or not kernels:
        return None
    work = work_of(settings)
    once = kernel_bound_seconds(work, hardware, kernels[0])  # nothing repeated
    if once is None:
        return None
    assert hardware.gemm_tflops is not None  # or `once` would be None
    again = work.recomputed_layers / hardware.gemm_tflops
    if work.recomputed_attention:
        again += work.recomputed_attention / hardware.kernel_ceilings[kernels[0]]["forward"]
    return (once + again / 1e12) / settings.world_size
