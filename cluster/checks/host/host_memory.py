"""Host memory in use: offloading and data loading need room beside running programs."""

from __future__ import annotations

import re

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict

_ROW = re.compile(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", re.MULTILINE)


def probe(site: Site) -> Probe:
    """The kernel's own account of memory."""
    return Probe(script="cat /proc/meminfo")


def judge(output: Output, site: Site) -> Verdict:
    """Warns at the site's percentage. In use is the total less the available memory."""
    kib = {name: int(value) for name, value in _ROW.findall(output.text)}
    if not kib.get("MemTotal") or "MemAvailable" not in kib:
        return Verdict(level="unknown", summary=f"/proc/meminfo does not say how much is free ({output.first_line})")
    total_gib = kib["MemTotal"] / 2**20
    available_gib = kib["MemAvailable"] / 2**20
    percent = 100 * (1 - available_gib / total_gib)
    summary = f"host memory {percent:.0f}% in use, {available_gib:.0f} of {total_gib:.0f} GiB available"
    facts = {"percent": round(percent, 1), "available_gib": round(available_gib, 1), "total_gib": round(total_gib, 1)}
    limit = site.host_memory.warn_percent
    if percent >= limit:
        return Verdict(level="warn", summary=f"{summary}; the site warns at {limit:g}%", action="monitor", facts=facts)
    return Verdict(level="ok", summary=summary, facts=facts)


CHECK = Check(source="/proc/meminfo, proc(5)", probe=probe, judge=judge)
