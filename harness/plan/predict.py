"""Time and memory of a trial on given GPUs, predicted from its settings without running it.

Time is that of the simulated schedule (`harness.predict.step`), the same wherever a trial is predicted. Memory is that
of `engine.checkpoint.planning.memory`, the model that `checkpoint: auto` plans with.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.planning.memory import MemoryModel, RankMemory, memory_of
from engine.checkpoint.planning.memory_settings import memory_settings_of
from engine.checkpoint.planning.plan import ALLOCATED_WITHIN
from engine.combinations import head_dim_unsupported_reason
from engine.measurement import Forecast
from engine.method import method_unsupported_reason
from engine.settings import MAX_HEAD_DIM, WIDEST_HEAD_DIM, TrialSettings, size_in_bytes
from harness.machine.this_machine import Machine
from harness.metrics.hardware import Hardware, HardwareSpeeds, hardware_for, speeds_of
from harness.metrics.throughput import GIB
from harness.plan.unsupported import no_trial_reason
from harness.predict.attention import LayerAttention, attention_problem, context_ranks_of_node, layer_attention
from harness.predict.step import StepTime, step_time
from harness.spec.methods import is_native, method_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one trial; None where nothing is predicted."""

    seconds: float | None  # of a step, or of a call
    gpu_gib: float | None  # allocated on the fullest rank, approximately
    # By its allocator, and no more than the GPU has: one that asks for more frees its cached blocks first.
    reserved_gib: float | None
    host_gib: float | None  # of one rank's process, approximately


def predict(settings: TrialSettings, hardware: Hardware) -> Prediction:
    """Time and memory of a trial on GPUs of this kind."""
    memory = engine_memory(settings)
    time, _ = time_or_reason(settings, hardware)
    return Prediction(
        seconds=time.seconds if time else None,
        gpu_gib=memory.allocated / GIB if memory else None,
        reserved_gib=min(memory.reserved / GIB, hardware.memory_gib) if memory else None,
        host_gib=memory.host / GIB if memory else None,
    )


def memory_is_modelled(settings: TrialSettings) -> bool:
    """Whether the memory model covers a trial: a training trial that the engine runs without tensor parallelism."""
    return settings.task == "train" and is_native(method_named(settings.method)) and settings.tp_size == 1


def engine_memory(settings: TrialSettings) -> RankMemory | None:
    """Memory of one rank of a trial; None where it is not modelled, or the settings are no trial."""
    return memory_of(settings) if memory_is_modelled(settings) and not no_trial_reason(settings) else None


def memory_by_moment(settings: TrialSettings) -> dict[str, float]:
    """GiB allocated on the fullest rank at the moments of a step; empty where `engine_memory` has none."""
    if not memory_is_modelled(settings) or no_trial_reason(settings):
        return {}
    return {name: size / GIB for name, size in MemoryModel(settings).by_moment(memory_settings_of(settings)).items()}


def gpu_room(settings: TrialSettings, hardware: Hardware) -> float:
    """GiB that a rank may allocate: what the GPU has, or the setting `memory` where that is less."""
    asked = size_in_bytes(settings.memory, "memory") / GIB if settings.memory else hardware.memory_gib
    return min(asked, hardware.memory_gib)


def fits_gpu(gpu_gib: float, settings: TrialSettings, hardware: Hardware, plan: Forecast | None) -> bool:
    """Whether so many predicted GiB, and the memory model's error on top, fit the room of a trial; never where the
    planner chose (`plan`) and found nothing that fits."""
    planned = plan is None or plan.fits
    return planned and (1 + ALLOCATED_WITHIN) * gpu_gib <= gpu_room(settings, hardware)


def time_or_reason(
    settings: TrialSettings, hardware: Hardware, *, node_ranks: int | None = None
) -> tuple[StepTime | None, str]:
    """(time by phase, "") or (None, one sentence why there is none). `node_ranks`: see `ranks_per_node`."""
    attention, reason = attention_or_reason(settings, hardware, node_ranks=node_ranks)
    if attention is None:
        return None, reason
    ranks = ranks_per_node(settings, hardware, node_ranks)
    try:
        return step_time(settings, _speeds(settings, hardware), node_ranks=ranks, attention=attention), ""
    except ValueError as error:
        return None, str(error)


def attention_or_reason(
    settings: TrialSettings, hardware: Hardware, *, node_ranks: int | None = None
) -> tuple[LayerAttention | None, str]:
    """What the ranks of a trial resolve to, or None and one sentence why it has no time. Nothing is simulated."""
    if reason := method_unsupported_reason(method_named(settings.method), settings):
        return None, reason
    if settings.dtype != "bf16":
        return None, f"times are predicted in bf16 alone, found dtype {settings.dtype}"
    if reason := _kernel_unknown_reason(settings):
        return None, reason
    ranks = ranks_per_node(settings, hardware, node_ranks)
    try:
        problem = attention_problem(settings, context_ranks_of_node(settings, ranks))
        return layer_attention(settings, problem, _speeds(settings, hardware)), ""
    except ValueError as error:
        return None, str(error)


def _kernel_unknown_reason(settings: TrialSettings) -> str:
    """Why attention runs in a kernel whose speed on GPUs is not known, or ""."""
    model = settings.model
    if settings.task not in ("train", "attention"):
        return ""
    if settings.kernel in ("reference", "cpu"):
        return f"the speed of kernel {settings.kernel} on GPUs is not known; times are predicted of the others"
    if settings.kernel == "auto" and all(
        head_dim_unsupported_reason(kernel, model.head_dim, model.output_dim) for kernel in MAX_HEAD_DIM
    ):
        return (
            f"kernels for GPUs take head dims up to {WIDEST_HEAD_DIM} in multiples of 8, found "
            f"{model.head_dim}; kernel reference would run, whose speed on GPUs is not known"
        )
    return ""


def _speeds(settings: TrialSettings, hardware: Hardware) -> HardwareSpeeds:
    return speeds_of(hardware, None if settings.kernel == "auto" else settings.kernel)


def step_seconds(settings: TrialSettings, machine: Machine, hardware: Hardware | None = None) -> float | None:
    """Seconds of a step on this machine as `burst plan` says; None where it says nothing. `hardware`: by default
    that of the machine's GPU's name."""
    hardware = hardware or hardware_for(machine.gpu_name)
    if hardware is None:
        return None
    ranks = min(ranks_of_node(settings, machine) or settings.world_size, hardware.gpus_per_node)
    time, _ = time_or_reason(settings, hardware, node_ranks=ranks)
    return time.seconds if time else None


def ranks_per_node(settings: TrialSettings, hardware: Hardware, most: int | None = None) -> int:
    """Ranks of a trial on one node of such GPUs: at most `most`, by default as many as the hardware file says."""
    return min(most or hardware.gpus_per_node, settings.world_size)


def ranks_of_node(settings: TrialSettings, machine: Machine | None) -> int | None:
    """Ranks of a trial on each of these hosts; None where there are none, or the ranks do not spread evenly."""
    nodes = machine.nodes_for(settings.world_size) if machine else None
    return settings.world_size // nodes if nodes else None
