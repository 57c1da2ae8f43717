"""Fabric registration: has every GPU joined its NVSwitch fabric? Hopper boards report it."""

from __future__ import annotations

from cluster.checks import BoardCheck
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.check_result import CheckResult
from cluster.probing.gpu_report import PROBE, GpuReport, judge_each
from cluster.probing.probe import Output
from cluster.profiles import NO_GPUS, Board


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> CheckResult:
    """Fails when a GPU of a board with NVSwitches has not joined. A lone GPU has nothing to join."""
    blocked = nvidia_smi.blocked(output, site)
    if blocked:
        return blocked
    if board.is_lone(site.gpus.count):
        return CheckResult(level="ok", summary="one GPU, so no fabric to join")
    if board.profile is None:
        return CheckResult(level="unknown", summary=board.no_profile)
    if not board.profile.fabric.registration:
        return CheckResult(level="ok", summary=f"{board.name} does not register with a fabric")
    return judge_each(output, site, _findings, "{gpus} have joined their fabric")


def _findings(gpu: GpuReport) -> list[CheckResult]:
    state, status = gpu.text("Fabric/State"), gpu.text("Fabric/Status")
    if state is None:
        return [CheckResult(level="unknown", summary="does not state whether it has joined the fabric")]
    if state != "Completed":
        summary = f"has not joined the NVSwitch fabric (state {state}); look at nvidia-fabricmanager"
        return [CheckResult(level="fail", summary=summary, action="reboot")]
    if status not in (None, "Success"):
        return [CheckResult(level="fail", summary=f"failed to join the NVSwitch fabric ({status})", action="reboot")]
    return []


CHECK = BoardCheck(
    source="nvidia-smi manual, Fabric; NVIDIA Fabric Manager user guide", probe=lambda site: PROBE, judge=judge
)
