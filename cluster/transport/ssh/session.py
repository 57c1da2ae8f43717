"""One open connection to a host: commands on it, and the sentence for a connection that fails."""

from __future__ import annotations

import math
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import paramiko

from cluster.files.errors import quantity
from cluster.inventory.hosts import Host
from cluster.transport.runner import MAX_OUTPUT_BYTES, Completed, Unreachable
from cluster.transport.ssh.known_hosts import ChangedHostKey, UnknownHostKey
from cluster.transport.ssh.login import SlowLogin, UnusableKeyFile
from cluster.transport.streams import Collector, LineReader, Reader, chunks, drain_all


class SshRunner:
    """Runs commands over one connection, each on a channel of its own."""

    def __init__(self, host: Host, transport: paramiko.Transport) -> None:
        self._host = host
        self._transport = transport

    def run(self, command: Sequence[str], *, stdin: str | Iterable[bytes] = "", deadline_seconds: float) -> Completed:
        ends_at = time.monotonic() + deadline_seconds
        with self._started(command, deadline_seconds) as channel:
            stdout = Collector(channel.recv, MAX_OUTPUT_BYTES)
            stderr = Collector(channel.recv_stderr, MAX_OUTPUT_BYTES)
            status = self._finish(channel, stdin, [stdout, stderr], ends_at)
            return Completed(stdout=stdout.text, stderr=stderr.text, exit_status=status)

    def stream(
        self,
        command: Sequence[str],
        on_line: Callable[[str], None],
        *,
        stdin: str | Iterable[bytes] = "",
        deadline_seconds: float,
    ) -> int | None:
        ends_at = time.monotonic() + deadline_seconds
        with self._started(command, deadline_seconds) as channel:
            one_at_a_time = threading.Lock()
            # Not paramiko's combined stream, in which one stream's line may begin in the middle of the other's.
            readers = [LineReader(read, on_line, one_at_a_time) for read in (channel.recv, channel.recv_stderr)]
            return self._finish(channel, stdin, readers, ends_at)

    @contextmanager
    def _started(self, command: Sequence[str], seconds: float) -> Iterator[paramiko.Channel]:
        try:
            channel = self._transport.open_session(timeout=seconds)
            channel.settimeout(seconds)
            # Closing a channel leaves its process running on the other side: the remote end keeps the deadline too.
            channel.exec_command(shlex.join(["timeout", "-k", "2", str(math.ceil(seconds)), *command]))
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise Unreachable(f"{self._host.target} broke the connection ({reason(error)}); look at its sshd") from None
        channel.settimeout(None)  # from here the deadline is kept by waiting; closing the channel wakes its readers
        try:
            yield channel
        finally:
            with suppress(OSError, EOFError):  # a broken connection has no channel to close
                channel.close()

    def _finish(
        self, channel: paramiko.Channel, stdin: str | Iterable[bytes], readers: Sequence[Reader], ends_at: float
    ) -> int | None:
        """Feed and read to the end; the exit status, or None when the deadline or a limit came first."""
        threading.Thread(target=_feed, args=(channel, stdin), daemon=True).start()
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
FAILURES = (paramiko.SSHException, OSError, EOFError, UnknownHostKey, ChangedHostKey)


def explain(error: Exception, address: str, port: int, user: str, seconds: float, known_hosts: Path) -> str:
    """The sentence for one of `FAILURES`. `seconds` is the host's deadline."""
    where = f"{address} port {port}"
    if isinstance(error, UnknownHostKey):
        return (
            f"{where} has a {error.found.kind} host key that is not in {known_hosts} ({error.found.fingerprint}); "
            "compare it with the node's own and rerun with --accept-new-host-keys"
        )
    if isinstance(error, ChangedHostKey) and error.expected is None:
        return (
            f"{where} has the host key {error.found.fingerprint}, which {known_hosts} marks as revoked; "
            "give the node a new key"
        )
    if isinstance(error, ChangedHostKey) and error.expected:
        return (
            f"{where} has the host key {error.found.fingerprint}, but {known_hosts} says "
            f"{error.expected.fingerprint}; "
            "another machine may be answering: find out why before removing the old line"
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        return f"the private key for {where} needs a passphrase; add it to ssh-agent"
    if isinstance(error, UnusableKeyFile):
        return (
            f"the private key {error.path} for {where} cannot be used ({reason(error)}); "
            "name a private key file that you can read with ssh.key or --key"
        )
    if isinstance(error, paramiko.AuthenticationException):
        return f"{where} refuses user {user} ({reason(error)}); give the right user@ and --key, or use ssh-agent"
    if isinstance(error, paramiko.ChannelException):
        return f"{where} cannot be reached from the jump host ({reason(error)}); check that its sshd listens there"
    if isinstance(error, socket.gaierror):
        return f"{address} is no host name known here ({reason(error)}); check the spelling or DNS"
    if isinstance(error, SlowLogin):
        return (
            f"{where} did not finish the login of {user} within {quantity(seconds)} s; "
            "look at the node's load and where it looks its users up"
        )
    if isinstance(error, TimeoutError):
        return f"{where} did not answer within {quantity(seconds)} s; check that the node is up and the port open"
    return f"{where} cannot be reached ({reason(error)}); check that the node is up and sshd listens there"


def reason(error: Exception) -> str:
    """The exception's own words on one line, without the system's number of the error; its name when it has none."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(words.split()).rstrip(".") or type(error).__name__
