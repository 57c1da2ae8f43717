"""`~/.ssh/config` and /etc/ssh/ssh_config: how a host is reached where target and site leave it open.

Read by paramiko, after each `Include` has been replaced by the lines of its files, which paramiko does not do. Format:
ssh_config(5).
"""

from __future__ import annotations

import getpass
import glob
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
MAX_DEPTH = 16  # of files that include files, as in OpenSSH


def usual_files() -> tuple[Path, ...]:
    """The files that OpenSSH reads, the user's own first: of each setting the first value holds."""
    return (Path.home() / ".ssh" / "config", Path("/etc/ssh/ssh_config"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How one host is reached, with nothing left open."""

    address: str
    port: int
    user: str
    key: Path | None  # named by target, site or command line: offered first
    key_files: tuple[Path, ...] | None  # in place of the usual files in ~/.ssh; None: the configuration names none
    key_files_only: bool  # IdentitiesOnly: of the agent's keys none but these
    jump: Host | None
    host_key_alias: str | None  # its name in known_hosts


class SshConfig:
    """The configuration of all hosts. Files are read once, when the first host is looked up."""

    def __init__(self, files: Sequence[Path] | None = None) -> None:
        self._files = tuple(files) if files is not None else usual_files()
        self._parsed: paramiko.SSHConfig | None = None
        self._lock = threading.Lock()

    def way(self, host: Host) -> Way:
        """The host's own settings, else those of the files, else SSH's defaults. Raises Unreachable for bad files."""
        try:
            with self._lock:
                if self._parsed is None:
                    self._parsed = paramiko.SSHConfig.from_text("\n".join(_lines(self._files)))
                found = self._parsed.lookup(host.address)
            if host.jump is None and "proxyjump" not in found and found.get("proxycommand"):
                raise ValueError("ProxyCommand is not supported; use ProxyJump there, or ssh.jump in the inventory")
            files = [Path(name).expanduser() for name in found.get("identityfile", ()) if name.lower() != "none"]
            return Way(
                address=found["hostname"],
                port=host.port or int(found.get("port", SSH_PORT)),
                user=host.user or found.get("user") or getpass.getuser(),
                key=host.key,
                key_files=tuple(files) if "identityfile" in found else None,
                key_files_only=found.get("identitiesonly", "no").lower() == "yes",
                jump=host.jump or _jump(found.get("proxyjump", "none"), host),
                host_key_alias=found.get("hostkeyalias"),
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
    jump = parse_jump(text.removeprefix("ssh://"), None)
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
