"""Adapters: their firmware and the MTU of their interfaces; cluster/discovery/drift.py compares the nodes."""

from __future__ import annotations

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing import kernel_files
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict, with_facts

PROBE = Probe(
    script=kernel_files.VALUE
    + """
for device in /sys/class/infiniband/*; do
    [ -e "$device" ] || continue
    value "$device/fw_ver"; firmware=$v
    value "$device/board_id"; board=$v
    printf 'adapter %s|%s|%s\\n' "${device##*/}" "$board" "$firmware"
    for net in "$device"/device/net/*; do
        [ -r "$net/mtu" ] || continue
        value "$net/operstate"; [ "$v" = up ] || continue
        value "$net/mtu"; printf 'mtu %s|%s\\n' "${net##*/}" "$v"
    done
done
echo end
"""
)


def judge(output: Output, site: Site) -> Verdict:
    """Warns where adapters of one kind carry different firmware within the node."""
    lines = output.text.splitlines()
    if "end" not in lines:
        return Verdict(level="unknown", summary=f"sysfs lists no adapters ({output.first_line})")
    rows = [line.removeprefix("adapter ").split("|") for line in lines if line.startswith("adapter ")]
    firmware: dict[str, set[str]] = {}
    for _, board, version in (row for row in rows if len(row) == 3):
        firmware.setdefault(printable(board), set()).add(printable(version))
    mtus = sorted(
        {int(mtu) for line in lines if line.startswith("mtu ") and (mtu := line.rpartition("|")[2]).isdigit()}
    )
    several = {board: versions for board, versions in firmware.items() if len(versions) > 1}
    if several:
        listed = "; ".join(f"{board}: {', '.join(sorted(versions))}" for board, versions in sorted(several.items()))
        verdict = Verdict(level="warn", summary=f"adapters of one kind differ in firmware ({listed})", action="monitor")
    elif not rows:
        return Verdict(level="ok", summary="no adapter")
    else:
        listed = ", ".join(f"{board} {next(iter(versions))}" for board, versions in sorted(firmware.items()))
        verdict = Verdict(level="ok", summary=f"{len(rows)} adapters, firmware {listed}")
    return with_facts(
        verdict,
        firmware={board: sorted(versions) for board, versions in sorted(firmware.items())},
        mtu=" and ".join(map(str, mtus)) or None,
    )


CHECK = Check(source="sysfs-class-infiniband of the kernel (fw_ver, board_id)", probe=lambda site: PROBE, judge=judge)
