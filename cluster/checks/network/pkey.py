"""Partition keys: is every InfiniBand port a full member of a partition?"""

from __future__ import annotations

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict, merge, with_facts

PROBE = Probe(
    script="""
for port in /sys/class/infiniband/*/ports/*; do
    [ -r "$port/link_layer" ] || continue
    read -r layer <"$port/link_layer"; read -r state <"$port/state"
    device=${port#/sys/class/infiniband/}
    printf 'port %s:%s|%s|%s|%s\\n' "${device%%/*}" "${port##*/}" "$layer" "${state##*: }" \\
        "$(cat "$port"/pkeys/* 2>/dev/null | grep -v '^0x0000$' | sort -u | tr '\\n' ' ')"
done
echo end
"""
)
_FULL = 0x8000  # a port without this bit is a limited member, which reaches full members alone


def judge(output: Output, site: Site) -> Verdict:
    """Fails for a port that the site names and that is no full member; warns for any other port that is up."""
    lines = output.text.splitlines()
    if "end" not in lines:
        return Verdict(level="unknown", summary=f"sysfs lists no InfiniBand devices ({output.first_line})")
    keys: dict[str, str] = {}
    verdicts = []
    for line in lines:
        if not line.startswith("port "):
            continue
        name, layer, state, listed = (*map(printable, line.removeprefix("port ").split("|")), "", "", "")[:4]
        named = site.network.hcas is not None and {name, name.partition(":")[0]} & set(site.network.hcas)
        if layer != "InfiniBand" or (state != "ACTIVE" and not named):
            continue
        keys[name] = listed.strip()
        if not any(int(key, 16) & _FULL for key in listed.split() if key.startswith("0x")):
            summary = (
                f"{name} is no full member of a partition (keys: {listed.strip() or 'none'}); ask the subnet manager"
            )
            bad = Verdict(level="warn", summary=summary, action="monitor")
            verdicts.append(Verdict(level="fail", summary=summary, action="isolate") if named else bad)
    if not verdicts:
        verdicts.append(Verdict(level="ok", summary=f"{len(keys) or 'no'} InfiniBand ports with full membership"))
    return with_facts(merge(verdicts), pkeys=sorted(set(keys.values())) or None)


CHECK = Check(
    source="InfiniBand architecture, partitioning; sysfs-class-infiniband of the kernel",
    probe=lambda site: PROBE,
    judge=judge,
)
