"""Sending a file to a host: written aside, compared by checksum, then renamed."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from cluster.transport.runner import Runner, Unreachable

_CHUNK_BYTES = 262144
_TIDY_SECONDS = 10.0

# $1 is the temporary file. The bytes written are read back, so that a full disk or a bad cable is found here.
_WRITE = 'umask 077; cat > "$1" && sha256sum < "$1"'
_KEEP = 'chmod "$3" "$1" && mv -fT -- "$1" "$2"'
_DROP = 'rm -f -- "$1"'

# Called with the bytes sent so far and the bytes in all, from another thread.
OnProgress = Callable[[int, int], None]


class TransferFailed(Exception):
    """A file that did not arrive: one sentence says why. Nothing of it is left on the host."""


def put(
    runner: Runner,
    content: bytes | Path,
    remote: str,
    *,
    deadline_seconds: float,
    mode: int = 0o644,
    on_progress: OnProgress | None = None,
) -> str:
    """Write `content`, or the file at that path, to the absolute path `remote`; returns its SHA-256 in hexadecimal.

    The file appears whole or not at all, and replaces one of that name; its folder must be there. Raises TransferFailed
    when the host cannot write it, when the checksums differ, or at the deadline; Unreachable when the connection
    breaks; ValueError for a relative path; OSError when the local file cannot be opened.
    """
    if not remote.startswith("/") or "\0" in remote:
        raise ValueError(f"files are sent to {remote!r}; expected an absolute path on the host")
    ends_at = time.monotonic() + deadline_seconds
    aside = f"{remote}.{secrets.token_hex(8)}.part"
    source = _Source(content, on_progress)
    kept = False
    try:
        written = runner.run(
            ["sh", "-c", _WRITE, "sh", aside], stdin=source.chunks(), deadline_seconds=deadline_seconds
        )
        if source.problem:
            raise TransferFailed(
                f"{remote} was not sent: reading the file here failed ({source.problem}); check its disk"
            )
        if written.exit_status is None:
            raise TransferFailed(f"{remote} was not written within {deadline_seconds:g} s; give it more time")
        if written.exit_status:
            raise TransferFailed(
                f"{remote} cannot be written ({_last_line(written.stderr)}); check folder and disk there"
            )
        digest = source.digest.hexdigest()
        found = written.stdout.split(maxsplit=1)[0] if written.stdout.split() else "nothing"
        if found != digest:
            raise TransferFailed(f"{remote} arrived with the checksum {found}, but {digest} was sent; send it again")
        left = max(1.0, ends_at - time.monotonic())
        moved = runner.run(["sh", "-c", _KEEP, "sh", aside, remote, f"{mode:o}"], deadline_seconds=left)
        if moved.exit_status != 0:
            raise TransferFailed(f"{remote} cannot take its name ({_last_line(moved.stderr)}); check the path there")
        kept = True
        return digest
    finally:
        source.close()
        if not kept:
            with suppress(Unreachable):  # then the temporary file stays there
                runner.run(["sh", "-c", _DROP, "sh", aside], deadline_seconds=_TIDY_SECONDS)


class _Source:
    """The content in pieces, with its checksum."""

    def __init__(self, content: bytes | Path, on_progress: OnProgress | None) -> None:
        self._content = content
        self._file: IO[bytes] | None = content.open("rb") if isinstance(content, Path) else None
        self._total = content.stat().st_size if isinstance(content, Path) else len(content)
        self._on_progress = on_progress
        self.digest = hashlib.sha256()
        self.problem = ""

    def chunks(self) -> Iterator[bytes]:
        """The pieces. A file that cannot be read ends them early and leaves its reason in `problem`."""
        sent = 0
        for chunk in self._pieces():
            self.digest.update(chunk)
            yield chunk
            sent += len(chunk)
            if self._on_progress:
                self._on_progress(sent, self._total)

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _pieces(self) -> Iterator[bytes]:
        if isinstance(self._content, bytes):
            for start in range(0, len(self._content), _CHUNK_BYTES):
                yield self._content[start : start + _CHUNK_BYTES]
            return
        assert self._file is not None
        try:
            while chunk := self._file.read(_CHUNK_BYTES):
                yield chunk
        except (OSError, ValueError) as error:  # ValueError: closed early, because the host ended the transfer
            self.problem = " ".join(str(error).split())


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no reason given"
