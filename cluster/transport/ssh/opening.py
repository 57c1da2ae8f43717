"""Opening connections: to a host directly, or through a jump host whose one connection all its hosts share."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import paramiko

from cluster.inventory.hosts import Host
from cluster.transport.runner import Connect, Runner, Unreachable
from cluster.transport.ssh.config import SshConfig, Way, usual_files
from cluster.transport.ssh.jump import JumpHosts, Tunnel
from cluster.transport.ssh.known_hosts import HostKey, KnownHosts, host_name
from cluster.transport.ssh.login import PrivateKeys, SlowLogin, log_in
from cluster.transport.ssh.session import FAILURES, SshRunner, explain

CONNECT_SECONDS = 10.0  # each for TCP and for key exchange with login: slower than this is not a node to run on
# Key exchange and login take some 3 ms of this machine's processor (docs/notes/2026-11-21-cluster-times.md): more at
# once delays all of them. A host that has not sent its greeting does not count, as some never send one.
LOGINS_AT_ONCE = 64
TURN_SECONDS = 60.0  # the longest wait for a turn: after this the others must hang
KEEPALIVE_SECONDS = 30  # a firewall drops a connection that is silent while a long command runs
# A node that answers nothing for so long, not even at the level of TCP, is lost: without this a command on it would
# wait for its own deadline, which may be minutes. A node whose programs are slow still answers.
DEAD_SECONDS = 20
_PROBE_SECONDS = 5  # between TCP's probes of a silent connection
_SYSTEM_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")

_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")  # signature algorithms of a key known as ssh-rsa

# paramiko logs tracebacks of its own threads to the root logger; the relevant errors are raised here as exceptions.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


@dataclass(frozen=True, kw_only=True, slots=True)
class SshOptions:
    """How connections are made, the same for all hosts."""

    known_hosts: Path = field(default_factory=lambda: Path.home() / ".ssh" / "known_hosts")
    accept_new_host_keys: bool = False
    config: tuple[Path, ...] = field(default_factory=usual_files)


def connector(options: SshOptions) -> Connect:
    """`Connect` over SSH with these options. Many threads may use it; keys, known_hosts and jump hosts are shared."""
    opener = _Opener(options)

    @contextmanager
    def connect(host: Host, seconds: float) -> Iterator[Runner]:
        with opener.opened(host, seconds) as transport:
            yield SshRunner(host, transport)

    return connect


class _Opener:
    """Opens connections; known_hosts, private keys and jump hosts are looked up once for all of them."""

    def __init__(self, options: SshOptions) -> None:
        self._options = options
        self._known = KnownHosts(_SYSTEM_KNOWN_HOSTS, options.known_hosts, accept_new=options.accept_new_host_keys)
        self._config = SshConfig(options.config)
        self._keys = PrivateKeys()
        self._jumps = JumpHosts(self.opened)
        self._turns = threading.Semaphore(LOGINS_AT_ONCE)

    @contextmanager
    def opened(self, host: Host, seconds: float) -> Iterator[paramiko.Transport]:
        """A connection that is logged in, closed on leaving. Raises Unreachable."""
        seconds = min(seconds, CONNECT_SECONDS)
        way = self._config.way(host)
        with ExitStack() as stack:
            try:
                ends_at = time.monotonic() + seconds
                connection = self._reach(way, ends_at, stack)
                _wait_for_greeting(connection, ends_at)
                with self._turn():
                    ends_at = time.monotonic() + seconds  # waiting for a turn is not the host's fault
                    name = way.host_key_alias or host_name(way.address, way.port)
                    transport = stack.enter_context(self._transport(connection, name, ends_at))
                    log_in(
                        transport, way.user, way.key, self._keys,
                        ends_at=ends_at, files=way.key_files, files_only=way.key_files_only,
                    )  # fmt: skip
            except FAILURES as error:
                sentence = explain(error, way.address, way.port, way.user, seconds, self._options.known_hosts)
                raise Unreachable(sentence) from None
            transport.set_keepalive(KEEPALIVE_SECONDS)
            yield transport

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._turns.acquire(timeout=TURN_SECONDS):
            raise TimeoutError
        try:
            yield
        finally:
            self._turns.release()

    def _reach(self, way: Way, ends_at: float, stack: ExitStack) -> socket.socket | Tunnel:
        """Bytes to and from the host's sshd."""
        if way.jump is None:
            direct = stack.enter_context(socket.create_connection((way.address, way.port), _left(ends_at)))
            _notice_death(direct)
            return direct
        through = stack.enter_context(self._jumps.opened(way.jump, _left(ends_at)))
        origin = ("127.0.0.1", 0)  # unused, but the protocol requires one
        channel = through.open_channel("direct-tcpip", (way.address, way.port), origin, timeout=_left(ends_at))
        return stack.enter_context(closing(Tunnel(channel)))

    @contextmanager
    def _transport(self, connection: socket.socket | Tunnel, name: str, ends_at: float) -> Iterator[paramiko.Transport]:
        """Keys are exchanged and the host's own key is verified before anything else is sent."""
        transport = paramiko.Transport(connection)  # type: ignore[arg-type]  # needs send, recv, settimeout, close
        try:
            transport.banner_timeout = _left(ends_at)
            options = transport.get_security_options()
            options.key_types = _first(_signatures(self._known.kinds(name)), options.key_types)
            done = threading.Event()
            transport.start_client(event=done)
            if not done.wait(_left(ends_at)):
                raise SlowLogin
            if not transport.is_active():
                raise transport.get_exception() or paramiko.SSHException("it ended the key exchange")
            key = transport.get_remote_server_key()
            self._known.verify(name, HostKey(key.get_name(), key.asbytes()))
            yield transport
        finally:
            transport.close()


def _wait_for_greeting(connection: socket.socket | Tunnel, ends_at: float) -> None:
    """Wait for the greeting that an sshd sends first; it stays unread."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(1000 * _left(ends_at)):
        raise TimeoutError


def _notice_death(connection: socket.socket) -> None:
    """Let the kernel break a connection to a node that is gone, also while nothing is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_SECONDS // _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_SECONDS)


def _left(ends_at: float) -> float:
    """Seconds until then. Raises TimeoutError when there are none."""
    left = ends_at - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _first(preferred: Sequence[str], offered: Sequence[str]) -> tuple[str, ...]:
    """The offered names, the preferred ones of them first."""
    front = tuple(name for name in preferred if name in offered)
    return front + tuple(name for name in offered if name not in front)


def _signatures(kinds: list[str]) -> tuple[str, ...]:
    """Signature algorithms of the kinds of key a host is known by, so that it shows the one we can compare."""
    return tuple(name for kind in kinds for name in (_RSA_SIGNATURES if kind == "ssh-rsa" else (kind,)))
