"""Kernel, distribution and OFED: stated here, compared between nodes by cluster/discovery/drift.py."""

from __future__ import annotations

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict

# `ofed_info -s` prints `MLNX_OFED_LINUX-23.10-0.5.5.0:`; without it, the version of the adapter's own kernel module.
PROBE = Probe(
    script="""
printf 'kernel %s\\n' "$(uname -r)"
printf 'system %s\\n' "$(. /etc/os-release 2>/dev/null && printf '%s' "$PRETTY_NAME")"
ofed=$(ofed_info -s 2>/dev/null)
[ -n "$ofed" ] || ofed=$(cat /sys/module/mlx5_core/version 2>/dev/null)
printf 'ofed %s\\n' "${ofed%:}"
"""
)


def judge(output: Output, site: Site) -> Verdict:
    """ok, with the versions as facts."""
    said = {
        name: printable(value.strip()) for name, _, value in (line.partition(" ") for line in output.text.splitlines())
    }
    if not said.get("kernel") or "ofed" not in said:
        return Verdict(level="unknown", summary=f"the kernel's version cannot be read ({output.first_line})")
    named = [f"kernel {said['kernel']}", said.get("system", ""), f"OFED {said['ofed']}" if said["ofed"] else ""]
    facts = {"kernel": said["kernel"], "system": said.get("system") or None, "ofed": said["ofed"] or None}
    return Verdict(level="ok", summary=", ".join(filter(None, named)), facts=facts)


CHECK = Check(source="uname(1); os-release(5); ofed_info of MLNX_OFED", probe=lambda site: PROBE, judge=judge)
