"""Sending a small file to a host: written aside, compared by checksum, then renamed."""

from __future__ import annotations

import hashlib
import secrets
import time
from contextlib import suppress

from cluster.files.errors import last_line
from cluster.transport.runner import Runner, Unreachable

_TIDY_SECONDS = 10.0

# $1 is the temporary file. The bytes written are read back, so that a full disk or a bad cable is found here.
_WRITE = 'umask 077; cat > "$1" && sha256sum < "$1"'
_KEEP = 'chmod "$3" "$1" && mv -fT -- "$1" "$2"'
_DROP = 'rm -f -- "$1"'


class TransferFailed(Exception):
    """A file that did not arrive: one sentence says why. Nothing of it is left on the host."""


def put(runner: Runner, content: bytes, remote: str, *, deadline_seconds: float, mode: int = 0o644) -> str:
    """Write `content` to the absolute path `remote`; returns its SHA-256 in hexadecimal.

    The file appears whole or not at all, and replaces one of that name; its folder must be there. Raises TransferFailed
    when the host cannot write it, when the checksums differ, or at the deadline; Unreachable when the connection
    breaks; ValueError for a relative path.
    """
    if not remote.startswith("/") or "\0" in remote:
        raise ValueError(f"files are sent to {remote!r}; expected an absolute path on the host")
    ends_at = time.monotonic() + deadline_seconds
    aside = f"{remote}.{secrets.token_hex(8)}.part"
    digest = hashlib.sha256(content).hexdigest()
    kept = False
    try:
        written = runner.run(["sh", "-c", _WRITE, "sh", aside], stdin=(content,), deadline_seconds=deadline_seconds)
        if written.exit_status is None:
            raise TransferFailed(f"{remote} was not written within {deadline_seconds:g} s; give it more time")
        if written.exit_status:
            raise TransferFailed(
                f"{remote} cannot be written ({last_line(written.stderr)}); check folder and disk there"
            )
        found = written.stdout.split(maxsplit=1)[0] if written.stdout.split() else "nothing"
        if found != digest:
            raise TransferFailed(f"{remote} arrived with the checksum {found}, but {digest} was sent; send it again")
        left = max(1.0, ends_at - time.monotonic())
        moved = runner.run(["sh", "-c", _KEEP, "sh", aside, remote, f"{mode:o}"], deadline_seconds=left)
        if moved.exit_status != 0:
            raise TransferFailed(f"{remote} cannot take its name ({last_line(moved.stderr)}); check the path there")
        kept = True
        return digest
    finally:
        if not kept:
            with suppress(Unreachable):  # then the temporary file stays there
                runner.run(["sh", "-c", _DROP, "sh", aside], deadline_seconds=_TIDY_SECONDS)
