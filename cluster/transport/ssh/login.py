"""Private keys offered to a host: the given file, those of the agent, or the usual ones in ~/.ssh."""

from __future__ import annotations

import binascii
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko

_USUAL_NAMES = ("id_ed25519", "id_ecdsa", "id_rsa")
_KINDS = (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey)


class PrivateKeys:
    """Keys read from files, each once for a whole fleet."""

    def __init__(self) -> None:
        self._read: dict[Path, paramiko.PKey] = {}
        self._lock = threading.Lock()

    def load(self, path: Path) -> paramiko.PKey:
        """Raises PasswordRequiredException for an encrypted key, SSHException for a file that is no key, OSError."""
        with self._lock:
            if path not in self._read:
                self._read[path] = _load(path)
            return self._read[path]


def log_in(transport: paramiko.Transport, user: str, key: Path | None, keys: PrivateKeys) -> None:
    """Offer one key after the other until the host accepts one.

    With `key`, that one, from its file or, when the file needs a passphrase, from the agent; then the agent's other
    keys. Without, the agent's keys and the usual files. Raises the problem of a key file, or the last refusal:
    PasswordRequiredException, OSError or AuthenticationException; SSHException when the connection breaks.
    """
    refusals: list[Exception] = []
    agent = paramiko.Agent()
    try:
        for candidate in _candidates(agent, key, keys):
            if isinstance(candidate, Exception):
                refusals.append(candidate)
                continue
            try:
                wants_more = transport.auth_publickey(user, candidate)
            except paramiko.AuthenticationException as error:
                refusals.append(error)
                if not transport.is_active():  # the host closes the connection after too many attempts
                    break
                continue
            if not wants_more:
                return
            refusals.append(
                paramiko.AuthenticationException(f"a key is not enough, it requires {', '.join(wants_more)}")
            )
    finally:
        agent.close()
    unusable = [error for error in refusals if _says_more(error)]
    raise (unusable or refusals or [paramiko.AuthenticationException("the agent and ~/.ssh hold no key to offer")])[-1]


def _says_more(error: Exception) -> bool:
    """True for a problem of a key file, which explains more than the refusal of the other keys."""
    return isinstance(error, paramiko.PasswordRequiredException) or not isinstance(
        error, paramiko.AuthenticationException
    )


def _candidates(agent: paramiko.Agent, key: Path | None, keys: PrivateKeys) -> Iterator[paramiko.PKey | Exception]:
    """Keys in the order they are tried, each once; an exception stands in place of a file that cannot be used."""
    offered: set[bytes] = set()
    held = {held.asbytes(): held for held in agent.get_keys()}
    if key is None:
        yield from held.values()
    for path in (key,) if key else tuple(Path.home() / ".ssh" / name for name in _USUAL_NAMES):
        try:
            loaded = keys.load(path.expanduser())
        except FileNotFoundError as error:
            if key:
                yield error
            continue
        except (paramiko.SSHException, OSError) as error:
            from_agent = held.get(_public_blob(path.expanduser()))
            yield from_agent or error
            continue
        if key or loaded.asbytes() not in held:
            offered.add(loaded.asbytes())
            yield loaded
    if key:
        yield from (agent_key for blob, agent_key in held.items() if blob not in offered)


def _load(path: Path) -> paramiko.PKey:
    """A key of any kind. The kinds are tried in turn, since a file's header does not name it."""
    wrong: Exception | None = None
    for kind in _KINDS:
        try:
            loaded = kind.from_private_key_file(str(path))
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError) as error:
            wrong = error
            continue
        certificate = path.with_name(path.name + "-cert.pub")
        if certificate.is_file():
            loaded.load_certificate(str(certificate))
        return loaded
    raise paramiko.SSHException(f"{path} holds no private key of a known kind ({wrong})")


def _public_blob(path: Path) -> bytes:
    """The public half beside a private key; b"" when there is none."""
    try:
        return binascii.a2b_base64(path.with_name(path.name + ".pub").read_text(encoding="utf-8").split()[1])
    except (OSError, UnicodeDecodeError, IndexError, binascii.Error):
        return b""
