"""NUMA balancing: does the kernel move pages while GPUs copy from them?"""

from __future__ import annotations

from cluster.checks import BoardCheck
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict
from cluster.profiles import NO_GPUS, Board

PROBE = Probe(
    script="""
value=absent
[ -r /proc/sys/kernel/numa_balancing ] && read -r value </proc/sys/kernel/numa_balancing
printf 'numa_balancing %s\\n' "$value"
"""
)


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Warns when it is on at a node with GPUs."""
    tag, _, value = output.text.strip().partition(" ")
    if tag != "numa_balancing" or not (value.isdigit() or value == "absent"):
        return Verdict(level="unknown", summary=f"the setting cannot be read ({output.first_line})")
    if value in ("0", "absent"):
        return Verdict(level="ok", summary="off" if value == "0" else "this kernel has none")
    if board.count:
        summary = "on, which interrupts host copies; run sysctl kernel.numa_balancing=0"
        return Verdict(level="warn", summary=summary, action="monitor")
    return Verdict(level="ok", summary="on, which matters to no GPU here")


CHECK = BoardCheck(
    source="sysctl kernel.numa_balancing; NVIDIA dgxc-benchmarking", probe=lambda site: PROBE, judge=judge
)
