"""known_hosts files: the key that each host must show.

paramiko's own reader is not used: it compares each line with all before it, cannot share its result between
connections, and takes the markers `@revoked` and `@cert-authority` for host names. Format: sshd(8).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

from cluster.transport.runner import Unreachable

_HASHED = "|1|"
_CERTIFICATES = "@cert-authority"  # signs host certificates, which paramiko cannot verify
_REVOKED = "@revoked"


@dataclass(frozen=True, slots=True)
class HostKey:
    """The public key of a host."""

    kind: str  # ssh-ed25519, ssh-rsa, ...
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """As `ssh-keygen -l` prints it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")


class UnknownHostKey(Exception):
    """A host that no known_hosts file holds."""

    def __init__(self, found: HostKey) -> None:
        super().__init__("unknown host key")
        self.found = found


class ChangedHostKey(Exception):
    """A host whose key is not the one that is known, or has been revoked (`expected` is None)."""

    def __init__(self, found: HostKey, expected: HostKey | None) -> None:
        super().__init__("changed host key")
        self.found = found
        self.expected = expected


@dataclass(slots=True)
class _File:
    """The contents of one file. Most lines are plain names, found by a look-up; patterns and hashes are tried."""

    exact: dict[str, list[HostKey]] = field(default_factory=dict)
    tried: list[tuple[list[str], HostKey]] = field(default_factory=list)
    revoked: set[bytes] = field(default_factory=set)

    def keys(self, name: str) -> list[HostKey]:
        return self.exact.get(name, []) + [key for names, key in self.tried if _matches(names, name)]


class KnownHosts:
    """The keys of several files, of which the last one takes new ones. Files are read again when they change."""

    def __init__(self, *paths: Path, accept_new: bool = False) -> None:
        self._paths = paths
        self._accept_new = accept_new
        self._read: dict[Path, tuple[tuple[int, int, int], _File]] = {}
        self._lock = threading.Lock()  # all nodes of a fleet look here, and may add to one file, at once

    def kinds(self, name: str) -> list[str]:
        """Kinds of key known for a host, so that one of these is requested. Raises Unreachable for a bad file."""
        with self._lock:
            return [key.kind for file in self._files() for key in file.keys(name)]

    def verify(self, name: str, found: HostKey) -> None:
        """Raise UnknownHostKey, or ChangedHostKey, unless this is the host's key or new keys are accepted.

        A host known by a key of another kind only counts as changed: another machine in its place could offer exactly
        the kind that is not known.
        """
        with self._lock:
            files = self._files()
            if any(found.blob in file.revoked for file in files):
                raise ChangedHostKey(found, None)
            known = [key for file in files for key in file.keys(name)]
            if found in known:
                return
            if known:
                raise ChangedHostKey(found, next((key for key in known if key.kind == found.kind), known[0]))
            if not self._accept_new:
                raise UnknownHostKey(found)
            _append(self._paths[-1], f"{name} {found.kind} {base64.b64encode(found.blob).decode()}\n")

    def _files(self) -> list[_File]:
        return [self._file(path) for path in self._paths]

    def _file(self, path: Path) -> _File:
        """A file that does not exist holds no host; one that cannot be read is an error, not an empty file."""
        try:
            status = path.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if path not in self._read or self._read[path][0] != version:
                self._read[path] = (version, _parse(path))
        except FileNotFoundError:
            return _File()
        except (OSError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise Unreachable(f"{path} cannot be read ({reason}); give a readable --known-hosts") from None
        return self._read[path][1]


def host_name(address: str, port: int) -> str:
    """The name of a host in known_hosts."""
    return address if port == 22 else f"[{address}]:{port}"


def _parse(path: Path) -> _File:
    file = _File()
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        try:
            names, kind, encoded = fields[0].split(","), fields[1], fields[2]
            blob = base64.b64decode(encoded, validate=True)
            length = int.from_bytes(blob[:4], "big")
            if blob[4 : 4 + length] != kind.encode() or len(blob) <= 4 + length:
                raise ValueError(kind)
        except (IndexError, ValueError, binascii.Error):
            raise Unreachable(f"{path} has the line {line!r}, which holds no key; correct it") from None
        if marker == _REVOKED:
            file.revoked.add(blob)
        elif marker != _CERTIFICATES:
            _enter(file, names, HostKey(kind, blob))
    return file


def _enter(file: _File, names: list[str], key: HostKey) -> None:
    if any(name.startswith((_HASHED, "!")) or "*" in name or "?" in name for name in names):
        file.tried.append((names, key))
    else:
        for name in names:
            file.exact.setdefault(name, []).append(key)


def _matches(patterns: list[str], name: str) -> bool:
    """True when one pattern fits and no negated one does."""
    if any(_fits(pattern[1:], name) for pattern in patterns if pattern.startswith("!")):
        return False
    return any(_fits(pattern, name) for pattern in patterns if not pattern.startswith("!"))


def _fits(pattern: str, name: str) -> bool:
    if pattern.startswith(_HASHED):
        salt, _, digest = pattern[len(_HASHED) :].partition("|")
        try:
            return hmac.digest(base64.b64decode(salt), name.encode(), "sha1") == base64.b64decode(digest)
        except binascii.Error:
            return False
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), name) is not None


def _append(path: Path, line: str) -> None:
    """Add a line. The file is never rewritten: comments, hashed names and lines of other kinds stay as they are."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with open(descriptor, "rb+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        broken = size and os.pread(descriptor, 1, size - 1) != b"\n"
        file.write((b"\n" if broken else b"") + line.encode())
