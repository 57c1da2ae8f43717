"""Driver, CUDA and VBIOS versions: the same on all GPUs of a node; cluster/discovery/drift.py compares the nodes."""

from __future__ import annotations

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.gpu_report import PROBE, parse
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict, with_facts


def judge(output: Output, site: Site) -> Verdict:
    """Fails when GPUs of one model carry different VBIOS versions."""
    blocked = nvidia_smi.blocked(output, site)
    if blocked:
        return blocked
    node, gpus = parse(output.text)
    driver, cuda = node.get("Driver Version"), node.get("CUDA Version")
    by_model: dict[str, set[str]] = {}
    for gpu in gpus:
        vbios = gpu.text("VBIOS Version")
        if vbios:
            by_model.setdefault(gpu.text("Product Name") or "GPU", set()).add(vbios)
    if not driver or not gpus or not by_model:
        return Verdict(level="unknown", summary=f"nvidia-smi -q states no versions ({output.first_line})")
    versions = {model: sorted(found) for model, found in sorted(by_model.items())}
    several = {model: found for model, found in versions.items() if len(found) > 1}
    if several:
        listed = "; ".join(f"{model}: {', '.join(found)}" for model, found in several.items())
        verdict = Verdict(level="fail", summary=f"GPUs of one model differ in VBIOS ({listed})", action="isolate")
    else:
        listed = ", ".join(found[0] for found in versions.values())
        verdict = Verdict(level="ok", summary=f"driver {driver}, CUDA {cuda or 'not stated'}, VBIOS {listed}")
    return with_facts(verdict, driver=driver, cuda=cuda, vbios=versions)


CHECK = Check(
    source="nvidia-smi -q; a VBIOS of its own fails, this project's list of checks",
    probe=lambda site: PROBE,
    judge=judge,
)
