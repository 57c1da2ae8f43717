"""A TCP port for one trial's rendezvous, reserved against all other processes of this machine.

Ports come from outside the range that the kernel assigns by itself. Inside it, any outgoing connection or listener
without a fixed port, such as those of NCCL and Gloo, can get the same number; rank 0 then fails with EADDRINUSE.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
RESERVED_PORTS = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")
# Below lie the ports of well-known services (Redis 6379, Jupyter 8888, Ray's workers 10002-19999).
LOWEST, HIGHEST = 20000, 65535
# With fewer to choose from, several runs on one machine would often draw the same port.
FEWEST = 64
# How torch, Gloo and NCCL report that another process has the port.
_TAKEN = ("eaddrinuse", "address already in use")


@contextmanager
def reserve_port(candidates: Sequence[int] | None = None) -> Iterator[int]:
    """Yield a free port, reserved until the end of the block.

    Binding is what reserves it, also against other runs: the first bind does without SO_REUSEADDR and so succeeds only
    where no socket has the port on any address. Set afterwards, the option lets rank 0 listen on the port all the same,
    because our socket never listens and a TCPStore sets it too.
    Raises OSError when every candidate is taken.
    """
    ports = list(usable_ports() if candidates is None else candidates)
    random.shuffle(ports)  # runs that start together do not queue for the same ones
    with _socket() as holder:
        port = next((port for port in ports if _bind(holder, port)), None)
        if port is None:
            raise OSError(
                f"all {len(ports)} ports for a trial's rendezvous are in use; end the processes that hold them"
            )
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield port


def usable_ports(ephemeral: str | None = None, reserved: str | None = None) -> list[int]:
    """Ports a rendezvous may use, ascending.

    `ephemeral` and `reserved` are texts as in /proc/sys/net/ipv4: "32768 60999" and "8080,9000-9100"; read there when
    None. Where the kernel's own range leaves too few, ports inside it count as well.
    """
    first, last = map(int, (_read(EPHEMERAL_RANGE, "32768 60999") if ephemeral is None else ephemeral).split())
    kept = _ranges(_read(RESERVED_PORTS, "") if reserved is None else reserved)
    free = [port for port in range(LOWEST, HIGHEST + 1) if not any(low <= port <= high for low, high in kept)]
    outside = [port for port in free if not first <= port <= last]
    return outside if len(outside) >= FEWEST else free


def port_was_taken(reason: str) -> bool:
    """Whether a trial failed because another process had taken its port."""
    return any(words in reason.casefold() for words in _TAKEN)


def _socket() -> socket.socket:
    """A socket for all addresses: a dual-stack IPv6 socket, or an IPv4 one where there is no IPv6."""
    if not socket.has_dualstack_ipv6():
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    both = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return both


def _bind(holder: socket.socket, port: int) -> bool:
    try:
        holder.bind(("", port))
    except OSError:  # in use, or not permitted
        return False
    return True


def _ranges(text: str) -> list[tuple[int, int]]:
    """ "8080,9000-9100" as pairs of first and last port."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return [(int(end[0]), int(end[-1])) for end in ends]


def _read(path: Path, absent: str) -> str:
    return path.read_text(encoding="ascii") if path.exists() else absent


def answers(address: str, port: int, seconds: float = 2.0) -> bool:
    """Whether a process listens there. The probe needs only the host's kernel."""
    try:
        with socket.create_connection((address, port), seconds):
            return True
    except OSError:
        return False


class Listener:
    """A port of another host, lost when it has accepted no connection for `seconds`."""

    def __init__(self, address: str, port: int, seconds: float) -> None:
        self._place, self._seconds = (address, port), seconds
        self._reached_at = time.monotonic()

    def is_lost(self) -> bool:
        """Look now."""
        if answers(*self._place):
            self._reached_at = time.monotonic()
        return time.monotonic() - self._reached_at > self._seconds
