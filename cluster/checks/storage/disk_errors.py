"""Disk errors: what disks and file systems wrote to the kernel log during the last day."""

from __future__ import annotations

import re
from collections import Counter

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing.kernel_log import PROBE, read
from cluster.probing.probe import Output, printable
from cluster.probing.verdict import Verdict, merge

WINDOW_SECONDS = 24 * 3600
_SHOWN = 4
# Drives without a medium, and loop devices of mounted images, log errors that mean nothing.
_DEVICE = r"(?!sr\d|fd\d|loop\d)([A-Za-z0-9_-]+)"
_READS = re.compile(rf"I/O error(?:,| on) dev(?:ice)? {_DEVICE}")
_BROKEN = (
    ("file system errors", re.compile(rf"EXT4-fs error \(device {_DEVICE}\)")),
    ("file system errors", re.compile(rf"XFS \({_DEVICE}\): .*(?:metadata I/O|[Cc]orruption)")),
    ("mounted read-only", re.compile(rf"\({_DEVICE}\): Remounting filesystem read-only")),
    ("its controller went down", re.compile(rf"nvme {_DEVICE}: controller is down")),
)


def judge(output: Output, site: Site) -> Verdict:
    """Fails where a file system or a controller broke, warns on blocks that could not be read or written."""
    log = read(output, "disk errors")
    if isinstance(log, Verdict):
        return log
    broken: Counter[tuple[str, str]] = Counter()
    for what, pattern in _BROKEN:
        broken.update((match[1], what) for match in log.within(pattern, WINDOW_SECONDS))
    blocks = Counter(match[1] for match in log.within(_READS, WINDOW_SECONDS))
    verdicts = [
        Verdict(level="fail", summary=f"{printable(device)}: {what} (x {times}); replace it", action="isolate")
        for (device, what), times in sorted(broken.items())
    ]
    if blocks:
        listed = ", ".join(f"{device} x {times}" for device, times in blocks.most_common(_SHOWN))
        summary = f"I/O errors within a day: {listed}; look at smartctl -a"
        verdicts.append(Verdict(level="warn", summary=summary, action="monitor"))
    return merge(verdicts) if verdicts else Verdict(level="ok", summary="no disk error within a day")


CHECK = Check(
    source="the kernel's block layer, ext4, XFS and NVMe; facebookresearch/gcm (I/O errors); a day is ours",
    probe=lambda site: PROBE,
    judge=judge,
)
