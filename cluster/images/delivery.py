"""The work on one node: look for the image, check the disk, send the archive, load it, verify it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from cluster.images.archive import Archive
from cluster.images.engine import (
    IMAGE_FOLDER,
    Engine,
    Image,
    ImageFailed,
    Key,
    complaint,
    find_image,
    last_line,
    load_command,
)
from cluster.images.sending import send
from cluster.inventory.hosts import Host
from cluster.transport.runner import Connect, Runner, Unreachable
from cluster.transport.transfer import TransferFailed

ATTEMPTS = 3
_PAUSE_SECONDS = 1.0
_ASK_SECONDS = 60.0
_TIDY_SECONDS = 10.0

Stage = Literal["asking", "sending", "comparing", "loading"]


class Watch(Protocol):
    """Receives the progress of each node, from several threads."""

    def stage(self, node: str, stage: Stage) -> None: ...

    def progress(self, node: str, done_bytes: int, all_bytes: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One node, the image it should have, and how it is reached."""

    name: str
    host: Host
    image: str  # name:tag
    engine: Engine
    folder: str | None  # absolute path for archives on the node; None: one of our own on its disk

    @property
    def key(self) -> Key:
        """Which image it should have."""
        return self.engine, self.image


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivered:
    """The result of delivering an image to a node."""

    node_image: Image
    sent_bytes: int  # in the attempt that succeeded
    attempts: int


def look(target: Target, connect: Connect, seconds: float, watch: Watch) -> Image | None:
    """The image of that name on the node, if any. Raises ImageFailed or Unreachable."""
    watch.stage(target.name, "asking")
    with connect(target.host, seconds) as runner:
        return find_image(runner, target.engine, target.image, min(_ASK_SECONDS, seconds))


def deliver(target: Target, archive: Archive, connect: Connect, seconds: float, watch: Watch) -> Delivered:
    """Send the archive to the node's own disk, load it and remove it there. Raises ImageFailed or Unreachable."""

    def once(runner: Runner, ends_at: float) -> Delivered:
        place, sent = _bring(runner, target, archive, ends_at, watch, unpacked_here=True)
        loaded = _load(runner, target, archive, place, ends_at, watch)
        _remove(runner, place)
        return Delivered(node_image=loaded, sent_bytes=sent, attempts=1)

    return _attempts(target, connect, seconds, once)


def deposit(target: Target, archive: Archive, connect: Connect, seconds: float, watch: Watch) -> int:
    """Send the archive to a folder other nodes see as well; returns the bytes sent. Raises as `deliver`."""

    def once(runner: Runner, ends_at: float) -> Delivered:
        _, sent = _bring(runner, target, archive, ends_at, watch, unpacked_here=False)
        return Delivered(node_image=archive.image, sent_bytes=sent, attempts=1)

    return _attempts(target, connect, seconds, once).sent_bytes


def collect(target: Target, archive: Archive, connect: Connect, seconds: float, watch: Watch) -> Delivered:
    """Load the archive that `deposit` left in the shared folder, after comparing its checksum as this node reads it."""

    def once(runner: Runner, ends_at: float) -> Delivered:
        ask_space(runner, target.folder, target.engine, _left(ends_at)).check(0, archive.image.size_bytes)
        place = shared_place(target, archive)
        watch.stage(target.name, "comparing")
        _compare(runner, archive, place, ends_at)
        loaded = _load(runner, target, archive, place, ends_at, watch)
        return Delivered(node_image=loaded, sent_bytes=0, attempts=1)

    return _attempts(target, connect, seconds, once)


def withdraw(target: Target, archive: Archive, connect: Connect, seconds: float) -> None:
    """Remove the archive that `deposit` left, and nothing else. Raises Unreachable."""
    with connect(target.host, seconds) as runner:
        _remove(runner, shared_place(target, archive))


def shared_place(target: Target, archive: Archive) -> str:
    """Path of the archive in a shared folder, the same on all nodes."""
    assert target.folder is not None, target
    return f"{target.folder}/{archive.file_name}"


def _attempts(
    target: Target, connect: Connect, seconds: float, once: Callable[[Runner, float], Delivered]
) -> Delivered:
    """Repeat `once`, on a new connection, after a broken connection or a damaged transfer.

    An error of the node itself is final.
    """
    ends_at = time.monotonic() + seconds
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with connect(target.host, _left(ends_at)) as runner:
                done = once(runner, ends_at)
                return Delivered(node_image=done.node_image, sent_bytes=done.sent_bytes, attempts=attempt)
        except (Unreachable, TransferFailed) as error:
            if attempt == ATTEMPTS or time.monotonic() + _PAUSE_SECONDS >= ends_at:
                raise ImageFailed(f"{error} ({attempt} attempts)") from None
            time.sleep(_PAUSE_SECONDS)
    raise AssertionError("the last attempt returns or raises")


def _bring(
    runner: Runner, target: Target, archive: Archive, ends_at: float, watch: Watch, *, unpacked_here: bool
) -> tuple[str, int]:
    """The archive's path on the node and the bytes sent for it."""
    space = ask_space(runner, target.folder, target.engine, _left(ends_at))
    # Several nodes may share this folder: the node's name in the path keeps them from writing into one file.
    name = f"{target.name}-{archive.file_name}" if unpacked_here else archive.file_name
    place = f"{space.folder}/{name}"
    watch.stage(target.name, "sending")
    there = _bytes_there(runner, place, ends_at)
    needed = max(0, archive.size_bytes - there)
    space.check(needed, archive.image.size_bytes if unpacked_here else 0)
    on_progress = partial(watch.progress, target.name)
    return place, send(runner, archive, place, ends_at=ends_at, on_progress=on_progress)


def _bytes_there(runner: Runner, place: str, ends_at: float) -> int:
    """Bytes that an earlier attempt left, which need no more room."""
    script = 'for file; do stat -c %s -- "$file" 2>/dev/null; done; :'
    done = runner.run(["sh", "-c", script, "sh", place, f"{place}.part"], deadline_seconds=_left(ends_at))
    return sum(int(line) for line in done.stdout.split())


def _compare(runner: Runner, archive: Archive, place: str, ends_at: float) -> None:
    """Compare an archive that was sent through another node: this node may see another file, or none."""
    found = runner.run(["env", "LC_ALL=C", "sha256sum", "--", place], deadline_seconds=_left(ends_at))
    if found.exit_status != 0:
        raise ImageFailed(f"{place} cannot be read on this node; look whether that folder is mounted there")
    digest = found.stdout.lstrip("\\").partition(" ")[0]  # a backslash begins the line of a name that needed escaping
    if digest != archive.sha256:
        raise TransferFailed(f"{place} has the checksum {digest[:12]}, expected {archive.sha256[:12]}; send it again")


def _load(runner: Runner, target: Target, archive: Archive, place: str, ends_at: float, watch: Watch) -> Image:
    """Load, and compare the image that the engine then has."""
    watch.stage(target.name, "loading")
    done = runner.run(load_command(target.engine, place), deadline_seconds=_left(ends_at))
    if done.exit_status != 0:
        raise ImageFailed(
            complaint(target.engine, done, f"{target.engine} did not load it", f"{place} is kept for the next push")
        )
    loaded = find_image(runner, target.engine, target.image, min(_ASK_SECONDS, _left(ends_at)))
    if loaded is None or not loaded.same_as(archive.image):
        found = loaded.image_id[:19] if loaded else "nothing"
        raise ImageFailed(
            f"after loading, {target.engine} has {found} as {target.image}, expected {archive.image.image_id[:19]}; "
            "find the other program that loads images there, then push again"
        )
    return loaded


def _remove(runner: Runner, place: str) -> None:
    runner.run(["rm", "-f", "--", place], deadline_seconds=_TIDY_SECONDS)


def _left(ends_at: float) -> float:
    return max(1.0, ends_at - time.monotonic())


# $1 is the folder for archives; empty: one of our own on the node's disk. This user must own it: an archive is loaded
# just after its checksum was compared, and only the folder's owner could change it in between. $2 is the engine, $3
# the format of its `info` that prints the folder of its images.
_ASK = """\
set -eu
umask 022
if [ -n "$1" ]; then
  mkdir -p -- "$1"; folder=$1
else
  folder=/var/tmp/burst-images-$(id -u)
  mkdir -p -m 700 -- "$folder"
  { [ -O "$folder" ] && [ ! -L "$folder" ]; } || { echo "$folder belongs to another user" >&2; exit 3; }
fi
[ -w "$folder" ] || { echo "$folder is not writable" >&2; exit 3; }
printf 'folder %s\\n' "$folder"
printf 'archives %s\\n' "$(stat -f -c '%i %a %S' -- "$folder")"
root=$("$2" info --format "$3" 2>/dev/null) || root=
if [ -n "$root" ] && room=$(stat -f -c '%i %a %S' -- "$root" 2>/dev/null); then printf 'engine %s\\n' "$room"; fi
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Room:
    """Free space of one file system."""

    file_system: str
    free_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The folder for archives on a node, and the free space for them and for the engine's images."""

    folder: str
    archives: _Room
    engine: Engine
    images: _Room | None  # None: the engine's folder cannot be seen, as when its daemon runs elsewhere

    def check(self, archive_bytes: int, image_bytes: int) -> None:
        """Raises ImageFailed when one of the two does not fit. `archive_bytes` are still to be written."""
        shared = self.images is not None and self.images.file_system == self.archives.file_system
        _fits(self.folder, self.archives, archive_bytes + (image_bytes if shared else 0))
        if self.images is not None and not shared:
            _fits(f"{self.engine}'s folder", self.images, image_bytes)


def ask_space(runner: Runner, folder: str | None, engine: Engine, deadline_seconds: float) -> Space:
    """Make the folder for archives where it is absent, and look at both file systems. Raises ImageFailed."""
    command = ["env", "LC_ALL=C", "sh", "-c", _ASK, "sh", folder or "", engine, IMAGE_FOLDER[engine]]
    done = runner.run(command, deadline_seconds=deadline_seconds)
    if done.exit_status != 0:
        said = last_line(done.stderr) if done.exit_status else "no answer in time"
        raise ImageFailed(f"there is no place for the archive ({said}); give --folder a path this user can write there")
    said_of = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    return Space(
        folder=said_of["folder"],
        archives=_room(said_of["archives"]),
        engine=engine,
        images=_room(said_of["engine"]) if "engine" in said_of else None,
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
