"""`checkpoint: auto` of a trial on a machine: its budget, and the speeds it is planned with."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from engine.checkpoint.planning.cost import GpuSpeeds
from engine.checkpoint.planning.memory import GIB
from engine.checkpoint.planning.plan import Budget, fits_somehow, planned
from engine.measurement import Forecast
from engine.settings import Kernel, TrialSettings, size_in_bytes
from harness.machine.this_machine import Machine
from harness.metrics.hardware import Hardware, hardware_for, speeds_of
from harness.metrics.throughput import TERA
from harness.plan.predict import step_seconds
from harness.plan.unsupported import no_trial_reason
from harness.records.forecasts import NO_CORRECTION, Correction

# GiB of a GPU that CUDA and NCCL take outside the allocator; used for a GPU without a hardware file.
_CONTEXT_GIB = 1.5
# Of host memory per GPU, where a GPU is only asked about and no host is known: that of hosts with 2 TiB and eight GPUs.
_ASSUMED_HOST_GIB = 256
HOST_SHARE = 0.9  # of the host's memory, beside GPUs
_CPU_SHARE = 0.5  # of it, where ranks compute on it: data, other processes and the file cache need some


# A search takes seconds, and a command may ask for the same one again: for a plan and for its forecasts.
_planned = lru_cache(maxsize=256)(planned)


def with_plan(
    settings: TrialSettings,
    machine: Machine,
    correction: Correction = NO_CORRECTION,
    hardware: Hardware | None = None,
) -> tuple[TrialSettings, Forecast | None]:
    """The settings with the values that the planner chooses on this machine, and its forecast; None, and the settings
    as they are, where nothing is left open or the sizes make no trial. `hardware`: by default that of the machine's
    GPU's name."""
    if not _plans(settings):
        return settings, None
    hardware = hardware or hardware_for(machine.gpu_name)
    chosen, forecast = _planned(
        settings,
        budget_of(settings, machine, hardware),
        planner_speeds(settings.kernel, hardware),
        correction=correction.factor,
        correction_source=correction.source,
    )
    return chosen, replace(forecast, step_seconds=step_seconds(chosen, machine, hardware))


def plan_fits(settings: TrialSettings, machine: Machine, hardware: Hardware) -> bool | None:
    """Whether `with_plan` would find something that fits, in less time; None where it chooses nothing."""
    return fits_somehow(settings, budget_of(settings, machine, hardware)) if _plans(settings) else None


def _plans(settings: TrialSettings) -> bool:
    """Whether something is left open, and the sizes make a trial."""
    return bool(settings.planned) and no_trial_reason(settings) is None


def budget_of(settings: TrialSettings, machine: Machine, hardware: Hardware | None) -> Budget:
    """Memory of one rank: the GPU's own or the setting's, and a rank's share of its host's."""
    ranks = -(-settings.world_size // (machine.nodes_for(settings.world_size) or 1))
    share = machine.memory_gib * GIB / ranks if machine.memory_gib else _ASSUMED_HOST_GIB * GIB
    asked = size_in_bytes(settings.memory, "memory") if settings.memory else None
    shared = f", shared by {ranks} ranks" if ranks > 1 else ""
    if machine.device == "cpu":  # all is host memory
        host, source = (float(asked), "memory") if asked else (_CPU_SHARE * share, f"half of the host's{shared}")
        if settings.host_bytes < host:
            host, source = settings.host_bytes, "host_memory"
        return Budget(gpu=None, host=host, source=source)
    own_share = f"90% of the host's{shared}" if machine.memory_gib else "assumed; host_memory sets it"
    host, host_source = HOST_SHARE * share, own_share
    if settings.host_bytes < host or (settings.host_memory and not machine.memory_gib):
        host, host_source = settings.host_bytes, "host_memory"
    if hardware is not None:
        own, source = hardware.memory_gib * GIB, "the GPU's own"
    elif machine.gpu_memory_gib:
        own, source = (machine.gpu_memory_gib - _CONTEXT_GIB) * GIB, "the GPU's own"
    else:
        own, source = float("inf"), "unknown"
    if asked is not None and asked < own:
        own, source = float(asked), "memory"
    elif asked is not None and asked > own:
        source += f", less than memory: {settings.memory}"
    return Budget(gpu=own, host=host, source=source, host_source=host_source)


def planner_speeds(kernel: Kernel, hardware: Hardware | None) -> GpuSpeeds:
    """The speeds of recomputation, sums and copies for the planner: those of the prediction, for long tiles."""
    if hardware is None:
        return GpuSpeeds()
    found = speeds_of(hardware, None if kernel == "auto" else kernel)
    return GpuSpeeds(
        gemm=found.gemm_tflops * TERA,
        float8=found.float8_tflops * TERA,
        attention=found.attention_forward_tflops * TERA,
        memory=found.memory_gib * GIB,
        host_link=found.host_gib * GIB,
    )
