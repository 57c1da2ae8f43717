"""Reading /proc/net/route, for nodes whose `ip` is absent or too old to print JSON."""

from __future__ import annotations

import ipaddress

_UP, _REJECT = 0x1, 0x200  # RTF_UP, RTF_REJECT


def interface_for(target: str, table: str) -> str:
    """Interface of the most specific route to an IPv4 address, of equals the one with the smallest metric; "" for none.

    Numbers in the table are in the host's byte order, which is little-endian on every machine we know of with GPUs.
    The table leaves out a node's own addresses, so the way to one of them is the interface of its network.
    """
    address = ipaddress.ip_address(target)
    if address.version != 4:
        return ""
    if address.is_loopback:
        return "lo"
    best: tuple[int, int, str] | None = None
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        try:
            destination, flags, mask = _little(fields[1]), int(fields[3], 16), _little(fields[7])
            metric = int(fields[6])
        except ValueError:
            continue
        if flags & (_UP | _REJECT) == _UP and int(address) & mask == destination:
            candidate = (-mask.bit_count(), metric, fields[0])
            best = min(best, candidate) if best else candidate
    return best[2] if best else ""


def _little(text: str) -> int:
    return int.from_bytes(bytes.fromhex(text), "little")
