"""Disks of a node and the storage that nodes share."""

from __future__ import annotations

import math
import re
import shlex

from cluster.checks import check
from cluster.inventory.site import DiskLimit, SharedPath, Site
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict, fail, merge, ok, unknown, warn
from cluster.profiles import Board

# One row of `df -P -k`: KiB of size, used, available, then percent and mount point; names may hold blanks.
_ROW = re.compile(r"\s(\d+)\s+(\d+)\s+(-?\d+)\s+(?:\d+%|-)\s+/.*$")
_TAG = "path "


def disk_probe(site: Site) -> Probe:
    """A line `path PATH`, then df's output, for each path of the site."""
    paths = " ".join(shlex.quote(disk.path) for disk in site.disks)
    return Probe(script=f'for path in {paths}; do printf \'{_TAG}%s\\n\' "$path"; df -P -k -- "$path"; done')


@check(disk_probe, "df, POSIX format; 95% from imbue-ai/cluster-health")
def disk(output: Output, site: Site, board: Board) -> Verdict:
    """The worst of the site's paths; warns and fails at the percentages of each."""
    return merge(_judge_disk(limit, _section(output.lines, limit.path)) for limit in site.disks)


def _section(lines: list[str], path: str) -> list[str]:
    """The lines between this path's tag and the next one's."""
    if _TAG + path not in lines:
        return []
    start = lines.index(_TAG + path) + 1
    ends = (number for number, line in enumerate(lines) if number >= start and line.startswith(_TAG))
    return lines[start : next(ends, len(lines))]


def _judge_disk(limit: DiskLimit, lines: list[str]) -> Verdict:
    match = next((match for line in lines if (match := _ROW.search(line))), None)
    if not match:
        if any("No such file or directory" in line for line in lines):
            return fail(f"{limit.path} is absent; mount it or correct the site file")
        return unknown(f"{limit.path} cannot be read ({printable(lines[0]) if lines else 'df printed nothing'})")
    used, available = int(match[2]), max(0, int(match[3]))
    percent = 100 * used / (used + available) if used + available else 0.0
    summary = f"{limit.path} is {percent:.0f}% full, {available / 2**20:.0f} GiB left"
    facts = {limit.path: {"percent": round(percent, 1), "available_gib": round(available / 2**20, 1)}}
    if percent >= limit.fail_percent:
        return fail(f"{summary}; the site fails at {limit.fail_percent:g}%: delete old runs or images", facts=facts)
    if percent >= limit.warn_percent:
        return warn(f"{summary}; the site warns at {limit.warn_percent:g}%", facts=facts)
    return ok(summary, facts=facts)


# $1 path, $2 write or read. The file is removed in every case; only KILL on a hanging server can leave it there.
_TRY = """
available() { df -P -k -- "$1" | awk 'NR == 2 { print "available " $4 }'; }
[ -d "$1" ] || { echo absent; exit 1; }
if [ "$2" = read ]; then ls -- "$1" >/dev/null && available "$1"; exit; fi
trap 'exit 124' TERM INT HUP
file=$(mktemp "$1/.burst-probe-XXXXXXXX") || exit 1
trap 'rm -f -- "$file"' EXIT
word="burst $$"
printf '%s' "$word" >"$file" || exit 1
[ "$(cat "$file")" = "$word" ] || { echo 'read back something else'; exit 1; }
available "$1"
"""


def shared_probe(site: Site) -> Probe:
    """One line `path NUMBER STATUS WORDS` for each shared path; all are tried side by side."""
    tries = [
        f"try {number} {math.ceil(shared.probe_seconds)} {shlex.quote(shared.path)} "
        f"{'write' if shared.write else 'read'} &"
        for number, shared in enumerate(site.storage.shared)
    ]
    script = f"""
try() {{
    words=$(timeout -k 1 "$2" sh -c {shlex.quote(_TRY)} try "$3" "$4" 2>&1)
    printf 'path %s %s %s\\n' "$1" "$?" "$(printf '%s' "$words" | tr '\\n' ' ')"
}}
{chr(10).join(tries)}
wait
echo end
"""
    seconds = max((shared.probe_seconds for shared in site.storage.shared), default=1.0)
    return Probe(script=script, seconds=math.ceil(seconds) + 3.0)


@check(shared_probe, "a write and read of its own, with a time limit of its own")
def shared_storage(output: Output, site: Site, board: Board) -> Verdict:
    """Fails for a path that is absent, cannot be written, hangs, or has less free space than the site requires."""
    if not site.storage.shared:
        if "end" not in output.lines:
            return unknown(f"the probe did not end ({output.first_line})")
        return ok("the site names no shared storage")
    said: dict[str, tuple[str, str]] = {}
    for row in output.rows("path"):
        number, status, words = (*row.split(" ", 2), "", "")[:3]
        said[number] = (status, printable(words.strip()))
    return merge(
        _judge_shared(path, *said.get(str(number), ("", ""))) for number, path in enumerate(site.storage.shared)
    )


def _judge_shared(shared: SharedPath, status: str, words: str) -> Verdict:
    if not status.isdigit():
        return unknown(f"{shared.path} was not tried")
    if status in ("124", "137"):
        return fail(f"{shared.path} hangs for more than {shared.probe_seconds:g} s; look at its mount and file server")
    if words == "absent":
        return fail(f"{shared.path} is absent; mount it")
    if status != "0":
        return fail(f"{shared.path} cannot be {'written' if shared.write else 'read'} ({words})")
    available = words.rpartition("available ")[2]
    gib = int(available) / 2**20 if available.isdigit() else None
    if shared.min_free_gib and (gib is None or gib < shared.min_free_gib):
        left = "an unknown amount" if gib is None else f"{gib:.0f} GiB"
        return fail(f"{shared.path} has {left} left; the site requires {shared.min_free_gib:g} GiB: delete old runs")
    return ok(f"{shared.path} can be {'written and read' if shared.write else 'read'}")
