"""Private keys offered to a host: the given file, those of the agent, or the usual ones in ~/.ssh."""

from __future__ import annotations

import binascii
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import paramiko

_USUAL_NAMES = ("id_ed25519", "id_ecdsa", "id_rsa")
_PUBLIC = (b"ssh-", b"ecdsa-", b"sk-", b"---- BEGIN SSH2 PUBLIC", b"-----BEGIN PUBLIC")  # how public keys begin
_KINDS = (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey)


class UnusableKeyFile(paramiko.SSHException):
    """A private key file that cannot be read, or holds no private key."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path


class SlowLogin(TimeoutError):
    """A host that answered, and did not finish the login in time. It has refused nobody."""


class PrivateKeys:
    """Keys read from files, each once for a whole fleet."""

    def __init__(self) -> None:
        self._read: dict[Path, paramiko.PKey] = {}
        self._lock = threading.Lock()

    def load(self, path: Path) -> paramiko.PKey:
        """Raises PasswordRequiredException for an encrypted key, UnusableKeyFile, FileNotFoundError."""
        with self._lock:
            if path not in self._read:
                self._read[path] = _load(path)
            return self._read[path]


def log_in(
    transport: paramiko.Transport,
    user: str,
    key: Path | None,
    keys: PrivateKeys,
    *,
    ends_at: float,
    files: Sequence[Path] | None = None,
    files_only: bool = False,
) -> None:
    """Offer one key after the other until the host accepts one; at `ends_at` (monotonic) it was too slow.

    With `key`, that one, from its file or, when the file needs a passphrase, from the agent; then the agent's other
    keys. Without, the agent's keys and `files`, None for the usual ones; with `files_only` none but `key` or `files`.
    Raises the problem of a key file, or the last refusal: PasswordRequiredException, UnusableKeyFile or
    AuthenticationException; SlowLogin; SSHException when the connection breaks.
    """
    refusals: list[Exception] = []
    agent = paramiko.Agent()
    try:
        for candidate in _candidates(agent, key, keys, files, files_only):
            if isinstance(candidate, Exception):
                refusals.append(candidate)
                continue
            if time.monotonic() >= ends_at:
                raise SlowLogin
            try:
                transport.auth_timeout = ends_at - time.monotonic()
                wants_more = transport.auth_publickey(user, candidate)
            except paramiko.AuthenticationException as error:
                # paramiko's exception for a refusal is also its exception for no answer.
                if time.monotonic() >= ends_at:
                    raise SlowLogin from None
                if not transport.is_active():  # the host closes the connection after too many attempts
                    if not refusals:
                        raise paramiko.SSHException("it closed the connection during the login") from None
                    break
                refusals.append(error)
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


def _candidates(
    agent: paramiko.Agent, key: Path | None, keys: PrivateKeys, files: Sequence[Path] | None, files_only: bool
) -> Iterator[paramiko.PKey | Exception]:
    """Keys in the order they are tried, each once; an exception stands in place of a file that cannot be used."""
    offered: set[bytes] = set()
    held = {held.asbytes(): held for held in agent.get_keys()}
    if key is None and not files_only:
        yield from held.values()
    usual = tuple(Path.home() / ".ssh" / name for name in _USUAL_NAMES) if files is None else files
    for path in (key,) if key else usual:
        try:
            loaded = keys.load(path.expanduser())
        except FileNotFoundError:
            if key:
                yield UnusableKeyFile(key, "there is no such file")
            continue
        except paramiko.SSHException as error:
            from_agent = held.get(_public_blob(path.expanduser()))
            yield from_agent or error
            continue
        if key or files_only or loaded.asbytes() not in held:
            offered.add(loaded.asbytes())
            yield loaded
    if key and not files_only:
        yield from (agent_key for blob, agent_key in held.items() if blob not in offered)


def _load(path: Path) -> paramiko.PKey:
    """A key of any kind. The kinds are tried in turn, since a file's header does not name it."""
    try:
        start = path.read_bytes()[:100]
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnusableKeyFile(path, str(error.strerror)) from None
    if start.startswith(_PUBLIC):
        raise UnusableKeyFile(path, "it holds a public key; the private one has the same name without .pub")
    for kind in _KINDS:
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


def _public_blob(path: Path) -> bytes:
    """The public half beside a private key; b"" when there is none."""
    try:
        return binascii.a2b_base64(path.with_name(path.name + ".pub").read_text(encoding="utf-8").split()[1])
    except (OSError, UnicodeDecodeError, IndexError, binascii.Error):
        return b""
