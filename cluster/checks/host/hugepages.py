"""Huge pages: does the kernel reserve memory for huge pages that no program uses?"""

from __future__ import annotations

import re

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict

WASTE_PERCENT = 10.0
PROBE = Probe(
    script="""
grep -E '^(MemTotal|HugePages_Total|HugePages_Free|Hugepagesize):' /proc/meminfo
printf 'transparent %s\\n' "$(cat /sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null)"
"""
)
_ROW = re.compile(r"^(\w+):\s+(\d+)", re.MULTILINE)
_CHOSEN = re.compile(r"^transparent .*\[(\w+)\]", re.MULTILINE)


def judge(output: Output, site: Site) -> Verdict:
    """Warns where reserved pages that are free take more than a tenth of the host's memory."""
    found = {name: int(value) for name, value in _ROW.findall(output.text)}
    if not found.get("MemTotal"):
        return Verdict(level="unknown", summary=f"/proc/meminfo states no memory ({output.first_line})")
    mode = _CHOSEN.search(output.text)
    transparent = mode[1] if mode else "not in this kernel"
    free_kib = found.get("HugePages_Free", 0) * found.get("Hugepagesize", 0)
    percent = 100 * free_kib / found["MemTotal"]
    facts = {"transparent": transparent, "reserved": found.get("HugePages_Total", 0)}
    if percent > WASTE_PERCENT:
        summary = (
            f"{free_kib / 2**20:.0f} GiB, {percent:.0f}% of memory, are reserved as huge pages that nothing uses; "
            "lower vm.nr_hugepages"
        )
        return Verdict(level="warn", summary=summary, action="monitor", facts=facts)
    summary = f"{facts['reserved']} huge pages reserved, transparent ones: {transparent}"
    return Verdict(level="ok", summary=summary, facts=facts)


CHECK = Check(
    source="/proc/meminfo, the kernel's hugetlbpage document; a tenth is ours", probe=lambda site: PROBE, judge=judge
)
