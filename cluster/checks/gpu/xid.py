"""XID: errors that the GPU driver wrote to the kernel log during the last two hours, and the action for each."""

from __future__ import annotations

import re
from collections import Counter

from cluster.checks import BoardCheck, Rise
from cluster.inventory.site import Site
from cluster.probing.kernel_log import PROBE, read
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict, merge, with_facts
from cluster.profiles import NO_GPUS, Board

WINDOW_SECONDS = 7200
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)")


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Fails on numbers that ask for a reset or a reboot of this model, warns on all others."""
    log = read(output, "XIDs", warns=bool(board.count or site.gpus.count))
    if isinstance(log, Verdict):
        return log
    counts = Counter((int(match[2]), match[1]) for match in log.within(_XID, WINDOW_SECONDS))
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
    source="NVIDIA Xid catalog; numbers that fail and 2 hours: Azure/azurehpc-health-checks; actions: cluster/profiles",
    probe=lambda site: PROBE,
    judge=judge,
    rise=Rise(level="warn", action="monitor", meaning="the GPU goes on failing"),
)
