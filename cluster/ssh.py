"""Running commands on another host over SSH (paramiko): verified host keys, quoted arguments, deadlines.

Host keys are compared with known_hosts. An unknown host is refused unless the caller chose to accept new ones, which
are then added to the file; a host whose key has changed is refused always (OpenSSH's `accept-new`).
"""

from __future__ import annotations

import getpass
import logging
import math
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import paramiko

from cluster.hosts import SSH_PORT, Host
from cluster.runner import MAX_OUTPUT_BYTES, Completed, Connect, Runner, Unreachable
from cluster.streams import Collector, drain_all

CONNECT_SECONDS = 10.0  # each for TCP, greeting, authentication: slower than this is not a node to run on
_SYSTEM_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")
_known_hosts_lock = threading.Lock()  # all nodes of a fleet may add to one file at once

# paramiko logs tracebacks of its own threads to the root logger; what matters of them reaches us as exceptions.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


@dataclass(frozen=True, kw_only=True, slots=True)
class SshOptions:
    """How connections are made, the same for all hosts."""

    known_hosts: Path = field(default_factory=lambda: Path.home() / ".ssh" / "known_hosts")
    accept_new_host_keys: bool = False


class SshRunner:
    """One open connection."""

    def __init__(self, host: Host, transport: paramiko.Transport) -> None:
        self._host = host
        self._transport = transport

    def run(self, command: Sequence[str], *, stdin: str = "", deadline_seconds: float) -> Completed:
        ends_at = time.monotonic() + deadline_seconds
        try:
            channel = self._transport.open_session(timeout=deadline_seconds)
            channel.settimeout(deadline_seconds)
            # Closing a channel leaves its process running on the other side: the remote end keeps the deadline too.
            channel.exec_command(shlex.join(["timeout", "-k", "2", str(math.ceil(deadline_seconds)), *command]))
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise Unreachable(
                f"{self._host.target} broke the connection ({_reason(error)}); look at its sshd"
            ) from None
        with channel:
            channel.settimeout(None)  # from here the deadline is kept by waiting; closing the channel wakes its readers
            stdout = Collector(channel.recv, MAX_OUTPUT_BYTES)
            stderr = Collector(channel.recv_stderr, MAX_OUTPUT_BYTES)
            threading.Thread(target=_feed, args=(channel, stdin.encode()), daemon=True).start()
            ended = drain_all([stdout, stderr], ends_at)
            ended = ended and channel.status_event.wait(max(0.0, ends_at - time.monotonic()))
            if ended and channel.exit_status < 0:  # paramiko's word for a channel that closed without a status
                raise Unreachable(f"{self._host.target} broke the connection while a command ran; look at its sshd")
            status = channel.exit_status if ended else None
            return Completed(stdout=stdout.text, stderr=stderr.text, exit_status=status)


def _feed(channel: paramiko.Channel, content: bytes) -> None:
    try:
        channel.sendall(content)
        channel.shutdown_write()
    except OSError:
        return  # the command ended without reading all of it, or the connection broke: its status tells which


def connector(options: SshOptions) -> Connect:
    """`Connect` over SSH with these options."""

    @contextmanager
    def connect(host: Host, seconds: float) -> Iterator[Runner]:
        client = _open(host, min(seconds, CONNECT_SECONDS), options)
        try:
            transport = client.get_transport()
            assert transport is not None
            yield SshRunner(host, transport)
        finally:
            client.close()

    return connect


def _open(host: Host, seconds: float, options: SshOptions) -> paramiko.SSHClient:
    client = paramiko.SSHClient()
    _load_known_hosts(client, options.known_hosts)
    client.set_missing_host_key_policy(_AddNew(options.known_hosts) if options.accept_new_host_keys else _Refuse())
    port = host.port or SSH_PORT
    try:
        client.connect(
            host.address,
            port=port,
            username=host.user or getpass.getuser(),
            key_filename=str(host.key.expanduser()) if host.key else None,
            look_for_keys=host.key is None,
            timeout=seconds,
            banner_timeout=seconds,
            auth_timeout=seconds,
            channel_timeout=seconds,
        )
    except (paramiko.SSHException, OSError, EOFError) as error:
        client.close()
        raise Unreachable(_sentence(error, host, port, seconds, options)) from None
    return client


def _sentence(error: Exception, host: Host, port: int, seconds: float, options: SshOptions) -> str:
    """What a failed connection means and what to do, in one sentence."""
    where = f"{host.address} port {port}"
    if isinstance(error, _UnknownHostKey):
        return (
            f"{where} has a {error.key_type} host key that {options.known_hosts} does not know ({error.fingerprint}); "
            "compare it with the node's own and rerun with --accept-new-host-keys"
        )
    if isinstance(error, paramiko.BadHostKeyException):
        return (
            f"{where} has the host key {error.key.fingerprint}, but {options.known_hosts} says "
            f"{error.expected_key.fingerprint}; "
            "another machine may be answering: find out why before removing the old line"
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        return f"the private key for {where} needs a passphrase; add it to ssh-agent"
    if isinstance(error, paramiko.AuthenticationException):
        user = host.user or getpass.getuser()
        return f"{where} refuses user {user} ({_reason(error)}); give the right user@ and --key, or use ssh-agent"
    if isinstance(error, socket.gaierror):
        return f"{host.address} is no host name known here ({_reason(error)}); check the spelling or DNS"
    if isinstance(error, FileNotFoundError | PermissionError):
        return f"{where} cannot be logged in to ({_reason(error)}); give a private key file you can read"
    if isinstance(error, TimeoutError):
        return f"{where} did not answer within {seconds:g} s; check that the node is up and the port open"
    return f"{where} cannot be reached ({_reason(error)}); check that the node is up and sshd listens there"


def _reason(error: Exception) -> str:
    """The exception's own words on one line; its name when it has none."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


class _UnknownHostKey(paramiko.SSHException):
    """A host that known_hosts does not hold."""

    def __init__(self, key: paramiko.PKey) -> None:
        super().__init__("unknown host key")
        self.key_type = key.get_name()
        self.fingerprint = key.fingerprint


class _Refuse(paramiko.MissingHostKeyPolicy):
    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise _UnknownHostKey(key)


class _AddNew(paramiko.MissingHostKeyPolicy):
    def __init__(self, known_hosts: Path) -> None:
        self._known_hosts = known_hosts

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        with _known_hosts_lock:
            self._known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Appended, never rewritten: comments, hashed names and lines paramiko cannot read stay as they are.
            descriptor = os.open(self._known_hosts, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            with open(descriptor, "rb+", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                broken = size and os.pread(descriptor, 1, size - 1) != b"\n"
                line = f"{hostname} {key.get_name()} {key.get_base64()}\n"
                file.write((b"\n" if broken else b"") + line.encode())


def _load_known_hosts(client: paramiko.SSHClient, known_hosts: Path) -> None:
    """A file that does not exist knows no host; one that cannot be read is an error, not an empty one."""
    with _known_hosts_lock:
        for path in (_SYSTEM_KNOWN_HOSTS, known_hosts):
            try:
                client.load_system_host_keys(str(path))
            except FileNotFoundError:
                continue
            except (OSError, UnicodeDecodeError) as error:
                raise Unreachable(f"{path} cannot be read ({_reason(error)}); give a readable --known-hosts") from None
            except paramiko.hostkeys.InvalidHostKey as error:
                raise Unreachable(f"{path} has the line {error.line!r}, which holds no key; correct it") from None
