"""What happens on one node: is the image there, does it fit, bring it, load it, verify it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from cluster.images.archive import Archive
from cluster.images.engine import Image, ImageFailed, complaint, find_image, load_command
from cluster.images.sending import send
from cluster.images.space import ask_space
from cluster.inventory.hosts import Host
from cluster.transport.runner import Connect, Runner, Unreachable
from cluster.transport.transfer import TransferFailed

ATTEMPTS = 3
_PAUSE_SECONDS = 1.0
_ASK_SECONDS = 60.0
_TIDY_SECONDS = 10.0

Stage = Literal["asking", "sending", "comparing", "loading"]


class Watch(Protocol):
    """Is told how far each node is, from several threads."""

    def stage(self, node: str, stage: Stage) -> None: ...

    def progress(self, node: str, done_bytes: int, all_bytes: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One node, what it is to have, and how it is reached."""

    name: str
    host: Host
    image: str  # name:tag
    folder: str | None  # absolute path for archives on the node; None: one of our own on its disk


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivered:
    """What bringing an image to a node took."""

    node_image: Image
    sent_bytes: int  # in the attempt that succeeded
    attempts: int


def look(target: Target, connect: Connect, seconds: float, watch: Watch) -> Image | None:
    """The image of that name on the node, if any. Raises ImageFailed or Unreachable."""
    watch.stage(target.name, "asking")
    with connect(target.host, seconds) as runner:
        return find_image(runner, target.image, min(_ASK_SECONDS, seconds))


def deliver(target: Target, archive: Archive, connect: Connect, seconds: float, watch: Watch) -> Delivered:
    """Send the archive to a place of the node's own, load it and remove it there. Raises ImageFailed or Unreachable."""

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
    """Load the archive that `deposit` left in the shared folder, after comparing what this node sees of it."""

    def once(runner: Runner, ends_at: float) -> Delivered:
        ask_space(runner, target.folder, _left(ends_at)).check(0, archive.image.size_bytes)
        place = shared_place(target, archive)
        watch.stage(target.name, "comparing")
        _compare(runner, archive, place, ends_at)
        loaded = _load(runner, target, archive, place, ends_at, watch)
        return Delivered(node_image=loaded, sent_bytes=0, attempts=1)

    return _attempts(target, connect, seconds, once)


def withdraw(target: Target, archive: Archive, connect: Connect, seconds: float) -> None:
    """Remove what `deposit` left, and nothing else. Raises Unreachable."""
    with connect(target.host, seconds) as runner:
        _remove(runner, shared_place(target, archive))


def shared_place(target: Target, archive: Archive) -> str:
    """Where the archive lies in a shared folder: the same on all nodes."""
    assert target.folder is not None, target
    return f"{target.folder}/{archive.file_name}"


def _attempts(
    target: Target, connect: Connect, seconds: float, once: Callable[[Runner, float], Delivered]
) -> Delivered:
    """Try again, on a new connection, what a broken connection or a damaged transfer ended. What the node itself
    refuses is refused again, so it is not asked twice."""
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
    space = ask_space(runner, target.folder, _left(ends_at))
    # A folder of one node may be several nodes' home: their names keep them from writing into one file.
    name = f"{target.name}-{archive.file_name}" if unpacked_here else archive.file_name
    place = f"{space.folder}/{name}"
    watch.stage(target.name, "sending")
    there = _bytes_there(runner, place, ends_at)
    needed = max(0, archive.size_bytes - there)
    space.check(needed, archive.image.size_bytes if unpacked_here else 0)
    on_progress = partial(watch.progress, target.name)
    return place, send(runner, archive, place, ends_at=ends_at, on_progress=on_progress)


def _bytes_there(runner: Runner, place: str, ends_at: float) -> int:
    """Of an earlier attempt, which need no room any more."""
    script = 'for file; do stat -c %s -- "$file" 2>/dev/null; done; :'
    done = runner.run(["sh", "-c", script, "sh", place, f"{place}.part"], deadline_seconds=_left(ends_at))
    return sum(int(line) for line in done.stdout.split())


def _compare(runner: Runner, archive: Archive, place: str, ends_at: float) -> None:
    """What was sent through another node is compared here: this node may see another file, or none."""
    found = runner.run(["env", "LC_ALL=C", "sha256sum", "--", place], deadline_seconds=_left(ends_at))
    if found.exit_status != 0:
        raise ImageFailed(f"{place} cannot be read on this node; look whether that folder is mounted there")
    digest = found.stdout.lstrip("\\").partition(" ")[0]  # a backslash begins the line of a name that needed escaping
    if digest != archive.sha256:
        raise TransferFailed(f"{place} has the checksum {digest[:12]}, expected {archive.sha256[:12]}; send it again")


def _load(runner: Runner, target: Target, archive: Archive, place: str, ends_at: float, watch: Watch) -> Image:
    """Load, and compare what docker then has."""
    watch.stage(target.name, "loading")
    done = runner.run(load_command(place), deadline_seconds=_left(ends_at))
    if done.exit_status != 0:
        raise ImageFailed(complaint(done, "docker did not load it", f"{place} is kept for the next push"))
    loaded = find_image(runner, target.image, min(_ASK_SECONDS, _left(ends_at)))
    if loaded is None or not loaded.same_as(archive.image):
        what = loaded.image_id[:19] if loaded else "nothing"
        raise ImageFailed(
            f"after loading, docker has {what} as {target.image}, expected {archive.image.image_id[:19]}; "
            "look who else loads images there, then push again"
        )
    return loaded


def _remove(runner: Runner, place: str) -> None:
    runner.run(["rm", "-f", "--", place], deadline_seconds=_TIDY_SECONDS)


def _left(ends_at: float) -> float:
    return max(1.0, ends_at - time.monotonic())
