"""Container images: built and saved here, loaded on every node that lacks them, and verified there.

Docker and podman take the same words. An image goes to a node as the standard input of `image load`, so nothing of it
lies on the node's disk; or each node pulls it from a registry.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.files.errors import UsageError, last_line
from cluster.files.filesystem import cache_folder
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import InventoryNode
from cluster.transport.fleet import on_each
from cluster.transport.reach import LocalRunner
from cluster.transport.runner import Completed, Connect, Runner, Unreachable

Engine = Literal["docker", "podman"]
ENGINES: tuple[Engine, ...] = ("docker", "podman")
Via = Literal["ssh", "registry"]
CPU_BASE = "library/debian:bookworm"  # the Dockerfile's CUDA_NONE_IMAGE
ASK_SECONDS = 60.0
_CHUNK_BYTES = 2**20
_NOT_FOUND = 127
_ABSENT = ("no such image", "image not known")
_ID = re.compile(r"(?:sha256:)?([0-9a-f]{64})")  # podman shows it without its kind
# Engines that keep images in containerd count ids in another way, so the same image has two ids where fleets are mixed.
# Creation time, layers and labels are from the image's own configuration, which both keep.
_INSPECTED = "{{.Id}} {{.Size}} {{.Created}} {{json .RootFS.Layers}} {{json .Config.Labels}}"


class ImageFailed(Exception):
    """An image that cannot be found, saved, loaded or verified: one sentence with the reason and the next step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """One image as an engine shows it."""

    name: str  # name:tag, as the caller gave it
    image_id: str  # sha256:...
    content: str  # SHA-256 of a part of its configuration: creation, layers, labels
    size_bytes: int  # unpacked

    def same_as(self, other: Image) -> bool:
        """Whether two engines hold one image, even when they count ids differently."""
        return self.image_id == other.image_id or self.content == other.content


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One node, the image it should have, and how it is reached."""

    name: str
    host: Host
    image: str  # name:tag
    engine: Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOutcome:
    """What became of one node."""

    target: Target
    state: Literal["present", "loaded", "failed"]
    finding: str  # the image that it has, or the reason


def build_command(
    engine: Engine,
    folder: Path,
    *,
    tag: str,
    arguments: Mapping[str, str | None],
    target: str | None = None,
    options: Sequence[str] = (),
) -> list[str]:
    """Build the Dockerfile in `folder`. An argument without a value is taken from the engine's environment, where `ps`
    and shell histories do not show it. Docker's format keeps an image's id when podman saves and loads it.
    """
    command = [engine, "build", *(["--format", "docker"] if engine == "podman" else [])]
    command += ["--file", str(folder / "Dockerfile"), "--tag", tag]
    for name, value in arguments.items():
        command += ["--build-arg", name if value is None else f"{name}={value}"]
    if target is not None:
        command += ["--target", target]
    return [*command, *options, "--", str(folder)]


def gpu_options(engine: str, gpus: str) -> list[str]:
    """GPUs for a container: docker has an option, podman takes devices of the Container Device Interface by name."""
    return ["--device", f"nvidia.com/gpu={gpus}"] if engine == "podman" else ["--gpus", gpus]


def tagged(image: str) -> str:
    """The name with its tag: docker reads one without as `latest`, but saves all tags of it.

    Raises UsageError for an image given by its digest or id, which has no name that nodes could find it by.
    """
    if "@" in image or image.startswith("sha256:"):
        raise UsageError(f"the image {image} has no name to load it under; give it one with docker tag, and name that")
    return image if ":" in image.rpartition("/")[2] else f"{image}:latest"


def find_image(runner: Runner, engine: Engine, name: str, seconds: float = ASK_SECONDS) -> Image | None:
    """The image of that name on the runner's machine, None when it is not there.

    Raises ImageFailed when the engine is absent or does not answer, Unreachable when the connection breaks.
    """
    done = runner.run(_words(engine, "image", "inspect", "--format", _INSPECTED, "--", name), deadline_seconds=seconds)
    if done.exit_status == 0:
        parts = done.stdout.strip().split(" ", 2)
        image_id = _ID.fullmatch(parts[0])
        if len(parts) != 3 or image_id is None or not parts[1].isdigit():
            printed = done.stdout.strip()[:80]
            raise ImageFailed(f"{engine} describes {name} as {printed!r}; expected id and size, so update {engine}")
        content = hashlib.sha256(parts[2].encode()).hexdigest()
        return Image(name=name, image_id=f"sha256:{image_id[1]}", content=content, size_bytes=int(parts[1]))
    if any(words in done.stderr.lower() for words in _ABSENT):
        return None
    raise _failed(engine, done, f"{engine} does not answer", "start it, or let this user use it")


def targets_of(nodes: Sequence[InventoryNode], *, image: str | None, engine: Engine | None) -> list[Target]:
    """One target per node: `image` and `engine`, or its site's. Raises UsageError for a node without an image."""
    targets = []
    for node in nodes:
        container = node.site.container
        name = image or container.image
        if name is None:
            raise UsageError(f"no image is named for {node.name}; give --image, or container.image in its site")
        own: Engine = "docker" if container.engine == "none" else container.engine
        targets.append(Target(name=node.name, host=node.host, image=tagged(name), engine=engine or own))
    return targets


def images_here(nodes: Sequence[InventoryNode], targets: Sequence[Target]) -> dict[tuple[Engine, str], Image]:
    """The targets' images on this machine, by engine and name.

    Raises UsageError for one that is absent here, or that is not the one whose id a site names; ImageFailed for an
    engine that does not answer.
    """
    runner, here = LocalRunner(), dict[tuple[Engine, str], Image]()
    for node, target in zip(nodes, targets, strict=True):
        key = target.engine, target.image
        if key not in here:
            found = find_image(runner, *key)
            if found is None:
                raise UsageError(
                    f"{target.engine} here has no image {target.image}; "
                    f"build it with burst setup image build --tag {target.image}"
                )
            here[key] = found
        container = node.site.container
        named = container.image is not None and tagged(container.image) == target.image
        if named and container.image_id not in (None, here[key].image_id):
            raise UsageError(
                f"{node.name} is to have {target.image} with the id {(container.image_id or '')[:19]}, but here it is "
                f"{here[key].image_id[:19]}; build that one, or correct container.image_id"
            )
    return here


def push(
    targets: Sequence[Target],
    here: Mapping[tuple[Engine, str], Image],
    connect: Connect,
    *,
    via: Via,
    at_once: int,
    seconds: float,
    say: Callable[[str], None],
) -> list[ImageOutcome]:
    """Bring its image to each target that lacks it, at most `seconds` for each; `say` gets a line for each step.

    A node that has the image is left as it is; one that has another image of that name gets this one. Raises UsageError
    where `via` is "registry" and a name has none: docker would publish it at its own; ImageFailed when there is no
    folder for the saved image here.
    """
    for target in targets if via == "registry" else ():
        registry, slash, _ = target.image.partition("/")
        if not slash or not ("." in registry or ":" in registry or registry == "localhost"):
            raise UsageError(
                f"the image {target.image} names no registry; expected a name such as lab.example:5000/{target.image}, "
                f"which {target.engine} tag gives it"
            )
    folder = cache_folder("images")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ImageFailed(
            f"{folder} cannot be made ({error.strerror}); set XDG_CACHE_HOME to a folder of yours"
        ) from None
    outcomes: dict[str, ImageOutcome] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        ready = _Ready(Path(scratch), via, say)

        def work(target: Target) -> ImageOutcome:
            ends_at = time.monotonic() + seconds
            try:
                with connect(target.host, min(seconds, ASK_SECONDS)) as runner:
                    return _deliver(runner, target, here[target.engine, target.image], ready, ends_at)
            except (ImageFailed, Unreachable) as error:
                return ImageOutcome(target=target, state="failed", finding=str(error))

        for target, answer in on_each(targets, work, seconds, at_once):
            if isinstance(answer, Unreachable):
                answer = ImageOutcome(target=target, state="failed", finding=str(answer))
            outcomes[target.name] = answer
            say(f"{target.name}: {answer.state}")
    return [outcomes[target.name] for target in targets]


class _Ready:
    """Each image in a file of this machine, or in its registry, made when the first node needs it."""

    def __init__(self, folder: Path, via: Via, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._via = via
        self._say = say
        self._made: dict[tuple[Engine, str], Path | ImageFailed | None] = {}
        self._lock = threading.Lock()

    def path(self, target: Target) -> Path | None:
        """The saved image; None where nodes pull it from its registry. Raises ImageFailed, to each node that asks."""
        key = target.engine, target.image
        with self._lock:
            if key not in self._made:
                try:
                    self._made[key] = self._make(target, self._folder / f"{len(self._made)}.tar")
                except ImageFailed as error:
                    self._made[key] = error
            made = self._made[key]
        if isinstance(made, ImageFailed):
            raise made
        return made

    def _make(self, target: Target, path: Path) -> Path | None:
        does = "push" if self._via == "registry" else "save"
        options = ["--quiet"] if does == "push" else ["--output", str(path)]
        self._say(f"{target.engine} {does} {target.image}")
        command = _words(target.engine, "image", does, *options, "--", target.image)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            place = "the registry" if does == "push" else f"the disk of {self._folder}"
            raise ImageFailed(
                f"{target.engine} here did not {does} {target.image} ({last_line(done.stderr)}); look at {place}"
            )
        return path if does == "save" else None


def _deliver(runner: Runner, target: Target, image: Image, ready: _Ready, ends_at: float) -> ImageOutcome:
    found = find_image(runner, target.engine, target.image)
    if found is not None and found.same_as(image):
        return ImageOutcome(target=target, state="present", finding=_as_here(found, image))
    path = ready.path(target)
    words = ["image", "pull", "--quiet", "--", target.image] if path is None else ["image", "load", "--quiet"]
    left = max(1.0, ends_at - time.monotonic())
    stdin = "" if path is None else _pieces(path)
    done = runner.run(_words(target.engine, *words), stdin=stdin, deadline_seconds=left)
    if done.exit_status != 0:
        raise _failed(target.engine, done, f"{target.engine} did not take it", "check its disk there")
    found = find_image(runner, target.engine, target.image)
    if found is None or not found.same_as(image):
        has = found.image_id[:19] if found else "nothing"
        raise ImageFailed(f"{target.engine} has {has} as {target.image}, expected {image.image_id[:19]}; push it again")
    return ImageOutcome(target=target, state="loaded", finding=_as_here(found, image))


def _pieces(path: Path) -> Iterator[bytes]:
    """A file that cannot be read to its end gives an archive cut short, which the engine refuses."""
    with suppress(OSError), path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


def _as_here(found: Image, here: Image) -> str:
    """The node's image, with a note when its engine counts ids differently."""
    if found.image_id == here.image_id:
        return found.image_id[:19]
    return f"the same content as {here.image_id[:19]}, which this node's engine calls {found.image_id[:19]}"


def _words(engine: Engine, *words: str) -> list[str]:
    """A command of the engine in English. `env` answers 127 where there is no such program, as a shell would."""
    return ["env", "LC_ALL=C", engine, *words]


def _failed(engine: Engine, done: Completed, what: str, advice: str) -> ImageFailed:
    if done.exit_status == _NOT_FOUND:
        return ImageFailed(
            f"{engine} is not found on the PATH of a plain command; install it, or link it into /usr/bin"
        )
    if done.exit_status is None:
        return ImageFailed(f"{what}: no answer in time; look at {engine} and the load there, or raise --timeout")
    return ImageFailed(f"{what} ({last_line(done.stderr)}); {advice}")
