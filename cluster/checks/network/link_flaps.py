"""Link flaps: how often an adapter's interface lost its link during the last day."""

from __future__ import annotations

import re
from collections import Counter

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing.kernel_log import PROBE, read
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict

WINDOW_SECONDS = 24 * 3600
FAIL_FROM = 5
_LOST = re.compile(r"(?:^|\s)([A-Za-z0-9_.-]+): (?:[Ll]ost carrier|Link [Dd]own)")


def judge(output: Output, site: Site) -> Verdict:
    """Warns on one lost link, fails from five within a day, of interfaces of RDMA adapters and of the site's own."""
    log = read(output, "link flaps")
    if isinstance(log, Verdict):
        return log
    named = {site.network.interface} if site.network.interface else set()
    watched = log.adapters | named
    flaps = Counter(match[1] for match in log.within(_LOST, WINDOW_SECONDS) if match[1] in watched)
    if not flaps:
        return Verdict(level="ok", summary=f"no link of {len(watched)} interfaces was lost within a day")
    listed = ", ".join(f"{name} x {times}" for name, times in sorted(flaps.items()))
    summary = f"links were lost within a day: {listed}; look at the cable and the switch's port"
    if max(flaps.values()) >= FAIL_FROM:
        return Verdict(level="fail", summary=summary, action="isolate")
    return Verdict(level="warn", summary=summary, action="monitor")


CHECK = Check(
    source="Azure/azurehpc-health-checks (lost carrier, 5 within 24 hours); one as a warning is ours",
    probe=lambda site: PROBE,
    judge=judge,
)
