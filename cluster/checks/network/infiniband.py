"""InfiniBand and RoCE ports: up, at their rate, and staying up?"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cluster.checks import BoardCheck, Rise
from cluster.inventory.site import Site
from cluster.probing import kernel_files
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict, merge, with_facts
from cluster.profiles import NO_GPUS, Board

PROBE = Probe(
    script=kernel_files.VALUE
    + """
for port in /sys/class/infiniband/*/ports/*; do
    [ -d "$port" ] || continue
    device=${port#/sys/class/infiniband/}
    line="port ${device%%/*}|${port##*/}"
    for name in state phys_state rate link_layer counters/link_downed counters/symbol_error; do
        value "$port/$name"; line="$line|$v"
    done
    printf '%s\\n' "$line"
done
echo end
"""
)
_RATE = re.compile(r"([\d.]+) Gb/sec")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Port:
    name: str  # mlx5_0:1
    state: str  # ACTIVE
    phys_state: str  # LinkUp
    rate_gbps: float | None
    layer: str  # InfiniBand or Ethernet
    link_downed: int | None

    @property
    def up(self) -> bool:
        return self.state == "ACTIVE" and self.phys_state == "LinkUp"


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Ports that the site names must be up at their rate; of others, InfiniBand ports are worth a warning only."""
    lines = output.text.splitlines()
    if "end" not in lines:
        return Verdict(level="unknown", summary=f"sysfs lists no InfiniBand devices ({output.first_line})")
    ports = [_read(line.removeprefix("port ")) for line in lines if line.startswith("port ")]
    counters = {f"{port.name} link_downed": port.link_downed for port in ports if port.link_downed is not None}
    named = site.network.hcas
    if named:
        verdict = merge(_judge_named(name, ports, site, board) for name in named)
    elif named is not None or not ports:
        wish = "expects none" if named is not None else "names none"
        verdict = Verdict(level="ok", summary=f"{len(ports) or 'no'} InfiniBand ports, and the site {wish}")
    else:
        verdict = _judge_found(ports, site, board)
    if verdict.level == "ok" and ports and named != ():
        rates = sorted({f"{port.rate_gbps:g}" for port in ports if port.up and port.rate_gbps})
        verdict = Verdict(
            level="ok", summary=f"{sum(port.up for port in ports)} ports up at {' and '.join(rates)} Gb/s"
        )
    return with_facts(verdict, counters=counters, ports={port.name: port.rate_gbps for port in ports})


def _judge_named(name: str, ports: list[_Port], site: Site, board: Board) -> Verdict:
    found = [port for port in ports if name in (port.name, port.name.partition(":")[0])]
    if not found:
        return Verdict(
            level="fail", summary=f"{name} is absent; load its driver or correct network.hcas", action="isolate"
        )
    return merge(_judge_port(port, _rate_wanted(port, site, board), board, "fail") for port in found)


def _judge_found(ports: list[_Port], site: Site, board: Board) -> Verdict:
    """Without a list from the site, an unplugged port or one for storage is as likely as a fault."""
    ports = [port for port in ports if port.layer == "InfiniBand"] or [port for port in ports if port.up]
    if not any(port.up for port in ports):
        return Verdict(level="fail", summary="no port is up; look at cables and the subnet manager", action="isolate")
    verdict = merge(_judge_port(port, _rate_wanted(port, site, board), board, "warn") for port in ports)
    if verdict.level in ("ok", "unknown"):
        return verdict
    return Verdict(
        level=verdict.level,
        summary=f"{verdict.summary}; name the compute ports in network.hcas of the site",
        action=verdict.action,
    )


def _rate_wanted(port: _Port, site: Site, board: Board) -> float | None:
    """Gb/s by the site, else by the GPU's model for InfiniBand; None: nothing to compare with."""
    if site.network.port_rate_gbps is not None:
        return site.network.port_rate_gbps
    return board.profile.port.rate_gbps if board.profile and port.layer == "InfiniBand" else None


def _judge_port(port: _Port, wanted: float | None, board: Board, level: str) -> Verdict:
    bad, action = ("fail", "isolate") if level == "fail" else ("warn", "monitor")
    if not port.up:
        summary = f"{port.name} is {port.state}, {port.phys_state}; expected ACTIVE, LinkUp"
        return Verdict(level=bad, summary=summary, action=action)  # type: ignore[arg-type]
    if wanted is None and board.count and port.layer == "InfiniBand":
        return Verdict(level="unknown", summary=f"the rate of {port.name}: {board.no_profile}")
    if wanted is not None and (port.rate_gbps is None or port.rate_gbps < wanted):
        rate = "an unreadable rate" if port.rate_gbps is None else f"{port.rate_gbps:g} Gb/s"
        summary = f"{port.name} has {rate}; expected {wanted:g} Gb/s"
        return Verdict(level=bad, summary=summary, action=action)  # type: ignore[arg-type]
    return Verdict(level="ok", summary=f"{port.name} is up")


def _read(row: str) -> _Port:
    """`mlx5_0|1|4: ACTIVE|5: LinkUp|400 Gb/sec (4X NDR)|InfiniBand|0|0`."""
    cells = [printable(cell) for cell in row.split("|")]
    device, number, state, phys, rate, layer, downed = (cells + ["?"] * 7)[:7]
    speed = _RATE.match(rate)
    return _Port(
        name=f"{device}:{number}",
        state=state.partition(": ")[2] or state,
        phys_state=phys.partition(": ")[2] or phys,
        rate_gbps=float(speed[1]) if speed else None,
        layer=layer,
        link_downed=int(downed) if downed.isdigit() else None,
    )


CHECK = BoardCheck(
    source="sysfs-class-infiniband of the kernel; Azure/azurehpc-health-checks; rates in cluster/profiles",
    probe=lambda site: PROBE,
    judge=judge,
    rise=Rise(level="fail", action="isolate", meaning="the link does not stay up: look at the cable"),
)
