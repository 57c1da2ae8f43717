"""C-states: may the cores of a node with GPUs sleep so deeply that waking them takes longer than a message?"""

from __future__ import annotations

import re

from cluster.checks import BoardCheck
from cluster.inventory.site import Site
from cluster.probing import kernel_files
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict
from cluster.profiles import NO_GPUS, Board

SLOW_MICROSECONDS = 50
PROBE = Probe(
    script=kernel_files.VALUE
    + """
for state in /sys/devices/system/cpu/cpu[0-9]*/cpuidle/state*; do
    [ -d "$state" ] || continue
    value "$state/name"; name=$v
    value "$state/latency"; latency=$v
    value "$state/disable"; printf 'state %s|%s|%s\\n' "$latency" "$v" "$name"
done | sort | uniq -c
echo end
"""
)
_ROW = re.compile(r"\s*(\d+) state (\d+)\|0\|(.+)")  # 0: not disabled


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Warns where a state that takes more than 50 us to leave is allowed on a node with GPUs."""
    lines = output.text.splitlines()
    if "end" not in lines:
        return Verdict(level="unknown", summary=f"the cores' idle states cannot be read ({output.first_line})")
    allowed = {match[3]: int(match[2]) for line in lines if (match := _ROW.fullmatch(line))}
    if not allowed:
        return Verdict(level="ok", summary="this kernel leaves idle states to the processor or the hypervisor")
    deep = {name: latency for name, latency in allowed.items() if latency > SLOW_MICROSECONDS}
    if deep and board.count:
        listed = ", ".join(f"{name} ({latency} us)" for name, latency in sorted(deep.items()))
        summary = f"cores may sleep in {listed}; expected at most {SLOW_MICROSECONDS} us: cpupower idle-set -D 50"
        return Verdict(level="warn", summary=summary, action="monitor")
    return Verdict(level="ok", summary=f"deepest idle state allowed: {max(allowed.values())} us")


CHECK = BoardCheck(
    source="cpuidle of the kernel; 50 us is this project's judgement", probe=lambda site: PROBE, judge=judge
)
