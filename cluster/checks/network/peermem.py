"""Peer memory: can the network adapters read GPU memory directly?"""

from __future__ import annotations

from cluster.checks import BoardCheck
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict
from cluster.profiles import NO_GPUS, Board

PROBE = Probe(
    script="""
awk '$1 == "nvidia_peermem" || $1 == "nv_peer_mem" { print "module " $1 }' /proc/modules
printf 'hcas %s\\n' "$(ls /sys/class/infiniband 2>/dev/null | wc -l)"
"""
)


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Warns when a node with GPUs and adapters has neither nvidia_peermem nor its predecessor loaded."""
    said = dict(line.partition(" ")[::2] for line in output.text.splitlines())
    if not said.get("hcas", "").isdigit():
        return Verdict(level="unknown", summary=f"the kernel's modules cannot be listed ({output.first_line})")
    if not int(said["hcas"]) or not board.count:
        return Verdict(level="ok", summary="no GPU and adapter to join")
    if "module" in said:
        return Verdict(level="ok", summary=f"{said['module']} is loaded")
    return Verdict(
        level="warn",
        summary="nvidia_peermem is not loaded; run modprobe nvidia_peermem unless this kernel uses DMA-BUF",
        action="monitor",
    )


CHECK = BoardCheck(source="NVIDIA GPUDirect RDMA documentation; lsmod", probe=lambda site: PROBE, judge=judge)
