"""Addresses and interfaces of this machine on the way to another host. Nothing is sent."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # Linux: IPv4 address of an interface


def address_towards(host: str) -> str:
    """This machine's IPv4 address on the route to `host`. Raises OSError where its name has none, or no route leads
    there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(host), 9))
        return str(probe.getsockname()[0])


def addresses_and_interfaces() -> dict[str, str]:
    """The interface of every IPv4 address of this machine, loopback's left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                found[address] = name
    return found


def route_towards(host: str) -> tuple[str, str]:
    """Address and interface with which this machine and `host` reach each other; empty where they cannot be told.

    Where `host` is this machine, the route to it is loopback: then the address that its name has elsewhere, else the
    only one.
    """
    mine = addresses_and_interfaces()
    with contextlib.suppress(OSError, KeyError):
        address = address_towards(host)
        return address, mine[address]
    if len(mine) == 1:
        return next(iter(mine.items()))
    return "", ""
