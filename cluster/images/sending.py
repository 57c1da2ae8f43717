"""Sending a large file to a host; a broken transfer is resumed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster.images.archive import Archive
from cluster.images.engine import last_line
from cluster.transport.runner import Completed, Runner
from cluster.transport.transfer import TransferFailed

_CHUNK_BYTES = 2**20

# $1 is the file, $2 the unfinished one. The part is read whole: its checksum decides whether it can be resumed.
_STATE = """\
set -eu
digest() { sha256sum < "$1" | cut -d' ' -f1; }
if [ -f "$1" ] && [ ! -L "$1" ]; then printf 'whole %s\\n' "$(digest "$1")"; fi
if [ -f "$2" ] && [ ! -L "$2" ]; then printf 'part %s %s\\n' "$(stat -c %s -- "$2")" "$(digest "$2")"; fi
"""
_BEGIN = 'set -eu; umask 022; rm -f -- "$1"; set -C; cat > "$1"; sha256sum < "$1"'  # -C: not through a link
_GO_ON = 'set -eu; cat >> "$1"; sha256sum < "$1"'
_KEEP = 'mv -fT -- "$1" "$2"'
_DROP = 'rm -f -- "$1"'

OnProgress = Callable[[int, int], None]  # bytes there so far, bytes in all; called from another thread


def send(runner: Runner, archive: Archive, remote: str, *, ends_at: float, on_progress: OnProgress) -> int:
    """Send the archive to the absolute path `remote`, compared by SHA-256; returns the number of bytes sent.

    `remote`.part of an earlier attempt is kept when it is the beginning of this archive. On failure it stays for the
    next attempt, except when the checksum of the whole is wrong. Raises TransferFailed, or Unreachable when the
    connection breaks.
    """
    part = f"{remote}.part"
    state = dict(
        line.partition(" ")[::2] for line in _run(runner, ["-c", _STATE, "sh", remote, part], ends_at).splitlines()
    )
    if state.get("whole") == archive.sha256:
        on_progress(archive.size_bytes, archive.size_bytes)
        return 0
    start = _usable(state.get("part", ""), archive)
    pieces = _Pieces(archive.path, start, archive.size_bytes, on_progress)
    done = _attempt(runner, ["-c", _GO_ON if start else _BEGIN, "sh", part], ends_at, pieces)
    if pieces.problem:
        raise TransferFailed(f"reading {archive.path} failed here ({pieces.problem}); check its disk")
    found = _output(done, part).partition(" ")[0]
    if found != archive.sha256:
        _run(runner, ["-c", _DROP, "sh", part], ends_at)
        raise TransferFailed(f"{remote} arrived with the checksum {found[:12]}, sent {archive.sha256[:12]}; send again")
    _run(runner, ["-c", _KEEP, "sh", part, remote], ends_at)
    return archive.size_bytes - start


def _usable(part: str, archive: Archive) -> int:
    """Bytes of the part on the host that are the beginning of the archive; 0 when they differ from it."""
    size, _, digest = part.partition(" ")
    if not size.isdigit() or not 0 < int(size) <= archive.size_bytes:
        return 0
    ours = hashlib.sha256()
    left = int(size)
    with archive.path.open("rb") as stream:
        while left and (chunk := stream.read(min(left, _CHUNK_BYTES))):
            ours.update(chunk)
            left -= len(chunk)
    return int(size) if ours.hexdigest() == digest else 0


class _Pieces:
    """The archive from `start` on. A file that cannot be read ends them early and leaves its reason in `problem`."""

    def __init__(self, path: Path, start: int, total: int, on_progress: OnProgress) -> None:
        self._path, self._start, self._total, self._on_progress = path, start, total, on_progress
        self.problem = ""

    def __iter__(self) -> Iterator[bytes]:
        sent = self._start
        try:
            with self._path.open("rb") as stream:
                stream.seek(sent)
                while chunk := stream.read(_CHUNK_BYTES):
                    yield chunk
                    sent += len(chunk)
                    self._on_progress(sent, self._total)
        except OSError as error:
            self.problem = error.strerror or "unknown error"


def _run(runner: Runner, arguments: list[str], ends_at: float) -> str:
    return _output(_attempt(runner, arguments, ends_at, ()), arguments[-1])


def _attempt(runner: Runner, arguments: list[str], ends_at: float, stdin: _Pieces | tuple[()]) -> Completed:
    left = max(1.0, ends_at - time.monotonic())
    return runner.run(["env", "LC_ALL=C", "sh", *arguments], stdin=stdin, deadline_seconds=left)


def _output(done: Completed, path: str) -> str:
    if done.exit_status is None:
        raise TransferFailed(f"{path} was not written in time; repeat the push, which resumes there")
    if done.exit_status != 0:
        raise TransferFailed(f"{path} cannot be written ({last_line(done.stderr)}); check folder and disk there")
    return done.stdout
