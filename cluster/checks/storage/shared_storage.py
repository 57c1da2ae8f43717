"""Shared storage: can a file be written, read back and removed on every shared path, within its own time?"""

from __future__ import annotations

import math
import shlex

from cluster.checks import Check
from cluster.inventory.site import SharedPath, Site
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict, merge

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


def probe(site: Site) -> Probe:
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


def judge(output: Output, site: Site) -> Verdict:
    """Fails for a path that is absent, cannot be written, hangs, or has less free space than the site requires."""
    lines = output.text.splitlines()
    if not site.storage.shared and "end" in lines:
        return Verdict(level="ok", summary="the site names no shared storage")
    if not site.storage.shared:
        return Verdict(level="unknown", summary=f"the probe did not end ({output.first_line})")
    said: dict[str, tuple[str, str]] = {}
    for line in lines:
        tag, number, status, words = (*line.split(" ", 3), "", "", "", "")[:4]
        if tag == "path":
            said[number] = (status, printable(words.strip()))
    return merge(_judge(shared, *said.get(str(number), ("", ""))) for number, shared in enumerate(site.storage.shared))


def _judge(shared: SharedPath, status: str, words: str) -> Verdict:
    if not status.isdigit():
        return Verdict(level="unknown", summary=f"{shared.path} was not tried")
    if status in ("124", "137"):
        summary = f"{shared.path} hangs for more than {shared.probe_seconds:g} s; look at its mount and file server"
        return Verdict(level="fail", summary=summary, action="isolate")
    if words == "absent":
        return Verdict(level="fail", summary=f"{shared.path} is absent; mount it", action="isolate")
    if status != "0":
        verb = "written" if shared.write else "read"
        return Verdict(level="fail", summary=f"{shared.path} cannot be {verb} ({words})", action="isolate")
    available = words.rpartition("available ")[2]
    gib = int(available) / 2**20 if available.isdigit() else None
    if shared.min_free_gib and (gib is None or gib < shared.min_free_gib):
        left = "an unknown amount" if gib is None else f"{gib:.0f} GiB"
        summary = f"{shared.path} has {left} left; the site requires {shared.min_free_gib:g} GiB: delete old runs"
        return Verdict(level="fail", summary=summary, action="isolate")
    return Verdict(level="ok", summary=f"{shared.path} can be {'written and read' if shared.write else 'read'}")


CHECK = Check(source="a write and read of its own, with a time limit of its own", probe=probe, judge=judge)
