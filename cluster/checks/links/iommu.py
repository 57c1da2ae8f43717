"""IOMMU: does it translate the addresses of GPUs and adapters, which sends direct transfers through the processor?"""

from __future__ import annotations

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing import kernel_files
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict

PROBE = Probe(
    script=kernel_files.GPUS
    + kernel_files.MACHINE
    + """
for device in $(gpus); do
    value "$device/iommu_group/type"; printf 'gpu %s %s\\n' "${device##*/}" "$v"
done
for adapter in /sys/class/infiniband/*; do
    [ -e "$adapter/device" ] || continue
    value "$adapter/device/iommu_group/type"; printf 'adapter %s %s\\n' "${adapter##*/}" "$v"
done
echo end
"""
)


def judge(output: Output, site: Site) -> Verdict:
    """Warns where the IOMMU translates the addresses of a GPU or adapter; not in a virtual machine, or without both."""
    lines = output.text.splitlines()
    if "end" not in lines:
        return Verdict(level="unknown", summary=f"the IOMMU's groups cannot be read ({output.first_line})")
    rows = [line.split(" ") for line in lines if line.startswith(("gpu ", "adapter "))]
    if {row[0] for row in rows} != {"gpu", "adapter"}:
        return Verdict(level="ok", summary="no GPU and adapter to join")
    if "machine virtual" in lines:
        return Verdict(level="ok", summary="a virtual machine, whose host decides")
    translated = [printable(row[1]) for row in rows if len(row) == 3 and row[2].startswith("DMA")]
    if translated:
        summary = f"the IOMMU translates addresses of {', '.join(translated)}; boot with iommu=pt, or turn it off"
        return Verdict(level="warn", summary=summary, action="monitor")
    return Verdict(level="ok", summary=f"passed through, or off, for {len(rows)} GPUs and adapters")


CHECK = Check(
    source="NCCL user guide, troubleshooting (IO virtualization); sysfs-kernel-iommu_groups of the kernel",
    probe=lambda site: PROBE,
    judge=judge,
)
