"""Hosts as a user names them: `user@gpu[01-04]:2222` on the command line, or one such target per line in a file."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.files.filesystem import read_text
from cluster.inventory import ranges

SSH_PORT = 22

_BRACKETS = re.compile(r"\[[^\[\]]*\]")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One node. An empty address is this machine, reached without SSH; None leaves the choice to SSH's defaults."""

    name: str  # its name in tables and `--free`
    address: str = ""  # DNS name or IP address
    user: str | None = None
    port: int | None = None
    key: Path | None = None  # private key file
    known_hosts: Path | None = None  # file with the key it must show
    jump: Host | None = None  # the host to go through

    @property
    def is_local(self) -> bool:
        """True for this machine."""
        return not self.address

    @property
    def target(self) -> str:
        """The target of a connection: `user@address:port` with only the parts that were given."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return (f"{self.user}@" if self.user else "") + address + (f":{self.port}" if self.port else "")

    def with_defaults(
        self,
        *,
        user: str | None,
        port: int | None,
        key: Path | None,
        known_hosts: Path | None = None,
        jump: Host | None = None,
    ) -> Host:
        """The same host, with these values for the parts that its own target left out."""
        return replace(
            self,
            user=self.user or user,
            port=self.port or port,
            key=self.key or key,
            known_hosts=self.known_hosts or known_hosts,
            jump=self.jump or jump,
        )


def this_machine() -> Host:
    """The host this program runs on."""
    return Host(name=socket.gethostname())


def parse_hosts(target: str) -> list[Host]:
    """Hosts of one target: `[user@]address[:port]`, where a name may hold ranges such as `gpu[01-04,07]`. Commas
    separate several targets, each with its own user and port.

    An IPv6 address with a port is written `[fe80::1]:2222`. Raises ValueError for anything else.
    """
    return [host for part in ranges.split_list(target) for host in _parse_target(part)]


def _parse_target(target: str) -> list[Host]:
    user, at, rest = target.rpartition("@")
    if at and not is_user(user):
        raise ValueError(f"{target!r} has the user {user!r}; expected letters, digits, '_', '-' or '.' before the '@'")
    address, port_text = _split_port(rest)
    port = _parse_port(port_text, target) if port_text is not None else None
    names = expand_addresses(address)
    return [Host(name=name, address=name, user=user or None, port=port) for name in names]


def is_user(name: str) -> bool:
    """Whether this can be the name of a user on a host."""
    return _USER.fullmatch(name) is not None


def expand(pattern: str) -> list[str]:
    """Names a pattern stands for, each a host name or an IPv4 address. Raises ValueError for an invalid name."""
    names = ranges.expand(pattern)
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{pattern!r} is not a host; expected a name, an IP address or a range such as gpu[01-04], "
                "with user@ before or :port after it"
            )
    return names


def expand_addresses(pattern: str) -> list[str]:
    """As `expand`, but also of IPv6 addresses, `fd00::[1-4]`."""
    addresses = ranges.expand(pattern)
    return addresses if all(_is_ipv6(address) for address in addresses) else expand(pattern)


def parse_jump(text: str, key: Path | None, known_hosts: Path | None = None) -> Host:
    """The host that `[user@]host[:port]` names, or the last of several with commas between, each reached through the
    one before it. `key` opens all of them, and `known_hosts` has the keys of all. Raises ValueError.
    """
    jump: Host | None = None
    for target in re.split(r",(?![^\[]*\])", text):
        hosts = parse_hosts(target.strip())
        if len(hosts) != 1:
            raise ValueError(f"the jump host {target.strip()!r} stands for {len(hosts)} hosts; expected a single one")
        jump = replace(hosts[0], key=key, known_hosts=known_hosts, jump=jump)
    assert jump is not None, text
    return jump


def read_hosts(path: Path) -> list[Host]:
    """Hosts of a plain list: one or more targets per line, `#` starts a comment.

    Raises ValueError, naming file and line, for an unreadable or empty file and for a malformed target.
    """
    text = read_text(path, "hosts file")
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        for target in line.partition("#")[0].split():
            try:
                hosts += parse_hosts(target)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if not hosts:
        raise ValueError(f"hosts file {path} names no host; write one per line, such as gpu[01-04]")
    return hosts


def distinct(hosts: Iterable[Host]) -> list[Host]:
    """The hosts in order, each once; different hosts with one name get their whole target as name."""
    once = list(dict.fromkeys(hosts))
    uses = Counter(host.name for host in once)
    return [replace(host, name=host.target) if uses[host.name] > 1 else host for host in once]


def _split_port(rest: str) -> tuple[str, str | None]:
    """Address and the text after its last colon; colons of an IPv6 address, and of a range's step, are part of it."""
    inside = rest.partition("]")[0].removeprefix("[")
    if rest.startswith("[") and ":" in inside and not ranges.is_range(inside):
        address, _, tail = rest[1:].partition("]")
        return address, tail.removeprefix(":") if tail else None
    colons = _BRACKETS.sub("", rest).count(":")
    if colons != 1:
        return rest, None
    address, _, port = rest.rpartition(":")
    return address, port


def _parse_port(text: str, target: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ValueError(f"{target!r} has the port {text!r}; expected a number from 1 to 65535 after the ':'")
    return int(text)


def _is_ipv6(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False
