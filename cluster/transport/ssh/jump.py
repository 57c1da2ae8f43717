"""One connection to each jump host, shared by all hosts behind it and closed when the last of them is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

import paramiko

from cluster.inventory.hosts import Host
from cluster.transport.runner import Unreachable

Opened = Callable[[Host, float], AbstractContextManager[paramiko.Transport]]

REFUSED_SECONDS = 10.0  # a jump host that failed is not tried again for each of the hosts behind it


@dataclass(slots=True)
class _Shared:
    """The shared connection to one jump host. `lock` is held while it opens: all hosts behind it wait for that."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    transport: paramiko.Transport | None = None
    closing: ExitStack = field(default_factory=ExitStack)
    failure: str = ""
    failed_at: float = 0.0


class JumpHosts:
    """The open connections to jump hosts; `open_host` makes one, itself through a jump host if need be."""

    def __init__(self, open_host: Opened) -> None:
        self._open_host = open_host
        self._shared: dict[Host, _Shared] = {}
        self._lock = threading.Lock()

    @contextmanager
    def opened(self, host: Host, seconds: float) -> Iterator[paramiko.Transport]:
        """The connection to a jump host, opened when first needed. Raises Unreachable naming the jump host."""
        with self._lock:
            shared = self._shared.setdefault(host, _Shared())
        with shared.lock:
            transport = self._current(shared, host, seconds)
            shared.users += 1
        try:
            yield transport
        finally:
            with shared.lock:
                shared.users -= 1
                if not shared.users:
                    shared.transport = None
                    shared.closing.close()

    def _current(self, shared: _Shared, host: Host, seconds: float) -> paramiko.Transport:
        if shared.transport is not None and shared.transport.is_active():
            return shared.transport
        if shared.failure and time.monotonic() - shared.failed_at < REFUSED_SECONDS:
            raise Unreachable(shared.failure)
        try:
            shared.transport = shared.closing.enter_context(self._open_host(host, seconds))
        except Unreachable as error:
            shared.failure, shared.failed_at = f"the jump host {error}", time.monotonic()
            raise Unreachable(shared.failure) from None
        return shared.transport


class Tunnel:
    """A channel through a jump host, as the socket of the connection inside it.

    A channel that is closed by one thread while another sends may send after its end, upon which sshd ends the jump
    host's whole connection, and with it every other host's. So closing waits until a send is over, and none follows.
    """

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._closed = False

    def send(self, content: bytes) -> int:
        with self._lock:
            if self._closed:
                raise OSError("the tunnel is closed")
            return self._channel.send(content)

    def recv(self, size: int) -> bytes:
        return self._channel.recv(size)

    def fileno(self) -> int:
        """Readable when the channel is."""
        return self._channel.fileno()

    def settimeout(self, seconds: float | None) -> None:
        self._channel.settimeout(seconds)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._channel.close()
