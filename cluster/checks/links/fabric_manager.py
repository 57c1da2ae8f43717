"""Fabric manager: is the service up that programs the NVSwitches of SXM boards?"""

from __future__ import annotations

from cluster.checks import BoardCheck
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict
from cluster.profiles import NO_GPUS, Board

PROBE = Probe(
    script="""
printf 'service %s\\n' "$(systemctl is-active nvidia-fabricmanager 2>/dev/null)"
[ -d /run/systemd/system ] && echo 'init systemd' || echo 'init other'
pgrep -x nv-fabricmanage >/dev/null 2>&1 && echo 'process yes' || echo 'process no'
"""  # the kernel keeps 15 characters of a program's name
)


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Fails where a board with NVSwitches has no running fabric manager. Virtual machines with one GPU need none."""
    said = dict(line.partition(" ")[::2] for line in output.text.splitlines())
    if said.get("process") not in ("yes", "no") or "init" not in said:
        return Verdict(level="unknown", summary=f"the service's state cannot be read ({output.first_line})")
    if not board.count and not site.gpus.count:
        return Verdict(level="ok", summary="no GPU, so no fabric")
    if board.is_lone(site.gpus.count):
        return Verdict(level="ok", summary="one GPU, so no fabric")
    if board.profile is None:
        return Verdict(level="unknown", summary=board.no_profile)
    if not board.profile.fabric.manager:
        return Verdict(level="ok", summary=f"{board.name} has no NVSwitches")
    service = said.get("service") or "unknown"
    if service == "active" or said["process"] == "yes":
        return Verdict(level="ok", summary="nvidia-fabricmanager is active")
    if said["init"] != "systemd":
        if board.profile.fabric.registration:
            return Verdict(level="ok", summary="no service manager in this container; see gpu_fabric for its result")
        return Verdict(level="unknown", summary="no service manager in this container; check the host itself")
    return Verdict(
        level="fail",
        summary=f"nvidia-fabricmanager is {service}; start the version that matches the driver",
        action="reboot",
    )


CHECK = BoardCheck(
    source="NVIDIA Fabric Manager user guide; systemctl is-active nvidia-fabricmanager",
    probe=lambda site: PROBE,
    judge=judge,
)
