"""Is there room on a node for an archive and for the image it unpacks to?"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.images.engine import ImageFailed, last_line
from cluster.transport.runner import Runner

# $1 is the folder for archives; empty: one of our own on the node's disk. Nobody else may own that: what we load from
# it has been compared with its checksum just before, and only its owner could change it in between.
_ASK = """\
set -eu
umask 022
if [ -n "$1" ]; then
  mkdir -p -- "$1"; folder=$1
else
  folder=/var/tmp/burst-images-$(id -u)
  mkdir -p -m 700 -- "$folder"
  { [ -O "$folder" ] && [ ! -L "$folder" ]; } || { echo "$folder belongs to somebody else" >&2; exit 3; }
fi
[ -w "$folder" ] || { echo "$folder is not writable" >&2; exit 3; }
printf 'folder %s\\n' "$folder"
printf 'archives %s\\n' "$(stat -f -c '%i %a %S' -- "$folder")"
root=$(docker info --format '{{.DockerRootDir}}' 2>/dev/null) || root=
if [ -n "$root" ] && room=$(stat -f -c '%i %a %S' -- "$root" 2>/dev/null); then printf 'engine %s\\n' "$room"; fi
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Room:
    """What one file system has left for users."""

    file_system: str
    free_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Where archives go on a node, and what room there is for them and for docker's images."""

    folder: str
    archives: _Room
    engine: _Room | None  # None: docker's folder cannot be seen, as when its daemon runs elsewhere

    def check(self, archive_bytes: int, image_bytes: int) -> None:
        """Raises ImageFailed when one of the two does not fit. `archive_bytes` is what is still to be written."""
        shared = self.engine is not None and self.engine.file_system == self.archives.file_system
        _fits(self.folder, self.archives, archive_bytes + (image_bytes if shared else 0))
        if self.engine is not None and not shared:
            _fits("docker's folder", self.engine, image_bytes)


def ask_space(runner: Runner, folder: str | None, deadline_seconds: float) -> Space:
    """Make the folder for archives where it is absent, and look at both file systems. Raises ImageFailed."""
    done = runner.run(["env", "LC_ALL=C", "sh", "-c", _ASK, "sh", folder or ""], deadline_seconds=deadline_seconds)
    if done.exit_status != 0:
        said = last_line(done.stderr) if done.exit_status else "no answer in time"
        raise ImageFailed(f"there is no place for the archive ({said}); give --folder a path this user can write there")
    said_of = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    return Space(
        folder=said_of["folder"],
        archives=_room(said_of["archives"]),
        engine=_room(said_of["engine"]) if "engine" in said_of else None,
    )


def _room(text: str) -> _Room:
    file_system, blocks, block_bytes = text.split()
    return _Room(file_system=file_system, free_bytes=int(blocks) * int(block_bytes))


def _fits(where: str, room: _Room, needed_bytes: int) -> None:
    if room.free_bytes < needed_bytes:
        raise ImageFailed(
            f"{where} has {room.free_bytes / 2**30:.1f} GiB free, the image needs {needed_bytes / 2**30:.1f} GiB; "
            "make room there, or give --folder another disk"
        )
