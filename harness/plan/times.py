"""The time of a trial on given GPUs, for everything that plans: the same answer wherever it is asked."""

from __future__ import annotations

from engine.method import method_unsupported_reason
from engine.settings import TrialSettings
from harness.machine.this_machine import Machine
from harness.metrics.hardware import Hardware, HardwareSpeeds, hardware_for, speeds_of
from harness.predict.attention import LayerAttention, attention_problem, context_ranks_of_node, layer_attention
from harness.predict.step import StepTime, step_time
from harness.spec.methods import method_named


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
    ranks = ranks_per_node(settings, hardware, node_ranks)
    try:
        problem = attention_problem(settings, context_ranks_of_node(settings, ranks))
        return layer_attention(settings, problem, _speeds(settings, hardware)), ""
    except ValueError as error:
        return None, str(error)


def _speeds(settings: TrialSettings, hardware: Hardware) -> HardwareSpeeds:
    return speeds_of(hardware, None if settings.kernel == "auto" else settings.kernel)


def step_seconds(settings: TrialSettings, machine: Machine, hardware: Hardware | None = None) -> float | None:
    """Seconds of a step on this machine as `burst predict` says; None where it says nothing. `hardware`: by default
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
