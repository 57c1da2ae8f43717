"""Adapters and interfaces between nodes: ports, their counters, partitions, firmware; and what RDMA needs of a host."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.checks import Rise, check
from cluster.files.errors import quantity
from cluster.inventory.site import Site
from cluster.probing.probe import VALUE, Output, Probe, printable
from cluster.probing.verdict import Verdict, fail, merge, ok, unknown, warn, with_facts
from cluster.profiles import Board

_PORTS = Probe(
    script=VALUE
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
class _PortState:
    name: str  # mlx5_0:1
    state: str  # ACTIVE
    phys_state: str  # LinkUp
    rate_gbps: float | None
    layer: str  # InfiniBand or Ethernet
    link_downed: int | None

    @property
    def up(self) -> bool:
        return self.state == "ACTIVE" and self.phys_state == "LinkUp"


@check(
    _PORTS,
    "sysfs-class-infiniband of the kernel; Azure/azurehpc-health-checks; rates in cluster/profiles",
    unreadable="sysfs lists no InfiniBand devices",
    rise=Rise(level="fail", action="isolate", meaning="the link does not stay up: look at the cable"),
)
def infiniband(output: Output, site: Site, board: Board) -> Verdict:
    """Ports that the site names must be up at their rate; of others, InfiniBand ports are worth a warning only."""
    ports = [_read_port(row) for row in output.rows("port")]
    named = site.network.hcas
    if named:
        verdict = merge(_judge_named(name, ports, site, board) for name in named)
    elif named is not None or not ports:
        wish = "expects none" if named is not None else "names none"
        verdict = ok(f"{len(ports) or 'no'} InfiniBand ports, and the site {wish}")
    else:
        verdict = _judge_found(ports, site, board)
    if verdict.level == "ok" and ports and named != ():
        rates = sorted({f"{port.rate_gbps:g}" for port in ports if port.up and port.rate_gbps})
        verdict = ok(f"{sum(port.up for port in ports)} ports up at {' and '.join(rates)} Gb/s")
    counters = {f"{port.name} link_downed": port.link_downed for port in ports if port.link_downed is not None}
    return with_facts(verdict, counters=counters, ports={port.name: port.rate_gbps for port in ports})


def _judge_named(name: str, ports: list[_PortState], site: Site, board: Board) -> Verdict:
    found = [port for port in ports if name in (port.name, port.name.partition(":")[0])]
    if not found:
        return fail(f"{name} is absent; load its driver or correct network.hcas")
    return merge(_judge_port(port, site, board, fail) for port in found)


def _judge_found(ports: list[_PortState], site: Site, board: Board) -> Verdict:
    """Without a list from the site, an unplugged port or one for storage is as likely as a fault."""
    ports = [port for port in ports if port.layer == "InfiniBand"] or [port for port in ports if port.up]
    if not any(port.up for port in ports):
        return fail("no port is up; look at cables and the subnet manager")
    verdict = merge(_judge_port(port, site, board, warn) for port in ports)
    if verdict.level == "warn":
        return warn(f"{verdict.summary}; name the compute ports in network.hcas of the site")
    return verdict


def _judge_port(port: _PortState, site: Site, board: Board, bad: Callable[[str], Verdict]) -> Verdict:
    """The rate that is wanted is the site's, else for InfiniBand that of the GPU's model; without both, none is."""
    if not port.up:
        return bad(f"{port.name} is {port.state}, {port.phys_state}; expected ACTIVE, LinkUp")
    wanted = site.network.port_rate_gbps
    if wanted is None and port.layer == "InfiniBand":
        if board.profile is None and board.count:
            return unknown(f"the rate of {port.name}: {board.no_profile}")
        wanted = board.profile.port.rate_gbps if board.profile else None
    if wanted is not None and (port.rate_gbps is None or port.rate_gbps < wanted):
        rate = "an unreadable rate" if port.rate_gbps is None else f"{port.rate_gbps:g} Gb/s"
        return bad(f"{port.name} has {rate}; expected {wanted:g} Gb/s")
    return ok(f"{port.name} is up")


def _read_port(row: str) -> _PortState:
    """`mlx5_0|1|4: ACTIVE|5: LinkUp|400 Gb/sec (4X NDR)|InfiniBand|0|0`."""
    cells = [printable(cell) for cell in row.split("|")]
    device, number, state, phys, rate, layer, downed = (cells + ["?"] * 7)[:7]
    speed = _RATE.match(rate)
    return _PortState(
        name=f"{device}:{number}",
        state=state.partition(": ")[2] or state,
        phys_state=phys.partition(": ")[2] or phys,
        rate_gbps=float(speed[1]) if speed else None,
        layer=layer,
        link_downed=int(downed) if downed.isdigit() else None,
    )


# Growth in an hour from which a counter matters: thresholds of infiniband-diags, which name no time; the hour is ours.
PER_HOUR = {
    "symbol_error": 10,
    "link_error_recovery": 10,
    "port_rcv_errors": 10,
    "local_link_integrity_errors": 10,
    "excessive_buffer_overrun_errors": 10,
    "port_rcv_remote_physical_errors": 100,
    "port_xmit_discards": 100,
    "port_xmit_constraint_errors": 100,
    "port_rcv_constraint_errors": 100,
}
_BETWEEN_SECONDS = 2
_COUNTERS = Probe(
    script=f"""
look() {{
    for port in /sys/class/infiniband/*/ports/*; do
        device=${{port#/sys/class/infiniband/}}
        for name in {" ".join(PER_HOUR)}; do
            v=
            [ -r "$port/counters/$name" ] && read -r v <"$port/counters/$name" &&
                printf '%s %s:%s %s %s\\n' "$1" "${{device%%/*}}" "${{port##*/}}" "$name" "$v"
        done
    done
}}
first=$(look first)
printf '%s\\n' "$first"
[ -z "$first" ] || {{ sleep {_BETWEEN_SECONDS}; look second; }}
echo end
"""
)
_COUNT = re.compile(r"(\S+ [a-z_]+) (\d+)")


@check(
    _COUNTERS,
    "sysfs-class-infiniband of the kernel; linux-rdma/infiniband-diags, error thresholds",
    unreadable="the ports' counters cannot be read",
    rise=Rise(
        level="warn",
        action="monitor",
        meaning="the link repeats or loses packets: look at the cable",
        per_hour=PER_HOUR,
    ),
)
def port_errors(output: Output, site: Site, board: Board) -> Verdict:
    """Warns on counters that grow between two readings; the history judges slower growth."""
    first, second = (
        {match[1]: int(match[2]) for row in output.rows(look) if (match := _COUNT.fullmatch(printable(row)))}
        for look in ("first", "second")
    )
    grown = {name: value - first[name] for name, value in second.items() if value > first.get(name, value)}
    if grown:
        rates = {name: growth / _BETWEEN_SECONDS for name, growth in sorted(grown.items())}
        listed = ", ".join(f"{name} by {rate:g} a second" for name, rate in rates.items())
        verdict = warn(f"errors rise: {listed}; look at the cable")
    else:
        ports = {name.partition(" ")[0] for name in first}
        verdict = ok(f"no error counter of {len(ports) or 'no'} ports rises")
    return with_facts(verdict, counters=second or first)


_PKEYS = Probe(
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


@check(
    _PKEYS,
    "InfiniBand architecture, partitioning; sysfs-class-infiniband of the kernel",
    unreadable="sysfs lists no InfiniBand devices",
)
def pkey(output: Output, site: Site, board: Board) -> Verdict:
    """Fails for a port that the site names and that is no full member; warns for any other port that is up."""
    keys: dict[str, str] = {}
    verdicts = []
    for row in output.rows("port"):
        name, layer, state, listed = (*map(printable, row.split("|")), "", "", "")[:4]
        named = {name, name.partition(":")[0]} & set(site.network.hcas or ())
        if layer != "InfiniBand" or (state != "ACTIVE" and not named):
            continue
        keys[name] = listed.strip()
        if not any(int(key, 16) & _FULL for key in listed.split() if key.startswith("0x")):
            had = f"(keys: {listed.strip() or 'none'})"
            summary = f"{name} is no full member of a partition {had}; ask the subnet manager"
            verdicts.append(fail(summary) if named else warn(summary))
    verdict = merge(verdicts) if verdicts else ok(f"{len(keys) or 'no'} InfiniBand ports with full membership")
    return with_facts(verdict, pkeys=sorted(set(keys.values())) or None)


_ADAPTERS = Probe(
    script=VALUE
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


@check(
    _ADAPTERS,
    "sysfs-class-infiniband of the kernel (fw_ver, board_id)",
    unreadable="sysfs lists no adapters",
)
def adapters(output: Output, site: Site, board: Board) -> Verdict:
    """Warns where adapters of one kind carry different firmware; cluster/discovery/drift.py compares the nodes."""
    rows = [row.split("|") for row in output.rows("adapter")]
    if not rows:
        return ok("no adapter")
    by_kind: dict[str, set[str]] = {}
    for _, kind, version in (row for row in rows if len(row) == 3):
        by_kind.setdefault(printable(kind), set()).add(printable(version))
    firmware = {kind: sorted(versions) for kind, versions in sorted(by_kind.items())}
    several = "; ".join(f"{kind}: {', '.join(versions)}" for kind, versions in firmware.items() if len(versions) > 1)
    if several:
        verdict = warn(f"adapters of one kind differ in firmware ({several})")
    else:
        listed = ", ".join(f"{kind} {versions[0]}" for kind, versions in firmware.items())
        verdict = ok(f"{len(rows)} adapters, firmware {listed}")
    mtus = sorted({int(mtu) for row in output.rows("mtu") if (mtu := row.rpartition("|")[2]).isdigit()})
    return with_facts(verdict, firmware=firmware, mtu=" and ".join(map(str, mtus)) or None)


@check(
    Probe(script="command -v ip >/dev/null 2>&1 || exit 127\nip -json addr show"),
    "ip-address(8) of iproute2",
)
def interface(output: Output, site: Site, board: Board) -> Verdict:
    """Warns where the interface differs from the site's; a site that names none accepts any."""
    wanted = site.network.interface
    if output.exit_status == 127:
        if wanted is None and site.network.mtu is None:
            return ok("no ip command; the site names no interface to look for")
        return unknown("no ip command to read interfaces with; install iproute2")
    try:
        links: dict[str, dict[str, Any]] = {str(link["ifname"]): link for link in json.loads(output.text) if link}
    except (ValueError, TypeError, KeyError):
        return unknown(f"ip -json printed no list of interfaces ({output.first_line})")
    up = {name: link for name, link in links.items() if _addresses(link) and "UP" in link.get("flags", ())}
    if wanted is None:
        return ok(f"up: {', '.join(printable(name) for name in up if name != 'lo') or 'none but loopback'}")
    if wanted not in links:
        there = ", ".join(printable(name) for name in sorted(links))
        return warn(f"{wanted} is absent; there are {there} (network.interface)")
    link = links[wanted]
    if wanted not in up or link.get("operstate") == "DOWN":
        state = printable(str(link.get("operstate", "?")))
        return warn(f"{wanted} is {state} or has no address; expected it up (network.interface)")
    mtu = link.get("mtu")
    if site.network.mtu is not None and mtu != site.network.mtu:
        return warn(f"{wanted} has an MTU of {mtu}; the site expects {site.network.mtu} (network.interface)")
    return ok(f"{wanted} is up at {_addresses(link)[0]}, MTU {mtu}", facts={"mtu": mtu})


def _addresses(link: dict[str, Any]) -> list[str]:
    return [printable(str(entry.get("local"))) for entry in link.get("addr_info", ()) if entry.get("local")]


_MEMLOCK = Probe(
    script="""
printf 'memlock %s\\n' "$(ulimit -l)"
printf 'hcas %s\\n' "$(ls /sys/class/infiniband 2>/dev/null | wc -l)"
"""
)


@check(_MEMLOCK, "NCCL user guide, troubleshooting; the limit: cluster/profiles/node.yaml")
def memlock(output: Output, site: Site, board: Board) -> Verdict:
    """Warns where a process may lock too little memory to register it with an adapter."""
    limit, hcas = output.said.get("memlock", ""), output.said.get("hcas", "")
    if not (limit == "unlimited" or limit.isdigit()) or not hcas.isdigit():
        return unknown(f"the limit of locked memory cannot be read ({output.first_line})")
    if limit == "unlimited":
        return ok("locked memory is unlimited")
    gib, least = int(limit) / 2**20, board.limits.memlock_least_gib
    if gib >= least:
        return ok(f"{gib:.0f} GiB of memory may be locked")
    limited = f"{quantity(gib)} GiB" if gib >= 1 else f"{quantity(gib * 1024)} MiB"
    if not int(hcas):
        return ok(f"{limited} of memory may be locked; there is no adapter that needs more")
    return warn(f"only {limited} of memory may be locked, expected {least:g}; set memlock in limits.conf")


_PEERMEM = Probe(
    script="""
awk '$1 == "nvidia_peermem" || $1 == "nv_peer_mem" { print "module " $1 }' /proc/modules
printf 'hcas %s\\n' "$(ls /sys/class/infiniband 2>/dev/null | wc -l)"
"""
)


@check(_PEERMEM, "NVIDIA GPUDirect RDMA documentation; lsmod")
def peermem(output: Output, site: Site, board: Board) -> Verdict:
    """Warns when a node with GPUs and adapters has neither nvidia_peermem nor its predecessor loaded."""
    said = output.said
    if not said.get("hcas", "").isdigit():
        return unknown(f"the kernel's modules cannot be listed ({output.first_line})")
    if not int(said["hcas"]) or not board.count:
        return ok("no GPU and adapter to join")
    if "module" in said:
        return ok(f"{said['module']} is loaded")
    return warn("nvidia_peermem is not loaded; run modprobe nvidia_peermem unless this kernel uses DMA-BUF")
