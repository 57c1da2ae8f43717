"""PCIe: does every GPU have the lanes and the generation of its model?"""

from __future__ import annotations

from cluster.checks import BoardCheck
from cluster.files.errors import counted
from cluster.inventory.site import Site
from cluster.probing import kernel_files
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict, merge
from cluster.profiles import NO_GPUS, Board
from cluster.profiles.thresholds import Pcie

# sysfs names a speed per lane.
_GENERATIONS = {
    "2.5": 1,
    "5.0": 2,
    "5": 2,
    "8.0": 3,
    "8": 3,
    "16.0": 4,
    "16": 4,
    "32.0": 5,
    "32": 5,
    "64.0": 6,
    "64": 6,
}
_HIDDEN_WIDTHS = (0, 63, 255)  # the kernel's values where a hypervisor hides the link
PROBE = Probe(
    script=kernel_files.GPUS
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


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Fails below the width of the GPU's model or when the device cannot reach its generation; warns below it now."""
    lines = output.text.splitlines()
    if "end" not in lines:
        return Verdict(level="unknown", summary=f"sysfs lists no PCI devices ({output.first_line})")
    rows = [line.removeprefix("gpu ").split("|") for line in lines if line.startswith("gpu ")]
    if not rows:
        if board.count or site.gpus.count:
            return Verdict(level="unknown", summary="sysfs shows no GPU; it may not be mounted in this container")
        return Verdict(level="ok", summary="no GPU")
    if board.profile is None:
        return Verdict(level="unknown", summary=board.no_profile)
    verdicts = [_judge(row, board.profile.pcie) for row in rows]
    merged = merge(verdicts)
    if merged.level != "ok":
        return merged
    wanted = board.profile.pcie
    summary = (
        f"{counted(len(rows), 'GPU')} at generation {wanted.generation} or newer with {wanted.width} lanes or more"
    )
    return Verdict(level="ok", summary=summary)


def _judge(row: list[str], wanted: Pcie) -> Verdict:
    address, *values = [printable(value) for value in row]
    width = int(values[0]) if len(values) == 4 and values[0].isdigit() else 0
    if width in _HIDDEN_WIDTHS:
        return Verdict(
            level="unknown",
            summary=f"the link of {address} cannot be read; where a virtual machine hides it, --skip pcie",
        )
    if width < wanted.width:
        return Verdict(
            level="fail",
            summary=f"{address} runs on {width} of {wanted.width} lanes: reseat it or look at its riser",
            action="isolate",
        )
    current, highest = (_GENERATIONS.get(speed.partition(" ")[0]) for speed in (values[2], values[3]))
    if highest is None or current is None:
        return Verdict(level="unknown", summary=f"{address} has a link of unknown speed ({values[2]} of {values[3]})")
    if highest < wanted.generation:
        return Verdict(
            level="fail",
            summary=f"{address} can do PCIe generation {highest}, its model does {wanted.generation}",
            action="isolate",
        )
    if current < wanted.generation:
        return Verdict(
            level="warn",
            summary=f"{address} runs at PCIe generation {current}, not {wanted.generation}: "
            "an idle link may save power, so look again under load",
            action="monitor",
        )
    return Verdict(level="ok", summary=f"{address} is well")


CHECK = BoardCheck(
    source="sysfs-bus-pci of the kernel; imbue-ai/cluster-health (links that are limited)",
    probe=lambda site: PROBE,
    judge=judge,
)
