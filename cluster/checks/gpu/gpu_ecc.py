"""ECC: is GPU memory corrected, and did any error get through?"""

from __future__ import annotations

from cluster.checks import BoardCheck, Rise
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.gpu_report import PROBE, GpuReport, judge_each, parse
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict, with_facts
from cluster.profiles import NO_GPUS, Board


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Fails on uncorrected errors since the driver was loaded, on disabled ECC, beyond the vendor's life limit and on
    memory that cannot be repaired; warns while a repair waits for a reset."""

    def findings(gpu: GpuReport) -> list[Verdict]:
        mode = gpu.text("ECC Mode/Current")
        if mode is None:
            return [Verdict(level="unknown", summary="does not say whether ECC is on")]
        if mode != "Enabled":
            return [
                Verdict(
                    level="fail",
                    summary=f"has ECC {mode.lower()}; run nvidia-smi -e 1 and reset it",
                    action="reset",
                )
            ]
        found = []
        if volatile := _uncorrectable(gpu, "Volatile"):
            found.append(
                Verdict(level="fail", summary=f"has {volatile} uncorrected errors since it was started", action="reset")
            )
        # Stated by driver 580, and absent before.
        if gpu.text("ECC Errors/Unrepairable Memory") == "Yes":
            found.append(
                Verdict(level="fail", summary="has memory that cannot be repaired: return it", action="isolate")
            )
        if waiting := [part for part in ("Channel", "TPC") if gpu.text(f"ECC Errors/{part} Repair Pending") == "Yes"]:
            summary = f"repairs itself at its next reset ({' and '.join(waiting)} repair is pending)"
            found.append(Verdict(level="warn", summary=summary, action="reset"))
        sram = _uncorrectable(gpu, "Aggregate", "SRAM")
        if gpu.text("ECC Errors/Aggregate/SRAM Threshold Exceeded") == "Yes":
            found.append(
                Verdict(
                    level="fail", summary="has more SRAM errors than its vendor allows: return it", action="isolate"
                )
            )
        elif sram and board.profile is None:
            found.append(Verdict(level="unknown", summary=f"has {sram} SRAM errors over its life; {board.no_profile}"))
        elif board.profile and sram > board.profile.ecc.return_above_sram_errors:
            limit = board.profile.ecc.return_above_sram_errors
            found.append(
                Verdict(
                    level="fail",
                    summary=f"has {sram} uncorrected SRAM errors over its life; above {limit} its vendor takes it back",
                    action="isolate",
                )
            )
        return found

    verdict = judge_each(output, site, findings, "ECC on and no uncorrected error on {gpus}")
    if nvidia_smi.blocked(output, site):
        return verdict
    counters = {}
    for gpu in parse(output.text)[1]:
        counters[f"{gpu.bus_id} uncorrected"] = _uncorrectable(gpu, "Aggregate")
        counters[f"{gpu.bus_id} corrected"] = _sum(gpu, "Aggregate", " Correctable")
    return with_facts(verdict, counters=counters)


def _uncorrectable(gpu: GpuReport, period: str, memory: str = "") -> int:
    return _sum(gpu, period, "Uncorrectable", memory)


def _sum(gpu: GpuReport, period: str, kind: str, memory: str = "") -> int:
    """Counts whose name holds `kind`; drivers split uncorrectable SRAM errors by how they were found, or do not."""
    counts = gpu.below(f"ECC Errors/{period}")
    return sum(int(value) for name, value in counts.items() if kind in name and memory in name and value.isdigit())


CHECK = BoardCheck(
    source="facebookresearch/gcm; stas00/ml-engineering (more than 4 SRAM errors: return)",
    probe=lambda site: PROBE,
    judge=judge,
    rise=Rise(level="warn", action="monitor", meaning="GPU memory is wearing out", least=1),
)
