"""Fabric registration: has every GPU joined its NVSwitch fabric? Hopper boards report it."""

from __future__ import annotations

from cluster.checks import BoardCheck
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.gpu_report import PROBE, GpuReport, judge_each
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict
from cluster.profiles import NO_GPUS, Board


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Fails when a GPU of a board with NVSwitches has not joined. A lone GPU has nothing to join."""
    blocked = nvidia_smi.blocked(output, site)
    if blocked:
        return blocked
    if board.is_lone(site.gpus.count):
        return Verdict(level="ok", summary="one GPU, so no fabric to join")
    if board.profile is None:
        return Verdict(level="unknown", summary=board.no_profile)
    if not board.profile.fabric.registration:
        return Verdict(level="ok", summary=f"{board.name} does not register with a fabric")
    return judge_each(output, site, _findings, "{gpus} have joined their fabric")


def _findings(gpu: GpuReport) -> list[Verdict]:
    state, status = gpu.text("Fabric/State"), gpu.text("Fabric/Status")
    if state is None:
        return [Verdict(level="unknown", summary="does not state whether it has joined the fabric")]
    if state != "Completed":
        summary = f"has not joined the NVSwitch fabric (state {state}); look at nvidia-fabricmanager"
        return [Verdict(level="fail", summary=summary, action="reboot")]
    if status not in (None, "Success"):
        return [Verdict(level="fail", summary=f"failed to join the NVSwitch fabric ({status})", action="reboot")]
    return []


CHECK = BoardCheck(
    source="nvidia-smi manual, Fabric; NVIDIA Fabric Manager user guide", probe=lambda site: PROBE, judge=judge
)
