"""Links of the GPUs: NVLink and its fabric, PCIe, and what stands between devices on the PCIe tree."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from cluster.checks import Rise, check
from cluster.files.errors import counted
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.nvidia_smi import REPORT, GpuReport, judge_each
from cluster.probing.probe import GPUS, MACHINE, Output, Probe, printable
from cluster.probing.verdict import Verdict, fail, merge, ok, unknown, warn, with_facts
from cluster.profiles import Board, Pcie

# Error counters that are zero stay on the node: there are hundreds. Drivers without counters end with an error.
_NVLINK = Probe(
    script=f"""{nvidia_smi.REQUIRE}
printf 'gpus %s\n' "$(nvidia-smi -L | grep -c '^GPU ')"
nvidia-smi nvlink -s || exit
echo errors
errors=$(nvidia-smi nvlink -e) || {{ printf 'no counters: %s\\n' "$errors" | head -n 2; exit 0; }}
printf '%s\\n' "$errors" | grep -v ': 0$'
exit 0
""",
    seconds=nvidia_smi.SECONDS,
)
# replay: a packet was sent again. crc: a packet arrived damaged. recovery: the link stopped and was trained again.
# unrecovered: it could not be. other: what newer drivers count beside these.
ErrorClass = Literal["replay", "crc", "recovery", "unrecovered", "other"]
_CLASSES: tuple[ErrorClass, ...] = ("replay", "crc", "recovery", "unrecovered", "other")


@check(
    _NVLINK,
    "nvidia-smi nvlink -s and -e; classes: NVIDIA DCGM, gcm; links of the model: cluster/profiles",
    rise=Rise(
        level="warn",
        action="monitor",
        meaning="the link repeats transfers and slows its ring down",
        least=5,
        least_of={"recovery": 1, "unrecovered": 1},
    ),
)
def nvlink(output: Output, site: Site, board: Board) -> Verdict:
    """Fails when a link of a GPU is down, missing or could not recover; warns on recoveries, and on many other errors.

    A single GPU needs no links, and nvidia-smi lists none for a single GPU of a virtual machine.
    """
    if nothing := nvidia_smi.blocked(output, site):
        return nothing
    alone = (site.gpus.count or 1) == 1
    gpus = _read_links(output.text)
    if not gpus:
        if output.rows("gpus") == ["1"] and alone:
            return ok("one GPU, of which no links are listed")
        return unknown(f"nvidia-smi nvlink lists no GPU ({output.first_line})")
    counters = {f"gpu{index} {kind}": gpu.errors[kind] for index, gpu in gpus.items() for kind in _CLASSES}
    if len(gpus) == 1 and alone:
        return ok("one GPU, so no links to others", facts={"counters": counters})
    if board.profile is None:
        return unknown(board.no_profile)
    wanted = board.profile.nvlink
    verdicts = []
    for index, gpu in gpus.items():
        if len(gpu.up) < wanted.links:
            named = f" (down: {', '.join(map(str, sorted(gpu.down)))})" if gpu.down else ""
            summary = f"GPU {index} has {len(gpu.up)} of {wanted.links} links up{named}"
            verdicts.append(fail(f"{summary}: reset it, then look at the board", "reset"))
        elif gpu.errors["unrecovered"] or gpu.errors["recovery"] or gpu.errors.total() >= wanted.warn_errors:
            errors = ", ".join(f"{gpu.errors[kind]} {kind}" for kind in _CLASSES if gpu.errors[kind])
            summary = f"GPU {index} counts errors on link {', '.join(map(str, sorted(gpu.worst)))}: {errors}"
            verdicts.append(fail(summary, "reset") if gpu.errors["unrecovered"] else warn(summary))
    verdict = merge(verdicts) if verdicts else ok(f"{wanted.links} links up on each of {len(gpus)} GPUs")
    return with_facts(verdict, counters=counters)


@dataclass(slots=True)
class _Links:
    """The links of one GPU."""

    up: set[int] = field(default_factory=set)
    down: set[int] = field(default_factory=set)
    errors: Counter[ErrorClass] = field(default_factory=Counter)
    worst: set[int] = field(default_factory=set)  # links that counted errors


_GPU = re.compile(r"GPU (\d+):")
_LINK = re.compile(r"\s+Link (\d+): (.+)")
# "Replay Errors: 3", of newer drivers also "Link recovery failed events: 1". FEC counters count corrected symbols,
# which are normal; totals repeat other counters.
_ERRORS = re.compile(r"(?!FEC |Total )(.*(?:error|recovery).*): (\d+)$", re.IGNORECASE)
_SPEED = re.compile(r"([\d.]+) GB/s")


def _read_links(text: str) -> dict[int, _Links]:
    status, _, errors = text.partition("\nerrors\n")
    gpus: dict[int, _Links] = {}
    for part, counting in ((status, False), (errors, True)):
        gpu = None
        for line in part.splitlines():
            if match := _GPU.match(line):
                gpu = gpus.setdefault(int(match[1]), _Links())
            elif gpu and (match := _LINK.match(line)):
                link, value = int(match[1]), match[2].strip()
                if not counting:
                    speed = _SPEED.match(value)
                    (gpu.up if speed and float(speed[1]) > 0 else gpu.down).add(link)
                elif (found := _ERRORS.match(value)) and int(found[2]):
                    gpu.errors[_class_of(found[1].lower())] += int(found[2])
                    gpu.worst.add(link)
    return gpus


def _class_of(name: str) -> ErrorClass:
    """The class of a counter by its name in lower case."""
    if "recovery" in name:
        return "unrecovered" if "failed" in name else "recovery"
    return "replay" if "replay" in name else "crc" if "crc" in name else "other"


@check(REPORT, "nvidia-smi manual, Fabric; NVIDIA Fabric Manager user guide")
def gpu_fabric(output: Output, site: Site, board: Board) -> Verdict:
    """Fails when a GPU of a board with NVSwitches has not joined their fabric. A lone GPU has nothing to join."""
    if nothing := nvidia_smi.blocked(output, site):
        return nothing
    if board.is_lone(site.gpus.count):
        return ok("one GPU, so no fabric to join")
    if board.profile is None:
        return unknown(board.no_profile)
    if not board.profile.fabric.registration:
        return ok(f"{board.name} does not register with a fabric")

    def findings(gpu: GpuReport) -> Iterator[Verdict]:
        state, status = gpu.text("Fabric/State"), gpu.text("Fabric/Status")
        if state is None:
            yield unknown("does not state whether it has joined the fabric")
        elif state != "Completed":
            yield fail(f"has not joined the NVSwitch fabric (state {state}); look at nvidia-fabricmanager", "reboot")
        elif status not in (None, "Success"):
            yield fail(f"failed to join the NVSwitch fabric ({status})", "reboot")

    return judge_each(output, site, findings, "{gpus} have joined their fabric")


# The kernel keeps 15 characters of a program's name.
_FABRIC_MANAGER = Probe(
    script="""
printf 'service %s\\n' "$(systemctl is-active nvidia-fabricmanager 2>/dev/null)"
[ -d /run/systemd/system ] && echo 'init systemd' || echo 'init other'
pgrep -x nv-fabricmanage >/dev/null 2>&1 && echo 'process yes' || echo 'process no'
"""
)


@check(_FABRIC_MANAGER, "NVIDIA Fabric Manager user guide; systemctl is-active nvidia-fabricmanager")
def fabric_manager(output: Output, site: Site, board: Board) -> Verdict:
    """Fails where a board with NVSwitches has no running fabric manager. Virtual machines with one GPU need none."""
    said = output.said
    if said.get("process") not in ("yes", "no") or "init" not in said:
        return unknown(f"the service's state cannot be read ({output.first_line})")
    if not board.count and not site.gpus.count:
        return ok("no GPU, so no fabric")
    if board.is_lone(site.gpus.count):
        return ok("one GPU, so no fabric")
    if board.profile is None:
        return unknown(board.no_profile)
    if not board.profile.fabric.manager:
        return ok(f"{board.name} has no NVSwitches")
    service = said.get("service") or "unknown"
    if service == "active" or said["process"] == "yes":
        return ok("nvidia-fabricmanager is active")
    if said["init"] == "systemd":
        return fail(f"nvidia-fabricmanager is {service}; start the version that matches the driver", "reboot")
    if board.profile.fabric.registration:
        return ok("no service manager in this container; see gpu_fabric for its result")
    return unknown("no service manager in this container; check the host itself")


_PCIE = Probe(
    script=GPUS
    + """
for device in $(gpus); do
    line="gpu ${device##*/}"
    for name in current_link_width max_link_width current_link_speed max_link_speed; do
        value "$device/$name"; line="$line|$v"
    done
    printf '%s\\n' "$line"
done
echo end
"""
)
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # by the speed of a lane, in GT/s
_HIDDEN_WIDTHS = (0, 63, 255)  # the kernel's values where a hypervisor hides the link


@check(
    _PCIE,
    "sysfs-bus-pci of the kernel; imbue-ai/cluster-health (links that are limited)",
    unreadable="sysfs lists no PCI devices",
)
def pcie(output: Output, site: Site, board: Board) -> Verdict:
    """Fails below the width of the GPU's model or when the device cannot reach its generation; warns below it now."""
    rows = [row.split("|") for row in output.rows("gpu")]
    if not rows:
        if board.count or site.gpus.count:
            return unknown("sysfs shows no GPU; it may not be mounted in this container")
        return ok("no GPU")
    if board.profile is None:
        return unknown(board.no_profile)
    wanted = board.profile.pcie
    if bad := [verdict for row in rows if (verdict := _judge_link(row, wanted))]:
        return merge(bad)
    return ok(
        f"{counted(len(rows), 'GPU')} at generation {wanted.generation} or newer with {wanted.width} lanes or more"
    )


def _judge_link(row: list[str], wanted: Pcie) -> Verdict | None:
    address, *values = map(printable, row)
    width = int(values[0]) if len(values) == 4 and values[0].isdigit() else 0
    if width in _HIDDEN_WIDTHS:
        return unknown(f"the link of {address} cannot be read; where a virtual machine hides it, --skip pcie")
    if width < wanted.width:
        return fail(f"{address} runs on {width} of {wanted.width} lanes: reseat it or look at its riser")
    current, highest = _generation(values[2]), _generation(values[3])
    if highest is None or current is None:
        return unknown(f"{address} has a link of unknown speed ({values[2]} of {values[3]})")
    if highest < wanted.generation:
        return fail(f"{address} can do PCIe generation {highest}, its model does {wanted.generation}")
    if current < wanted.generation:
        now = f"{address} runs at PCIe generation {current}, not {wanted.generation}"
        return warn(f"{now}: an idle link may save power, so look again under load")
    return None


def _generation(speed: str) -> int | None:
    """Of `16.0 GT/s PCIe`, as sysfs names a speed per lane."""
    try:
        return _GENERATIONS.get(float(speed.partition(" ")[0]))
    except ValueError:
        return None


# The last part of a device's path is the device itself.
_ACS = Probe(
    script=GPUS
    + MACHINE
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
_ON = re.compile(r"(SrcValid|ReqRedir|CmpltRedir|UpstreamFwd)\+")
_BRIDGES_SHOWN = 4


@check(_ACS, "NCCL user guide, troubleshooting (ACS); lspci(8)", unreadable="the PCI tree cannot be read")
def pcie_acs(output: Output, site: Site, board: Board) -> Verdict:
    """Warns where access control sends traffic between devices through the processor. A virtual machine needs it."""
    said = output.said
    if not said.get("devices", "").isdigit():
        return unknown(f"the PCI tree cannot be read ({output.first_line})")
    if int(said["devices"]) < 2:
        return ok("no two devices that could reach each other over PCIe")
    if said.get("machine") == "virtual":
        return ok("a virtual machine, whose host needs access control on")
    found = dict(row.partition(" ")[::2] for row in output.rows("bridge"))
    controlled = [
        f"{printable(bridge)} ({', '.join(words)})" for bridge, text in found.items() if (words := _ON.findall(text))
    ]
    if controlled:
        listed = ", ".join(controlled[:_BRIDGES_SHOWN]) + (" ..." if len(controlled) > _BRIDGES_SHOWN else "")
        return warn(
            f"access control is on at {len(controlled)} bridges above GPUs and adapters: {listed}; "
            "traffic between them goes through the processor: turn ACS off in the BIOS, or with setpci"
        )
    if said.get("lspci") == "absent" or any("denied" in text for text in found.values()):
        why = "there is no lspci" if said.get("lspci") == "absent" else "only root may read it"
        return ok(f"access control was not read: {why}; run the check as root once")
    return ok(f"access control is off at {len(found)} bridges above GPUs and adapters")


_IOMMU = Probe(
    script=GPUS
    + MACHINE
    + """
for device in $(gpus); do
    value "$device/iommu_group/type"; printf 'gpu %s %s\\n' "${device##*/}" "$v"
done
for adapter in /sys/class/infiniband/*; do
    [ -e "$adapter/device" ] || continue
    value "$adapter/device/iommu_group/type"; printf 'adapter %s %s\\n' "${adapter##*/}" "$v"
done
echo end
"""
)


@check(
    _IOMMU,
    "NCCL user guide, troubleshooting (IO virtualization); sysfs-kernel-iommu_groups of the kernel",
    unreadable="the IOMMU's groups cannot be read",
)
def iommu(output: Output, site: Site, board: Board) -> Verdict:
    """Warns where the IOMMU translates the addresses of a GPU or adapter; not in a virtual machine, or without both."""
    gpus, adapters = output.rows("gpu"), output.rows("adapter")
    if not gpus or not adapters:
        return ok("no GPU and adapter to join")
    if output.said.get("machine") == "virtual":
        return ok("a virtual machine, whose host decides")
    kinds = [row.partition(" ")[::2] for row in gpus + adapters]
    if translated := [printable(name) for name, kind in kinds if kind.startswith("DMA")]:
        return warn(f"the IOMMU translates addresses of {', '.join(translated)}; boot with iommu=pt, or turn it off")
    return ok(f"passed through, or off, for {len(kinds)} GPUs and adapters")
