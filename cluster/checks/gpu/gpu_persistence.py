"""Persistence mode: does the driver stay loaded between programs?"""

from __future__ import annotations

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing.gpu_report import PROBE, GpuReport, judge_each
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict


def judge(output: Output, site: Site) -> Verdict:
    """Warns where it is off: every first program then waits for the driver, and settings of the GPU are lost."""
    return judge_each(output, site, _findings, "persistence mode is on for {gpus}")


def _findings(gpu: GpuReport) -> list[Verdict]:
    mode = gpu.text("Persistence Mode")
    if mode == "Enabled":
        return []
    if mode is None:
        return [Verdict(level="unknown", summary="does not say whether persistence mode is on")]
    summary = f"has persistence mode {mode.lower()}; start nvidia-persistenced, or run nvidia-smi -pm 1"
    return [Verdict(level="warn", summary=summary, action="monitor")]


CHECK = Check(source="NVIDIA driver persistence; Azure/azurehpc-health-checks", probe=lambda site: PROBE, judge=judge)
