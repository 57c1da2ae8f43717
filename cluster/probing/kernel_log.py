"""The kernel's log of the last day: read once for all checks that look for something in it.

The journal where there is one, else dmesg. Both print seconds since boot, so that one parser reads both, and the window
is judged here rather than by the node's clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict

# The lines that checks look for. The last 500 lines of each kind are read, so that no kind can push out another.
_KINDS = (
    "NVRM: Xid",
    "SXid",
    "I/O error|EXT4-fs error|XFS .*(metadata I/O|[Cc]orruption)|nvme.*controller is down|Remounting filesystem",
    "[Ll]ost carrier|Link [Dd]own",
)
_LINES = 500
_READ_EACH = "\n".join(f"""printf '%s\\n' "$log" | grep -aE '{words}' | tail -n {_LINES}""" for words in _KINDS)
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

    def within(self, pattern: re.Pattern[str], seconds: float) -> list[re.Match[str]]:
        """Matches in the lines of the last `seconds`."""
        begin = self.uptime - seconds
        return [match for at, line in self.lines if at >= begin and (match := pattern.search(line))]


def read(output: Output, what: str, *, warns: bool = False) -> KernelLog | Verdict:
    """The log, or the verdict of a check where it cannot be read; `what` names the events that the check looks for.

    Several checks read this log. Where this user may not read it, only the check with `warns` warns: one cause, one
    warning.
    """
    lines = output.text.splitlines()
    uptime = next((line.split()[1] for line in lines if re.fullmatch(r"uptime \d+(\.\d+)?", line)), None)
    if any(line.startswith("denied ") for line in lines):
        summary = f"this user may not read the kernel log, so {what} stay unseen; add the user to the group adm"
        return (
            Verdict(level="warn", summary=summary, action="monitor") if warns else Verdict(level="ok", summary=summary)
        )
    if uptime is None or not any(line.startswith("source ") for line in lines):
        return Verdict(level="unknown", summary=f"the kernel log cannot be read ({output.first_line})")
    return KernelLog(
        uptime=float(uptime),
        lines=tuple((float(match[1]), line) for line in lines if (match := _STAMP.match(line))),
        adapters=frozenset(printable(line.removeprefix("adapter ")) for line in lines if line.startswith("adapter ")),
    )
