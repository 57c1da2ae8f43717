"""The network interface that the kernel would use towards another node, found without any program."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # netdevice(7)
_ANY_PORT = 9  # nothing is sent: connecting a datagram socket only chooses a route


def interface_towards(address: str) -> str | None:
    """Its name, such as eth0; None when no interface has the source address (IPv6, or several addresses on one)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError:
            return None
        source = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # no IPv4 address on this one
            if socket.inet_ntoa(answer[20:24]) == source:
                return name
    return None
