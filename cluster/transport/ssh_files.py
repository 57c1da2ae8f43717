"""The files of OpenSSH: how a host is reached (ssh_config), which key it must show (known_hosts), the user's keys."""

from __future__ import annotations

import base64
import binascii
import getpass
import glob
import hashlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko

from cluster.inventory.hosts import SSH_PORT, Host, parse_jump
from cluster.transport.runner import Unreachable

_INCLUDE = re.compile(r"\s*include(?:\s*=\s*|\s+)(.+)", re.IGNORECASE)
_BLOCK = re.compile(r"\s*(?:host|match)(?:\s*=\s*|\s)", re.IGNORECASE)
_ALL = "Host *"
_OTHER = re.compile(r"[@|*?!]")  # in the first field of a line of known_hosts: not only names
MAX_DEPTH = 16  # of files that include files, as in OpenSSH


def usual_files() -> tuple[Path, ...]:
    """The files that OpenSSH reads, the user's own first: of each setting the first value holds."""
    return (Path.home() / ".ssh" / "config", Path("/etc/ssh/ssh_config"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SshSettings:
    """How one host is reached, with nothing left open."""

    address: str
    port: int
    user: str
    key: Path | None  # named by target, site or command line: offered first
    key_files: tuple[Path, ...] | None  # in place of the usual files in ~/.ssh; None: the configuration names none
    key_files_only: bool  # IdentitiesOnly: of the agent's keys none but these
    jump: Host | None
    host_key_alias: str | None
    known_hosts: Path | None  # None: the usual one

    @property
    def known_as(self) -> str:
        """The name of the host in known_hosts."""
        return self.host_key_alias or (self.address if self.port == SSH_PORT else f"[{self.address}]:{self.port}")


class SshConfig:
    """The configuration of all hosts, read by paramiko when the first one is looked up. Format: ssh_config(5).

    paramiko does not follow `Include`, so each is replaced by the lines of its files first.
    """

    def __init__(self, files: Sequence[Path] | None = None) -> None:
        self._files = tuple(files) if files is not None else usual_files()
        self._parsed: paramiko.SSHConfig | None = None
        self._lock = threading.Lock()

    def settings(self, host: Host) -> SshSettings:
        """The host's own settings, else those of the files, else SSH's defaults. Raises Unreachable for bad files."""
        try:
            with self._lock:
                if self._parsed is None:
                    self._parsed = paramiko.SSHConfig.from_text("\n".join(_lines(self._files)))
                found = self._parsed.lookup(host.address)
            if host.jump is None and "proxyjump" not in found and found.get("proxycommand"):
                raise ValueError("ProxyCommand is not supported; use ProxyJump there, or ssh.jump in the inventory")
            files = [Path(name).expanduser() for name in found.get("identityfile", ()) if name.lower() != "none"]
            return SshSettings(
                address=found["hostname"],
                port=host.port or int(found.get("port", SSH_PORT)),
                user=host.user or found.get("user") or getpass.getuser(),
                key=host.key,
                key_files=tuple(files) if "identityfile" in found else None,
                key_files_only=found.get("identitiesonly", "no").lower() == "yes",
                jump=host.jump or _jump(found.get("proxyjump", "none"), host),
                host_key_alias=found.get("hostkeyalias"),
                known_hosts=host.known_hosts,
            )
        except (
            paramiko.SSHException, paramiko.ConfigParseError, paramiko.CouldNotCanonicalize,
            OSError, ValueError, KeyError, ImportError,
        ) as error:  # fmt: skip
            why = " ".join(str(error).split()) or type(error).__name__
            named = " or ".join(str(path) for path in self._files)
            raise Unreachable(f"the SSH configuration for {host.address} cannot be used ({why}); see {named}") from None


def _jump(text: str, host: Host) -> Host | None:
    """The host that ProxyJump names. One that names the host itself, as `Host *` does for a bastion, is none."""
    if text.lower() == "none":
        return None
    jump = parse_jump(text.removeprefix("ssh://"), None, host.known_hosts)
    return None if jump.address == host.address else jump


def _lines(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        if path.is_file():
            yield _ALL  # ends the last block of the file before
            yield from _expanded(path, _ALL, path.parent, 0)


def _expanded(path: Path, block: str, folder: Path, depth: int) -> Iterator[str]:
    """The lines of a file inside `block`, included ones in their place; relative names are of `folder`."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{path} is included more than {MAX_DEPTH} files deep")
    for line in path.read_text(encoding="utf-8").splitlines():
        if _BLOCK.match(line):
            block = line
        if not (match := _INCLUDE.match(line)):
            yield line
            continue
        for pattern in match[1].split():
            name = str(folder / Path(pattern.strip('"')).expanduser())
            for included in sorted(glob.glob(name)):
                yield from _expanded(Path(included), block, folder, depth + 1)
                yield block  # which a block of the included file has ended


@dataclass(frozen=True, slots=True)
class HostKey:
    """The public key of a host."""

    kind: str  # ssh-ed25519, ssh-rsa, ...
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """As `ssh-keygen -l` prints it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")


class BadHostKey(Exception):
    """A host key that is not in known_hosts, is not the one that is there (`expected`), or is revoked."""

    def __init__(self, found: HostKey, expected: HostKey | None = None, *, revoked: bool = False) -> None:
        super().__init__("revoked" if revoked else "changed" if expected else "unknown")
        self.found, self.expected, self.revoked = found, expected, revoked


class KnownHosts:
    """The keys in several files, of which the last one takes new ones. Changed files are read again. Format: sshd(8).
    Capitals in names mean nothing, as in OpenSSH.

    paramiko's `HostKeys` hashes names here. Its reader is not used: it takes the markers `@revoked` and
    `@cert-authority` for host names, knows no patterns, and skips lines that it cannot read.
    """

    def __init__(self, *paths: Path, accept_new: bool = False) -> None:
        self._paths = paths
        self._accept_new = accept_new
        self._read: dict[Path, tuple[tuple[int, int, int], dict[str, list[str]]]] = {}
        self._lock = threading.Lock()  # all nodes of a fleet may add to one file at once

    def keys(self, name: str) -> list[HostKey]:
        """The host's keys. Raises Unreachable for a file, or a line that holds for the host, that cannot be read."""
        return [key for marker, key in self._lines(name) if not marker]

    def verify(self, name: str, found: HostKey) -> None:
        """Raise BadHostKey unless this is the host's key, or the host is unknown and new keys are accepted.

        A host known by a key of another kind only counts as changed: another machine in its place could offer exactly
        the kind that is not known.
        """
        with self._lock:
            lines = list(self._lines(name))
            known = [key for marker, key in lines if not marker]
            if ("@revoked", found) in lines:
                raise BadHostKey(found, revoked=True)
            if found in known:
                return
            if known:
                raise BadHostKey(found, next((key for key in known if key.kind == found.kind), known[0]))
            if not self._accept_new:
                raise BadHostKey(found)
            _append(self._paths[-1], f"{name.lower()} {found.kind} {base64.b64encode(found.blob).decode()}\n")

    def _lines(self, name: str) -> Iterator[tuple[str, HostKey]]:
        """Marker and key of each line for the host, and of all revoked keys. An absent file has none."""
        name = name.lower()
        for path in self._paths:
            content = self._content(path)
            for line in (*content.get(name, ()), *content.get("", ())):
                fields = line.split()
                marker = fields.pop(0) if fields[0].startswith("@") else ""
                if not fields or marker == "@cert-authority":
                    continue  # a certificate of a host cannot be verified by paramiko
                if marker == "@revoked" or _matches(fields[0].split(","), name):
                    yield marker, _host_key(fields, line, path)

    def _content(self, path: Path) -> dict[str, list[str]]:
        """Lines by the names in them, as most have; "" for all others: markers, hashes and patterns.

        A file that cannot be read is an error, not an empty file.
        """
        try:
            status = path.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if path not in self._read or self._read[path][0] != version:
                content: dict[str, list[str]] = {}
                for line in path.read_text(encoding="utf-8").splitlines():
                    first = line.split(maxsplit=1)[0] if line.strip() else "#"
                    for name in [""] if _OTHER.search(first) else first.split(","):
                        if not first.startswith("#"):
                            content.setdefault(name.lower(), []).append(line)
                self._read[path] = (version, content)
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            why = " ".join(str(error).split())
            raise Unreachable(f"{path} cannot be read ({why}); give a readable --known-hosts") from None
        return self._read[path][1]


def _host_key(fields: Sequence[str], line: str, path: Path) -> HostKey:
    try:
        kind, blob = fields[1], base64.b64decode(fields[2], validate=True)
        length = int.from_bytes(blob[:4], "big")
        if blob[4 : 4 + length] != kind.encode() or len(blob) <= 4 + length:
            raise ValueError(kind)
    except (IndexError, ValueError, binascii.Error):
        raise Unreachable(f"{path} has the line {line!r}, which holds no key; correct it") from None
    return HostKey(kind, blob)


def _matches(patterns: list[str], name: str) -> bool:
    """True when one pattern fits and no negated one does."""
    if any(_fits(pattern[1:], name) for pattern in patterns if pattern.startswith("!")):
        return False
    return any(_fits(pattern, name) for pattern in patterns if not pattern.startswith("!"))


def _fits(pattern: str, name: str) -> bool:
    if pattern.startswith("|1|"):
        try:
            return paramiko.HostKeys.hash_host(name, pattern) == pattern
        except (AssertionError, IndexError, ValueError):  # no salt of the right length
            return False
    pattern = pattern.lower()
    if "*" not in pattern and "?" not in pattern:
        return pattern == name
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), name) is not None


def _append(path: Path, line: str) -> None:
    """Add a line. The file is never rewritten: comments, hashed names and lines of other kinds stay as they are."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with open(descriptor, "rb+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        broken = size and os.pread(descriptor, 1, size - 1) != b"\n"
        file.write((b"\n" if broken else b"") + line.encode())


_USUAL_NAMES = ("id_ed25519", "id_ecdsa", "id_rsa")
_PUBLIC = (b"ssh-", b"ecdsa-", b"sk-", b"---- BEGIN SSH2 PUBLIC", b"-----BEGIN PUBLIC")  # how public keys begin
_KINDS = (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey)


class UnusableKeyFile(paramiko.SSHException):
    """A private key file that cannot be read, or holds no private key."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path


def private_key(path: Path) -> paramiko.PKey:
    """Raises PasswordRequiredException for an encrypted key, UnusableKeyFile, FileNotFoundError."""
    try:
        start = path.read_bytes()[:100]
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnusableKeyFile(path, str(error.strerror)) from None
    if start.startswith(_PUBLIC):
        raise UnusableKeyFile(path, "it holds a public key; the private one has the same name without .pub")
    for kind in _KINDS:  # a file's header does not name the kind
        try:
            loaded = kind.from_private_key_file(str(path))
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError, IndexError):
            continue
        certificate = path.with_name(path.name + "-cert.pub")
        if certificate.is_file():
            loaded.load_certificate(str(certificate))
        return loaded
    raise UnusableKeyFile(path, "it holds no private key of a kind known here: ed25519, ecdsa or rsa")


def candidates(agent: paramiko.Agent, settings: SshSettings) -> Iterator[paramiko.PKey | Exception]:
    """The user's keys in the order they are offered; an exception stands in place of a file that cannot be used.

    With `settings.key`, that one, from its file or, when the file needs a passphrase, from the agent; then the agent's
    other keys. Without, the agent's keys and the files. `settings.key_files_only` leaves all other keys of the agent
    out.
    """
    held = {held.asbytes(): held for held in agent.get_keys()}
    offered: set[bytes] = set()
    if settings.key is None and not settings.key_files_only:
        offered |= held.keys()
        yield from held.values()
    usual = [Path.home() / ".ssh" / name for name in _USUAL_NAMES]
    for path in [settings.key] if settings.key else usual if settings.key_files is None else settings.key_files:
        try:
            loaded = private_key(path.expanduser())
        except FileNotFoundError:
            if settings.key:
                yield UnusableKeyFile(path, "there is no such file")
            continue
        except paramiko.SSHException as error:
            yield held.get(_public_blob(path.expanduser())) or error
            continue
        if loaded.asbytes() not in offered:
            offered.add(loaded.asbytes())
            yield loaded
    if settings.key and not settings.key_files_only:
        yield from (agent_key for blob, agent_key in held.items() if blob not in offered)


def _public_blob(path: Path) -> bytes:
    """The public half beside a private key; b"" when there is none."""
    try:
        return binascii.a2b_base64(path.with_name(path.name + ".pub").read_text(encoding="utf-8").split()[1])
    except (OSError, UnicodeDecodeError, IndexError, binascii.Error):
        return b""
