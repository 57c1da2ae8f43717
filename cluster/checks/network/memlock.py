"""Locked memory: may a process of this user register enough of it with the network adapters?"""

from __future__ import annotations

from cluster.checks import Check
from cluster.files.errors import quantity
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict

LEAST_GIB = 16.0
PROBE = Probe(
    script="""
printf 'memlock %s\\n' "$(ulimit -l)"
printf 'hcas %s\\n' "$(ls /sys/class/infiniband 2>/dev/null | wc -l)"
"""
)


def judge(output: Output, site: Site) -> Verdict:
    """Warns below 16 GiB where there is an adapter to register memory with."""
    said = dict(line.partition(" ")[::2] for line in output.text.splitlines())
    limit, hcas = said.get("memlock", ""), said.get("hcas", "")
    if not (limit == "unlimited" or limit.isdigit()) or not hcas.isdigit():
        return Verdict(level="unknown", summary=f"the limit of locked memory cannot be read ({output.first_line})")
    if limit == "unlimited":
        return Verdict(level="ok", summary="locked memory is unlimited")
    gib = int(limit) / 2**20
    if gib >= LEAST_GIB:
        return Verdict(level="ok", summary=f"{gib:.0f} GiB of memory may be locked")
    limited = f"{quantity(gib)} GiB" if gib >= 1 else f"{quantity(gib * 1024)} MiB"
    if not int(hcas):
        return Verdict(level="ok", summary=f"{limited} of memory may be locked; there is no adapter that needs more")
    return Verdict(
        level="warn",
        summary=f"only {limited} of memory may be locked, expected {LEAST_GIB:g}; set memlock in limits.conf",
        action="monitor",
    )


CHECK = Check(
    source="NCCL user guide, troubleshooting; 16 GiB is this project's judgement", probe=lambda site: PROBE, judge=judge
)
