"""Row remapping: does a GPU wait for a reset to replace a bad row of its memory, or has it run out of spare ones?"""

from __future__ import annotations

from cluster.checks import Check, Rise
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.gpu_report import PROBE, GpuReport, judge_each, parse
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict, with_facts


def judge(output: Output, site: Site) -> Verdict:
    """Fails when a remapping failed, warns while one is pending: it happens at the next reset."""
    verdict = judge_each(output, site, _findings, "no row remapping failed or pending on {gpus}")
    if nvidia_smi.blocked(output, site):
        return verdict
    counters = {
        f"{gpu.bus_id} remapped_rows": int(
            (gpu.number("Remapped Rows/Correctable Error") or 0)
            + (gpu.number("Remapped Rows/Uncorrectable Error") or 0)
        )
        for gpu in parse(output.text)[1]
    }
    return with_facts(verdict, counters=counters)


def _findings(gpu: GpuReport) -> list[Verdict]:
    failed = gpu.text("Remapped Rows/Remapping Failure Occurred")
    pending = gpu.text("Remapped Rows/Pending")
    if failed is None or pending is None:
        return [Verdict(level="unknown", summary="does not report remapped rows; it or its driver is too old")]
    if failed != "No":
        return [Verdict(level="fail", summary="could not replace a bad row: return it", action="isolate")]
    if pending != "No":
        return [Verdict(level="warn", summary="replaces a bad row at its next reset", action="reset")]
    return []


CHECK = Check(
    source="NVIDIA GPU memory error management; pending as a warning is this project's judgement",
    probe=lambda site: PROBE,
    judge=judge,
    rise=Rise(level="warn", action="monitor", meaning="GPU memory is wearing out"),
)
