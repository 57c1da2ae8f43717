"""CPU governor: do the cores of a node with GPUs keep their clock?"""

from __future__ import annotations

import re

from cluster.checks import BoardCheck
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict
from cluster.profiles import NO_GPUS, Board

PROBE = Probe(
    script="""
cat /sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor 2>/dev/null | sort | uniq -c
echo end
"""
)
_ROW = re.compile(r"\s*(\d+) ([a-z_]+)")


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Warns when cores of a node with GPUs follow another governor than performance."""
    lines = output.text.splitlines()
    if "end" not in lines:
        return Verdict(level="unknown", summary=f"the governors cannot be read ({output.first_line})")
    cores = {match[2]: int(match[1]) for line in lines if (match := _ROW.fullmatch(line))}
    if not cores:
        return Verdict(level="ok", summary="this kernel leaves the clock to the processor or the hypervisor")
    listed = ", ".join(f"{count} x {name}" for name, count in sorted(cores.items()))
    if board.count and set(cores) != {"performance"}:
        summary = f"governors are {listed}; expected performance: cpupower frequency-set -g performance"
        return Verdict(level="warn", summary=summary, action="monitor")
    return Verdict(level="ok", summary=f"governors: {listed}")


CHECK = BoardCheck(source="cpufreq of the kernel; NVIDIA dgxc-benchmarking", probe=lambda site: PROBE, judge=judge)
