"""Clocks: is a GPU slowed down by its hardware, or set below the clock of its model?"""

from __future__ import annotations

from cluster.checks import BoardCheck
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.gpu_report import PROBE, GpuReport, judge_each
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict
from cluster.profiles import NO_GPUS, Board
from cluster.profiles.thresholds import Clocks

_REASONS = ("Clocks Event Reasons", "Clocks Throttle Reasons")  # the second before driver 535
_HARDWARE = ("HW Slowdown", "HW Slowdown/HW Thermal Slowdown", "HW Slowdown/HW Power Brake Slowdown")


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Fails on a hardware slowdown and on clocks far below the model's; a software power cap is normal under load."""

    def findings(gpu: GpuReport) -> list[Verdict]:
        return [*_slowdowns(gpu), *(_drift(gpu, board.profile.clocks) if board.profile else [])]

    verdict = judge_each(output, site, findings, "no slowdown on {gpus}")
    if verdict.level == "ok" and board.profile is None and not nvidia_smi.blocked(output, site):
        return Verdict(level="unknown", summary=f"no slowdown, but the clocks themselves: {board.no_profile}")
    return verdict


def _slowdowns(gpu: GpuReport) -> list[Verdict]:
    states = {
        reason.rpartition("/")[2]: gpu.text(*(f"{section}/{reason}" for section in _REASONS)) for reason in _HARDWARE
    }
    if not any(states.values()):
        return [Verdict(level="unknown", summary="does not report the reasons for its clocks")]
    active = [reason for reason, state in states.items() if state == "Active"]
    if active:
        summary = f"is slowed down by its hardware ({', '.join(active)}): look at cooling and power"
        return [Verdict(level="fail", summary=summary, action="isolate")]
    if gpu.text(*(f"{section}/SW Thermal Slowdown" for section in _REASONS)) == "Active":
        return [Verdict(level="warn", summary="is slowed down by its driver because it is hot", action="monitor")]
    return []


def _drift(gpu: GpuReport, clocks: Clocks) -> list[Verdict]:
    """How far the highest clock is below the model's, or the application clock below its own default."""
    highest = gpu.number("Max Clocks/SM")
    if highest is None:
        return [Verdict(level="unknown", summary="does not state its highest SM clock")]
    chosen = gpu.number("Applications Clocks/Graphics")
    usual = gpu.number("Default Applications Clocks/Graphics")
    lowered = usual - chosen if usual is not None and chosen is not None else 0.0
    drift = max(clocks.sm_mhz - highest, lowered)
    if drift < clocks.warn_below_mhz:
        return []
    summary = f"is set {drift:g} MHz below its model's clock of {clocks.sm_mhz if lowered < drift else usual:g} MHz"
    if drift >= clocks.fail_below_mhz:
        return [Verdict(level="fail", summary=f"{summary}; run nvidia-smi -rac and -rgc", action="reset")]
    return [Verdict(level="warn", summary=summary, action="monitor")]


CHECK = BoardCheck(
    source="facebookresearch/gcm, clock_policy (30 and 75 MHz); NVML clocks event reasons",
    probe=lambda site: PROBE,
    judge=judge,
)
