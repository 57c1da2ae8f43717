"""SXID: errors that the NVSwitch driver wrote to the kernel log during the last two hours."""

from __future__ import annotations

import re
from collections import Counter

from cluster.checks import Check, Rise
from cluster.inventory.site import Site
from cluster.probing.kernel_log import PROBE, read
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict, merge, with_facts

WINDOW_SECONDS = 7200
# The driver states the severity on the first line of an error; lines with its registers follow.
_SXID = re.compile(r"SXid \(PCI:([0-9A-Fa-f:.]+)\): (\d+), (Fatal|Non-fatal)")


def judge(output: Output, site: Site) -> Verdict:
    """Fails on errors that the driver calls fatal: links through that switch need a reset; warns on others."""
    log = read(output, "SXIDs")
    if isinstance(log, Verdict):
        return log
    counts = Counter((int(match[2]), match[1], match[3]) for match in log.within(_SXID, WINDOW_SECONDS))
    if not counts:
        return Verdict(level="ok", summary="no SXID within 2 hours", facts={"counters": {}})
    verdict = merge(_judge(*key, times) for key, times in sorted(counts.items()))
    return with_facts(
        verdict, counters={f"{address} sxid{number}": times for (number, address, _), times in counts.items()}
    )


def _judge(number: int, address: str, severity: str, times: int) -> Verdict:
    found = f"{severity.lower()} SXID {number} of NVSwitch {address} within 2 hours (x {times})"
    if severity == "Fatal":
        return Verdict(level="fail", summary=f"{found}: reset all GPUs and switches together", action="reset")
    return Verdict(level="warn", summary=found, action="monitor")


CHECK = Check(
    source="NVIDIA Fabric Manager user guide, SXid errors; 2 hours as for XIDs",
    probe=lambda site: PROBE,
    judge=judge,
    rise=Rise(level="warn", action="monitor", meaning="the switch goes on failing"),
)
