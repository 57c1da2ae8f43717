"""Errors on InfiniBand and RoCE ports: do they rise now, or have they risen since the last check?"""

from __future__ import annotations

import re

from cluster.checks import Check, Rise
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict, with_facts

# Growth in an hour from which a counter matters: thresholds of infiniband-diags, which name no time; the hour is ours.
PER_HOUR = {
    "symbol_error": 10,
    "link_error_recovery": 10,
    "port_rcv_errors": 10,
    "local_link_integrity_errors": 10,
    "excessive_buffer_overrun_errors": 10,
    "port_rcv_remote_physical_errors": 100,
    "port_xmit_discards": 100,
    "port_xmit_constraint_errors": 100,
    "port_rcv_constraint_errors": 100,
}
SECONDS = 2
PROBE = Probe(
    script=f"""
look() {{
    for port in /sys/class/infiniband/*/ports/*; do
        device=${{port#/sys/class/infiniband/}}
        for name in {" ".join(PER_HOUR)}; do
            v=
            [ -r "$port/counters/$name" ] && read -r v <"$port/counters/$name" &&
                printf '%s %s:%s %s %s\\n' "$1" "${{device%%/*}}" "${{port##*/}}" "$name" "$v"
        done
    done
}}
first=$(look first)
printf '%s\\n' "$first"
[ -z "$first" ] || {{ sleep {SECONDS}; look second; }}
echo end
"""
)
_ROW = re.compile(r"(first|second) (\S+ [a-z_]+) (\d+)")


def judge(output: Output, site: Site) -> Verdict:
    """Warns on counters that grow between two readings; the history judges slower growth."""
    lines = output.text.splitlines()
    if "end" not in lines:
        return Verdict(level="unknown", summary=f"the ports' counters cannot be read ({output.first_line})")
    looks: dict[str, dict[str, int]] = {"first": {}, "second": {}}
    for line in lines:
        if match := _ROW.fullmatch(printable(line)):
            looks[match[1]][match[2]] = int(match[3])
    grown = {
        name: value - looks["first"][name]
        for name, value in looks["second"].items()
        if name in looks["first"] and value > looks["first"][name]
    }
    if grown:
        listed = ", ".join(f"{name} by {growth / SECONDS:g} a second" for name, growth in sorted(grown.items()))
        verdict = Verdict(level="warn", summary=f"errors rise: {listed}; look at the cable", action="monitor")
    else:
        ports = {name.partition(" ")[0] for name in looks["first"]}
        verdict = Verdict(level="ok", summary=f"no error counter of {len(ports) or 'no'} ports rises")
    return with_facts(verdict, counters=looks["second"] or looks["first"])


CHECK = Check(
    source="sysfs-class-infiniband of the kernel; linux-rdma/infiniband-diags, error thresholds",
    probe=lambda site: PROBE,
    judge=judge,
    rise=Rise(
        level="warn",
        action="monitor",
        meaning="the link repeats or loses packets: look at the cable",
        per_hour=PER_HOUR,
    ),
)
