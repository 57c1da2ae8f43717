"""Recovery action: the one that the driver itself reports for a GPU (570 and newer)."""

from __future__ import annotations

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing.gpu_report import PROBE, GpuReport, judge_each
from cluster.probing.probe import Output
from cluster.probing.verdict import Action, Verdict

_ACTIONS: dict[str, Action] = {"Reset": "reset", "Reboot": "reboot"}  # others begin with draining: isolate


def judge(output: Output, site: Site) -> Verdict:
    """Fails for anything but None. ok for a driver that has no such field."""
    if "GPU Recovery Action" not in output.text and "Driver Version" in output.text:
        return Verdict(level="ok", summary="this driver names no recovery actions (570 and newer do)")
    return judge_each(output, site, _findings, "the driver asks for no recovery of {gpus}")


def _findings(gpu: GpuReport) -> list[Verdict]:
    wanted = gpu.entries.get("GPU Recovery Action", "None")
    if wanted in ("None", "N/A"):
        return []
    action = _ACTIONS.get(wanted, "isolate")
    return [Verdict(level="fail", summary=f"needs the recovery action {wanted!r} as its driver reports", action=action)]


CHECK = Check(
    source="NVML, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, driver 570 and newer; GPU Recovery Action of nvidia-smi -q",
    probe=lambda site: PROBE,
    judge=judge,
)
