"""Temperature and power: is a GPU beyond the limits that it states itself?"""

from __future__ import annotations

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing.gpu_report import PROBE, GpuReport, judge_each
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict

_POWER = ("GPU Power Readings", "Power Readings")  # the second before driver 525
_POWER_TOLERANCE = 1.05  # readings of a GPU that keeps its limit go around it


def judge(output: Output, site: Site) -> Verdict:
    """Fails from the device's own slowdown temperature or above its highest power; warns when its power is capped."""
    return judge_each(output, site, _findings, "temperature and power within the limits of {gpus}")


def _findings(gpu: GpuReport) -> list[Verdict]:
    return [*_temperature(gpu), *_power(gpu)]


def _temperature(gpu: GpuReport) -> list[Verdict]:
    """Hopper states the distance to its limits (T.Limit), older boards the limits themselves."""
    current = gpu.number("Temperature/GPU Current Temp")
    distance = gpu.number("Temperature/GPU T.Limit Temp")
    slowdown_distance = gpu.number("Temperature/GPU Slowdown T.Limit Temp")
    slowdown = gpu.number("Temperature/GPU Slowdown Temp")
    if current is None or (slowdown is None and (distance is None or slowdown_distance is None)):
        return [Verdict(level="unknown", summary="does not state its temperature or its slowdown limit")]
    if distance is not None and slowdown_distance is not None:
        hot, limit = distance <= slowdown_distance, current + distance - slowdown_distance
    else:
        assert slowdown is not None
        hot, limit = current >= slowdown, slowdown
    found = []
    if hot:
        summary = f"is at {current:g} C, its slowdown limit is {limit:g} C: look at cooling"
        found.append(Verdict(level="fail", summary=summary, action="isolate"))
    memory, highest = gpu.number("Temperature/Memory Current Temp"), gpu.number("Temperature/Memory Max Operating Temp")
    if memory is not None and highest is not None and memory > highest:
        summary = f"has memory at {memory:g} C, at most {highest:g} C is allowed: look at cooling"
        found.append(Verdict(level="fail", summary=summary, action="isolate"))
    return found


def _power(gpu: GpuReport) -> list[Verdict]:
    def watts(*names: str) -> float | None:
        return gpu.number(*(f"{section}/{name}" for section in _POWER for name in names))

    draw = watts("Average Power Draw", "Power Draw", "Instantaneous Power Draw")
    limit, usual = watts("Current Power Limit", "Enforced Power Limit", "Power Limit"), watts("Default Power Limit")
    highest = watts("Max Power Limit")
    if draw is None or limit is None:
        return [Verdict(level="unknown", summary="does not state its power or its limit")]
    if highest is not None and draw > highest * _POWER_TOLERANCE:
        return [
            Verdict(level="fail", summary=f"draws {draw:g} W, its highest limit is {highest:g} W", action="isolate")
        ]
    if usual is not None and limit < usual:
        return [Verdict(level="warn", summary=f"is capped at {limit:g} W, by default {usual:g} W", action="monitor")]
    return []


CHECK = Check(source="NVML temperature and power limits of the device itself", probe=lambda site: PROBE, judge=judge)
