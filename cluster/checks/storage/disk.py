"""Disk space: is there room on every path the site names?"""

from __future__ import annotations

import re
import shlex

from cluster.checks import Check
from cluster.inventory.site import DiskLimit, Site
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict, merge

# One row of `df -P -k`: KiB of size, used, available, then percent and mount point; names may hold blanks.
_ROW = re.compile(r"\s(\d+)\s+(\d+)\s+(-?\d+)\s+(?:\d+%|-)\s+/.*$")
_TAG = "path "


def probe(site: Site) -> Probe:
    """A line `path PATH`, then df's output, for each path of the site."""
    paths = " ".join(shlex.quote(disk.path) for disk in site.disks)
    return Probe(script=f'for path in {paths}; do printf \'{_TAG}%s\\n\' "$path"; df -P -k -- "$path"; done')


def judge(output: Output, site: Site) -> Verdict:
    """The worst of the site's paths; warns and fails at the percentages of each."""
    return merge(_judge_path(disk, _section(output.text, disk.path)) for disk in site.disks)


def _section(text: str, path: str) -> list[str]:
    """The lines between this path's tag and the next one's."""
    lines = text.splitlines()
    if _TAG + path not in lines:
        return []
    start = lines.index(_TAG + path) + 1
    ends = (number for number, line in enumerate(lines) if number >= start and line.startswith(_TAG))
    return lines[start : next(ends, len(lines))]


def _judge_path(disk: DiskLimit, lines: list[str]) -> Verdict:
    match = next((match for line in lines if (match := _ROW.search(line))), None)
    if not match:
        complaint = printable(lines[0]) if lines else "df printed nothing"
        absent = any("No such file or directory" in line for line in lines)
        return Verdict(
            level="fail" if absent else "unknown",
            summary=f"{disk.path} is absent; mount it or correct the site file"
            if absent
            else f"{disk.path} cannot be read ({complaint})",
            action="isolate" if absent else "none",
        )
    used, available = int(match[2]), max(0, int(match[3]))
    percent = 100 * used / (used + available) if used + available else 0.0
    summary = f"{disk.path} is {percent:.0f}% full, {available / 2**20:.0f} GiB left"
    facts = {disk.path: {"percent": round(percent, 1), "available_gib": round(available / 2**20, 1)}}
    if percent >= disk.fail_percent:
        limit = f"{summary}; the site fails at {disk.fail_percent:g}%: delete old runs or images"
        return Verdict(level="fail", summary=limit, action="isolate", facts=facts)
    if percent >= disk.warn_percent:
        limit = f"{summary}; the site warns at {disk.warn_percent:g}%"
        return Verdict(level="warn", summary=limit, action="monitor", facts=facts)
    return Verdict(level="ok", summary=summary, facts=facts)


CHECK = Check(source="df, POSIX format; 95% from imbue-ai/cluster-health", probe=probe, judge=judge)
