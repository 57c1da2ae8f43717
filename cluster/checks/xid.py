"""XID: errors that the GPU driver wrote to the kernel log during the last two hours, and the action for each."""

from __future__ import annotations

import re
from collections import Counter

from cluster.checks import BoardCheck, Rise
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict, merge, with_facts
from cluster.profiles import NO_GPUS, Board

WINDOW_SECONDS = 7200
# Both logs with seconds since boot, so that one parser reads both and the window is judged here, not by their clocks.
PROBE = Probe(
    script="""
read -r uptime rest </proc/uptime && printf 'uptime %s\\n' "$uptime"
if [ -n "$(journalctl -k -q -n 1 --no-pager 2>/dev/null)" ]; then
    echo 'source journal'
    journalctl -k -q --no-pager -o short-monotonic --since '2 hours ago' | grep 'NVRM: Xid' | tail -n 500
    exit 0
fi
log=$(dmesg 2>&1) || { printf 'denied %s\\n' "$log" | head -n 1; exit 0; }
echo 'source dmesg'
printf '%s\\n' "$log" | grep 'NVRM: Xid' | tail -n 500
exit 0
"""
)
_XID = re.compile(r"\[\s*(\d+\.\d+)\].*NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)")


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Fails on numbers that ask for a reset or a reboot of this model, warns on all others."""
    lines = output.text.splitlines()
    denied = next((line for line in lines if line.startswith("denied ")), None)
    uptime = next((line.split()[1] for line in lines if re.fullmatch(r"uptime \d+(\.\d+)?", line)), None)
    if denied:
        if not board.count and not site.gpus.count:
            return Verdict(level="ok", summary="no GPU, so no XIDs to look for")
        return Verdict(
            level="warn",
            summary="this user may not read the kernel log, so XIDs stay unseen; add the user to the group adm",
            action="monitor",
        )
    if uptime is None or not any(line.startswith("source ") for line in lines):
        return Verdict(level="unknown", summary=f"the kernel log cannot be read ({output.first_line})")
    begin = float(uptime) - WINDOW_SECONDS
    seen = [match for line in lines if (match := _XID.search(line)) and float(match[1]) >= begin]
    counts = Counter((int(match[3]), match[2]) for match in seen)
    if not counts:
        return Verdict(level="ok", summary="no XID within 2 hours", facts={"counters": {}})
    by_number: dict[int, list[str]] = {}
    for (number, address), times in sorted(counts.items()):
        by_number.setdefault(number, []).append(f"{address} x {times}")
    verdict = merge(_judge(number, where, board) for number, where in by_number.items())
    return with_facts(
        verdict, counters={f"{address} xid{number}": times for (number, address), times in counts.items()}
    )


def _judge(number: int, where: list[str], board: Board) -> Verdict:
    found = f"XID {number} within 2 hours ({', '.join(where)})"
    if board.profile is None:
        return Verdict(level="unknown", summary=f"{found}; {board.no_profile}", action="monitor")
    if number in board.profile.xids.reboot:
        return Verdict(level="fail", summary=f"{found}: reboot the node", action="reboot")
    if number in board.profile.xids.reset:
        return Verdict(level="fail", summary=f"{found}: reset the GPU", action="reset")
    known = "" if number in board.profile.xids.monitor else ", a number in no list of its profile"
    return Verdict(level="warn", summary=found + known, action="monitor")


CHECK = BoardCheck(
    source="NVIDIA Xid catalog; actions in cluster/profiles; 2 hours: Azure/azurehpc-health-checks",
    probe=lambda site: PROBE,
    judge=judge,
    rise=Rise(level="warn", action="monitor", meaning="the GPU goes on failing"),
)
