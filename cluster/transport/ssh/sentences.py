"""What a failed connection means and what to do, in one sentence."""

from __future__ import annotations

import socket
from pathlib import Path

import paramiko

from cluster.transport.ssh.known_hosts import ChangedHostKey, UnknownHostKey

# What opening a connection may raise; everything else is a mistake of ours.
FAILURES = (paramiko.SSHException, OSError, EOFError, UnknownHostKey, ChangedHostKey)


def explain(error: Exception, address: str, port: int, user: str, seconds: float, known_hosts: Path) -> str:
    """The sentence for one of `FAILURES`. `seconds` is how long the host was given."""
    where = f"{address} port {port}"
    if isinstance(error, UnknownHostKey):
        return (
            f"{where} has a {error.found.kind} host key that {known_hosts} does not know ({error.found.fingerprint}); "
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
    if isinstance(error, paramiko.AuthenticationException):
        return f"{where} refuses user {user} ({reason(error)}); give the right user@ and --key, or use ssh-agent"
    if isinstance(error, paramiko.ChannelException):
        return f"{where} cannot be reached from the jump host ({reason(error)}); check that its sshd listens there"
    if isinstance(error, socket.gaierror):
        return f"{address} is no host name known here ({reason(error)}); check the spelling or DNS"
    if isinstance(error, FileNotFoundError | PermissionError):
        return f"{where} cannot be logged in to ({reason(error)}); give a private key file you can read"
    if isinstance(error, TimeoutError):
        return f"{where} did not answer within {seconds:.3g} s; check that the node is up and the port open"
    return f"{where} cannot be reached ({reason(error)}); check that the node is up and sshd listens there"


def reason(error: Exception) -> str:
    """The exception's own words on one line; its name when it has none."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
