"""PCIe access control: do the bridges above GPUs and adapters send their traffic through the processor?"""

from __future__ import annotations

import re

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing import kernel_files
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict

# The last part of a device's path is the device itself.
PROBE = Probe(
    script=kernel_files.GPUS
    + kernel_files.MACHINE
    + """
devices=$(
    gpus
    for adapter in /sys/class/infiniband/*/device; do [ -e "$adapter" ] && printf '%s\\n' "$adapter"; done
)
printf 'devices %s\\n' "$(printf '%s' "$devices" | grep -c .)"
bridges=$(for device in $devices; do
    readlink -f "$device" | tr / '\\n' | grep -E '^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}[.][0-7]$' | sed '$d'
done | sort -u)
if [ -n "$bridges" ] && ! command -v lspci >/dev/null 2>&1; then echo 'lspci absent'; bridges=; fi
for bridge in $bridges; do
    control=$(lspci -s "$bridge" -vvv 2>/dev/null | grep -E 'ACSCtl|denied' | tr -s ' \\t\\n' ' ')
    printf 'bridge %s %s\\n' "$bridge" "$control"
done
echo end
""",
    seconds=20.0,
)
_BRIDGE = re.compile(r"bridge (\S+) (.*)")
_ON = re.compile(r"(SrcValid|ReqRedir|CmpltRedir|UpstreamFwd)\+")
_SHOWN = 4


def judge(output: Output, site: Site) -> Verdict:
    """Warns where control is on above devices that could reach each other directly. A virtual machine needs it on."""
    lines = output.text.splitlines()
    said = dict(line.partition(" ")[::2] for line in lines)
    if "end" not in lines or not said.get("devices", "").isdigit():
        return Verdict(level="unknown", summary=f"the PCI tree cannot be read ({output.first_line})")
    if int(said["devices"]) < 2:
        return Verdict(level="ok", summary="no two devices that could reach each other over PCIe")
    if said.get("machine") == "virtual":
        return Verdict(level="ok", summary="a virtual machine, whose host needs access control on")
    found = {match[1]: match[2] for line in lines if (match := _BRIDGE.fullmatch(line))}
    controlled = {bridge: words for bridge, text in found.items() if (words := _ON.findall(text))}
    if controlled:
        bridges = [f"{printable(bridge)} ({', '.join(words)})" for bridge, words in controlled.items()]
        listed = ", ".join(bridges[:_SHOWN]) + (" ..." if len(bridges) > _SHOWN else "")
        summary = (
            f"access control is on at {len(bridges)} bridges above GPUs and adapters: {listed}; "
            "traffic between them goes through the processor: turn ACS off in the BIOS, or with setpci"
        )
        return Verdict(level="warn", summary=summary, action="monitor")
    if said.get("lspci") == "absent" or any("denied" in text for text in found.values()):
        why = "there is no lspci" if said.get("lspci") == "absent" else "only root may read it"
        return Verdict(level="ok", summary=f"access control was not read: {why}; run the check as root once")
    return Verdict(level="ok", summary=f"access control is off at {len(found)} bridges above GPUs and adapters")


CHECK = Check(source="NCCL user guide, troubleshooting (ACS); lspci(8)", probe=lambda site: PROBE, judge=judge)
