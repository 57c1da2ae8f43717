"""The kernel's log of the last day: XIDs and SXIDs of the NVIDIA drivers, disk errors, lost links.

The journal where there is one, else dmesg, is read once for all. Both print seconds since boot, so that one parser
reads both, and the window is judged here rather than by the node's clock.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from cluster.checks import Rise, check
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Action, Verdict, fail, merge, ok, unknown, warn, with_facts
from cluster.profiles import Board

# The lines that checks look for. The last 500 lines of each kind are read, so that no kind can push out another.
_KINDS = (
    "NVRM: Xid",
    "SXid",
    "I/O error|EXT4-fs error|XFS .*(metadata I/O|[Cc]orruption)|nvme.*controller is down|Remounting filesystem",
    "[Ll]ost carrier|Link [Dd]own",
)
_READ_EACH = "\n".join(f"""printf '%s\\n' "$log" | grep -aE '{words}' | tail -n 500""" for words in _KINDS)
# The journal also holds what the network's own service says; `-b` keeps to the boot that seconds count from.
PROBE = Probe(
    script=f"""
read -r uptime rest </proc/uptime && printf 'uptime %s\\n' "$uptime"
for net in /sys/class/infiniband/*/device/net/*; do [ -e "$net" ] && printf 'adapter %s\\n' "${{net##*/}}"; done
if [ -n "$(journalctl -k -q -n 1 --no-pager 2>/dev/null)" ]; then
    echo 'source journal'
    log=$(journalctl -b -q --no-pager -o short-monotonic --since '24 hours ago' _TRANSPORT=kernel \\
        + _SYSTEMD_UNIT=systemd-networkd.service + _SYSTEMD_UNIT=NetworkManager.service |
        grep -aE '{"|".join(_KINDS)}')
else
    log=$(dmesg 2>&1) || {{ printf 'denied %s\\n' "$log" | head -n 1; exit 0; }}
    echo 'source dmesg'
fi
{_READ_EACH}
exit 0
"""
)
_STAMP = re.compile(r"\[\s*(\d+\.\d+)\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelLog:
    """The lines of one node that the checks look for."""

    uptime: float  # seconds since boot
    lines: tuple[tuple[float, str], ...]  # seconds since boot, and the whole line
    adapters: frozenset[str]  # interfaces of the RDMA adapters, as the log names them: ib0

    def within(self, pattern: re.Pattern[str], hours: float) -> list[re.Match[str]]:
        """Matches in the lines of the last hours."""
        begin = self.uptime - hours * 3600
        return [match for at, line in self.lines if at >= begin and (match := pattern.search(line))]


def _read(output: Output, what: str, denied: Callable[[str], Verdict] = ok) -> KernelLog | Verdict:
    """The log, or the verdict of a check where it cannot be read; `what` names the events that the check looks for.

    Several checks read this log. Where this user may not read it, only one of them warns: one cause, one warning.
    """
    uptime = re.search(r"^uptime (\d+(?:\.\d+)?)$", output.text, re.MULTILINE)
    if output.rows("denied"):
        return denied(f"this user may not read the kernel log, so {what} stay unseen; add the user to the group adm")
    if uptime is None or not output.rows("source"):
        return unknown(f"the kernel log cannot be read ({output.first_line})")
    return KernelLog(
        uptime=float(uptime[1]),
        lines=tuple((float(match[1]), line) for line in output.lines if (match := _STAMP.match(line))),
        adapters=frozenset(map(printable, output.rows("adapter"))),
    )


# NVLink's lines say themselves whether an error is fatal.
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)(?:.*\b(Nonfatal)\b)?")
_CURES: dict[Action, str] = {"reset": "reset the GPU", "reboot": "reboot the node", "isolate": "take the node out"}


@check(
    PROBE,
    "NVIDIA Xid catalog; 2 hours: Azure/azurehpc-health-checks; meanings and actions: cluster/profiles/xids.yaml",
    rise=Rise(level="warn", action="monitor", meaning="the GPU goes on failing"),
)
def xid(output: Output, site: Site, board: Board) -> Verdict:
    """Fails on errors of the GPU driver that ask for a reset, a reboot or hands on this model; warns on all others."""
    log = _read(output, "XIDs", warn if board.count or site.gpus.count else ok)
    if isinstance(log, Verdict):
        return log
    hours = board.limits.xid_hours
    events = log.within(_XID, hours)
    if not events:
        return ok(f"no XID within {hours:g} hours", facts={"counters": {}})
    found: dict[tuple[int, bool], Counter[str]] = {}
    for match in events:
        found.setdefault((int(match[2]), match[3] is None), Counter())[match[1]] += 1
    counters = Counter(f"{match[1]} xid{match[2]}" for match in events)
    verdict = merge(_judge_xid(*key, where, hours, board) for key, where in sorted(found.items()))
    return with_facts(verdict, counters=dict(counters))


def _judge_xid(number: int, fatal: bool, where: Counter[str], hours: float, board: Board) -> Verdict:
    listed = ", ".join(f"{address} x {times}" for address, times in sorted(where.items()))
    found = f"XID {number} within {hours:g} hours ({listed})"
    known = board.xid(number)
    if known is None:
        return warn(f"{found}: a number of no catalogue here; look it up in NVIDIA's")
    if not fatal or known.action == "monitor":
        return warn(f"{found}: {known.means}; {known.do or 'the driver calls it not fatal'}")
    return fail("; ".join(filter(None, (f"{found}: {known.means}", _CURES[known.action], known.do))), known.action)


# The driver states the severity on the first line of an error; lines with its registers follow.
_SXID = re.compile(r"SXid \(PCI:([0-9A-Fa-f:.]+)\): (\d+), (Fatal|Non-fatal)")


@check(
    PROBE,
    "NVIDIA Fabric Manager user guide, SXid errors; 2 hours as for XIDs",
    rise=Rise(level="warn", action="monitor", meaning="the switch goes on failing"),
)
def sxid(output: Output, site: Site, board: Board) -> Verdict:
    """Fails on errors of NVSwitch that its driver calls fatal: links through it need a reset; warns on others."""
    log = _read(output, "SXIDs")
    if isinstance(log, Verdict):
        return log
    hours = board.limits.xid_hours
    counts = Counter((int(match[2]), match[1], match[3]) for match in log.within(_SXID, hours))
    if not counts:
        return ok(f"no SXID within {hours:g} hours", facts={"counters": {}})
    verdicts = []
    for (number, address, severity), times in sorted(counts.items()):
        found = f"{severity.lower()} SXID {number} of NVSwitch {address} within {hours:g} hours (x {times})"
        fatal = severity == "Fatal"
        verdicts.append(fail(f"{found}: reset all GPUs and switches together", "reset") if fatal else warn(found))
    counters = {f"{address} sxid{number}": times for (number, address, _), times in counts.items()}
    return with_facts(merge(verdicts), counters=counters)


# Drives without a medium, and loop devices of mounted images, log errors that mean nothing.
_DEVICE = r"(?!sr\d|fd\d|loop\d)([A-Za-z0-9_-]+)"
_READS = re.compile(rf"I/O error(?:,| on) dev(?:ice)? {_DEVICE}")
_BROKEN = (
    ("file system errors", re.compile(rf"EXT4-fs error \(device {_DEVICE}\)")),
    ("file system errors", re.compile(rf"XFS \({_DEVICE}\): .*(?:metadata I/O|[Cc]orruption)")),
    ("mounted read-only", re.compile(rf"\({_DEVICE}\): Remounting filesystem read-only")),
    ("its controller went down", re.compile(rf"nvme {_DEVICE}: controller is down")),
)
_DISKS_SHOWN = 4


@check(PROBE, "the kernel's block layer, ext4, XFS and NVMe; facebookresearch/gcm (I/O errors); a day is ours")
def disk_errors(output: Output, site: Site, board: Board) -> Verdict:
    """Fails where a file system or a controller broke, warns on blocks that could not be read or written."""
    log = _read(output, "disk errors")
    if isinstance(log, Verdict):
        return log
    hours = board.limits.disk_error_hours
    broken = Counter((match[1], what) for what, pattern in _BROKEN for match in log.within(pattern, hours))
    blocks = Counter(match[1] for match in log.within(_READS, hours))
    verdicts = [
        fail(f"{printable(device)}: {what} (x {times}); replace it") for (device, what), times in sorted(broken.items())
    ]
    if blocks:
        listed = ", ".join(f"{device} x {times}" for device, times in blocks.most_common(_DISKS_SHOWN))
        verdicts.append(warn(f"I/O errors within a day: {listed}; look at smartctl -a"))
    return merge(verdicts) if verdicts else ok("no disk error within a day")


_LOST = re.compile(r"(?:^|\s)([A-Za-z0-9_.-]+): (?:[Ll]ost carrier|Link [Dd]own)")


@check(PROBE, "Azure/azurehpc-health-checks (lost carrier, 5 within 24 hours); one as a warning is ours")
def link_flaps(output: Output, site: Site, board: Board) -> Verdict:
    """Warns on one lost link, fails from five within a day, of interfaces of RDMA adapters and of the site's own."""
    log = _read(output, "link flaps")
    if isinstance(log, Verdict):
        return log
    limit = board.limits
    watched = log.adapters | ({site.network.interface} if site.network.interface else set())
    flaps = Counter(match[1] for match in log.within(_LOST, limit.flap_hours) if match[1] in watched)
    if not flaps:
        return ok(f"no link of {len(watched)} interfaces was lost within a day")
    listed = ", ".join(f"{name} x {times}" for name, times in sorted(flaps.items()))
    summary = f"links were lost within a day: {listed}; look at the cable and the switch's port"
    return fail(summary) if max(flaps.values()) >= limit.flaps_fail else warn(summary)
