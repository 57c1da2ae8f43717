"""SSH (paramiko): verified host keys, keys from file or agent, jump hosts, quoted arguments, deadlines.

Host keys are compared with known_hosts. An unknown host is refused unless the caller chose to accept new ones, which
are then added to the file; a host whose key has changed is refused always (OpenSSH's `accept-new`). paramiko is
imported here and in `ssh_files`, and nowhere else.
"""

from __future__ import annotations

import functools
import logging
import math
import select
import shlex
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import paramiko

from cluster.files.errors import quantity
from cluster.inventory.hosts import Host
from cluster.transport.runner import (
    Connect,
    Reader,
    Runner,
    RunningCommand,
    Unreachable,
    chunks,
    drain_all,
)
from cluster.transport.ssh_files import (
    BadHostKey,
    HostKey,
    KnownHosts,
    SshConfig,
    SshSettings,
    UnusableKeyFile,
    candidates,
    usual_files,
)

CONNECT_SECONDS = 10.0  # each for TCP and for key exchange with login: slower than this is not a node to run on
# Key exchange and login take some 3 ms of this machine's processor (docs/notes/2026-11-21-cluster-times.md): more at
# once delays all of them. A host that has not sent its greeting does not count, as some never send one.
LOGINS_AT_ONCE = 64
KEEPALIVE_SECONDS = 30  # a firewall drops a connection that is silent while a long command runs
# A node that answers nothing for so long, not even at the level of TCP, is lost: without this a command on it would
# wait for its own deadline, which may be minutes. A node whose programs are slow still answers.
DEAD_SECONDS = 20
_PROBE_SECONDS = 5  # between TCP's probes of a silent connection
_REFUSED_SECONDS = 10.0  # a jump host that failed is not tried again for each of the hosts behind it
_SYSTEM_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")
_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")  # signature algorithms of a key known as ssh-rsa

# paramiko logs tracebacks of its own threads to the root logger; the relevant errors are raised here as exceptions.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


@dataclass(frozen=True, kw_only=True, slots=True)
class SshOptions:
    """How connections are made, the same for all hosts."""

    known_hosts: Path | None = None  # in place of each host's own; None: that one, or ~/.ssh/known_hosts
    accept_new_host_keys: bool = False
    config: tuple[Path, ...] = field(default_factory=usual_files)


def connector(options: SshOptions) -> Connect:
    """`Connect` over SSH with these options. Many threads may use it; connections to jump hosts are shared."""
    opener = _Opener(options)

    @contextmanager
    def connect(host: Host, seconds: float) -> Iterator[Runner]:
        with opener.opened(host, seconds) as transport:
            yield SshRunner(host, transport)

    return connect


@dataclass(slots=True)
class _Shared:
    """The connection to one jump host. `lock` is held while it opens: all hosts behind it wait for that."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    transport: paramiko.Transport | None = None
    closing: ExitStack = field(default_factory=ExitStack)
    failure: str = ""
    failed_at: float = 0.0


class _Opener:
    """Opens connections. One to a jump host stays open until it breaks, or this program ends."""

    def __init__(self, options: SshOptions) -> None:
        self._options = options
        self._known: dict[Path, KnownHosts] = {}
        self._config = SshConfig(options.config)
        self._jumps: dict[Host, _Shared] = {}
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(LOGINS_AT_ONCE)

    @contextmanager
    def opened(self, host: Host, seconds: float) -> Iterator[paramiko.Transport]:
        """A connection that is logged in, closed on leaving. Raises Unreachable."""
        seconds = min(seconds, CONNECT_SECONDS)
        settings = self._config.settings(host)
        path = (self._options.known_hosts or settings.known_hosts or Path("~/.ssh/known_hosts")).expanduser()
        with self._lock:
            new = KnownHosts(_SYSTEM_KNOWN_HOSTS, path, accept_new=self._options.accept_new_host_keys)
            known = self._known.setdefault(path, new)
        with ExitStack() as stack:
            try:
                ends_at = time.monotonic() + seconds
                connection = self._reach(settings, ends_at, stack)
                _wait_for_greeting(connection, ends_at)
                with self._turns:
                    ends_at = time.monotonic() + seconds  # waiting for a turn is not the host's fault
                    transport = stack.enter_context(_transport(connection, known, settings.known_as, ends_at))
                    _log_in(transport, settings, ends_at)
            except _FAILURES as error:
                raise Unreachable(_sentence(error, settings, seconds, path)) from None
            transport.set_keepalive(KEEPALIVE_SECONDS)
            yield transport

    def _reach(self, settings: SshSettings, ends_at: float, stack: ExitStack) -> socket.socket | Tunnel:
        """Bytes to and from the host's sshd."""
        if settings.jump is None:
            direct = stack.enter_context(socket.create_connection((settings.address, settings.port), _left(ends_at)))
            _notice_death(direct)
            return direct
        through = self.jump(settings.jump, _left(ends_at))
        origin = ("127.0.0.1", 0)  # unused, but the protocol requires one
        channel = through.open_channel(
            "direct-tcpip", (settings.address, settings.port), origin, timeout=_left(ends_at)
        )
        return stack.enter_context(closing(Tunnel(channel)))

    def jump(self, host: Host, seconds: float) -> paramiko.Transport:
        """The connection to a jump host, itself perhaps through another. Raises Unreachable naming the jump host."""
        with self._lock:
            shared = self._jumps.setdefault(host, _Shared())
        with shared.lock:
            if shared.transport is not None and shared.transport.is_active():
                return shared.transport
            if shared.failure and time.monotonic() - shared.failed_at < _REFUSED_SECONDS:
                raise Unreachable(shared.failure)
            shared.closing.close()
            try:
                shared.transport = shared.closing.enter_context(self.opened(host, seconds))
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
        self.recv, self.settimeout, self.fileno = channel.recv, channel.settimeout, channel.fileno

    def send(self, content: bytes) -> int:
        with self._lock:
            if self._closed:
                raise OSError("the tunnel is closed")
            return self._channel.send(content)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._channel.close()


@contextmanager
def _transport(
    connection: socket.socket | Tunnel, known: KnownHosts, name: str, ends_at: float
) -> Iterator[paramiko.Transport]:
    """Keys are exchanged and the host's own key is verified before anything else is sent."""
    transport = paramiko.Transport(connection)  # type: ignore[arg-type]  # needs send, recv, settimeout, close
    try:
        transport.banner_timeout = _left(ends_at)
        # The kinds of key that the host is known by come first, so that it shows the one we can compare.
        kinds = [key.kind for key in known.keys(name)]
        first = [name for kind in kinds for name in (_RSA_SIGNATURES if kind == "ssh-rsa" else (kind,))]
        options = transport.get_security_options()
        options.key_types = sorted(options.key_types, key=lambda offered: offered not in first)
        done = threading.Event()
        transport.start_client(event=done)
        if not done.wait(_left(ends_at)):
            raise _SlowLogin
        if not transport.is_active():
            raise transport.get_exception() or paramiko.SSHException("it ended the key exchange")
        key = transport.get_remote_server_key()
        known.verify(name, HostKey(key.get_name(), key.asbytes()))
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


class _SlowLogin(TimeoutError):
    """The host answered, but the login did not end in time. The host did not refuse it."""


def _log_in(transport: paramiko.Transport, settings: SshSettings, ends_at: float) -> None:
    """Offer one key after the other until the host accepts one. Raises one of `_FAILURES`.

    Of several refusals the problem of a key file is raised, which explains more than the refusal of the other keys.
    """
    refusals: list[Exception] = [paramiko.AuthenticationException("the agent and ~/.ssh hold no key to offer")]
    with closing(paramiko.Agent()) as agent:
        for candidate in candidates(agent, settings):
            if isinstance(candidate, Exception):
                refusals.append(candidate)
                continue
            if time.monotonic() >= ends_at:
                raise _SlowLogin
            try:
                transport.auth_timeout = ends_at - time.monotonic()
                wants_more = transport.auth_publickey(settings.user, candidate)
            except paramiko.AuthenticationException as error:
                # paramiko's exception for a refusal is also its exception for no answer.
                if time.monotonic() >= ends_at:
                    raise _SlowLogin from None
                if not transport.is_active():  # the host closes the connection after too many attempts
                    if len(refusals) == 1:
                        raise paramiko.SSHException("it closed the connection during the login") from None
                    break
                refusals.append(error)
                continue
            if not wants_more:
                return
            refusals.append(
                paramiko.AuthenticationException(f"a key is not enough, it requires {', '.join(wants_more)}")
            )
    files = [error for error in refusals if isinstance(error, UnusableKeyFile | paramiko.PasswordRequiredException)]
    raise (files or refusals)[-1]


class SshRunner(Runner):
    """Runs commands over one connection, each on a channel of its own."""

    def __init__(self, host: Host, transport: paramiko.Transport) -> None:
        self._host = host
        self._transport = transport

    @contextmanager
    def started(self, command: Sequence[str], stdin: str | Iterable[bytes], seconds: float) -> Iterator[RunningCommand]:
        ends_at = time.monotonic() + seconds
        try:
            channel = self._transport.open_session(timeout=seconds)
            channel.settimeout(seconds)
            # Closing a channel leaves its process running on the other side: the remote end keeps the deadline too.
            channel.exec_command(shlex.join(["timeout", "-k", "2", str(math.ceil(seconds)), *command]))
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise Unreachable(f"{self._host.target} broke the connection ({_why(error)}); look at its sshd") from None
        channel.settimeout(None)  # from here the deadline is kept by waiting; closing the channel wakes its readers
        try:
            threading.Thread(target=_feed, args=(channel, stdin), daemon=True).start()
            # Not paramiko's combined stream, in which one stream's line may begin in the middle of the other's.
            finish = functools.partial(self._finish, channel, ends_at)
            yield RunningCommand(channel.recv, channel.recv_stderr, finish)
        finally:
            with suppress(OSError, EOFError):  # a broken connection has no channel to close
                channel.close()

    def _finish(self, channel: paramiko.Channel, ends_at: float, readers: Sequence[Reader]) -> int | None:
        ended = drain_all(readers, ends_at)
        ended = ended and channel.status_event.wait(max(0.0, ends_at - time.monotonic()))
        if ended and channel.exit_status < 0:  # paramiko's value for a channel that closed without a status
            raise Unreachable(
                f"{self._host.target} broke the connection while a command ran; look at the node, its link and its sshd"
            )
        return channel.exit_status if ended else None


def _feed(channel: paramiko.Channel, stdin: str | Iterable[bytes]) -> None:
    try:
        for chunk in chunks(stdin):
            channel.sendall(chunk)
        channel.shutdown_write()
    except (OSError, EOFError):
        return  # the command ended without reading all of it, or the connection broke; `_finish` raises for the latter


# Exceptions of opening a connection; any other one is a programming error.
_FAILURES = (paramiko.SSHException, OSError, EOFError, BadHostKey)


def _sentence(error: Exception, settings: SshSettings, seconds: float, known_hosts: Path) -> str:
    """The sentence for one of `_FAILURES`. `seconds` is the host's deadline."""
    where, why = f"{settings.address} port {settings.port}", _why(error)
    match error:
        case BadHostKey(found=found, revoked=True):
            return (
                f"{where} has the host key {found.fingerprint}, which {known_hosts} marks as revoked; "
                "give the node a new key"
            )
        case BadHostKey(found=found, expected=None):
            return (
                f"{where} has a {found.kind} host key that is not in {known_hosts} ({found.fingerprint}); "
                "compare it with the node's own and rerun with --accept-new-host-keys"
            )
        case BadHostKey(found=found, expected=HostKey() as expected):
            return (
                f"{where} has the host key {found.fingerprint}, but {known_hosts} says {expected.fingerprint}; "
                "another machine may be answering: find out why before removing the old line"
            )
        case paramiko.PasswordRequiredException():
            return f"the private key for {where} needs a passphrase; add it to ssh-agent"
        case UnusableKeyFile(path=path):
            return (
                f"the private key {path} for {where} cannot be used ({why}); "
                "name a private key file that you can read with ssh.key or --key"
            )
        case paramiko.AuthenticationException():
            return f"{where} refuses user {settings.user} ({why}); give the right user@ and --key, or use ssh-agent"
        case paramiko.ChannelException():
            return f"{where} cannot be reached from the jump host ({why}); check that its sshd listens there"
        case socket.gaierror():
            return f"{settings.address} is no host name known here ({why}); check the spelling or DNS"
        case _SlowLogin():
            return (
                f"{where} did not finish the login of {settings.user} within {quantity(seconds)} s; "
                "look at the node's load and where it looks its users up"
            )
        case TimeoutError():
            return f"{where} did not answer within {quantity(seconds)} s; check that the node is up and the port open"
    return f"{where} cannot be reached ({why}); check that the node is up and sshd listens there"


def _why(error: Exception) -> str:
    """The exception's own words on one line, without the system's number of the error; its name when it has none."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(words.split()).rstrip(".") or type(error).__name__
