"""Docker on this machine and on nodes: command lines as pure functions, and the look-up of an image."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.transport.runner import Completed, Runner

# Engines that keep images in containerd count ids in another way, so the same image has two ids where fleets are mixed.
# Creation time, layers and labels are from the image's own configuration, which both keep.
_INSPECTED = "{{.Id}} {{.Size}} {{.Created}} {{json .RootFS.Layers}} {{json .Config.Labels}}"

DOCKER = ("env", "LC_ALL=C", "docker")  # `env` answers 127 where there is no docker, as a shell would
NOT_FOUND = 127


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


def build_command(folder: Path, *, tag: str, arguments: Mapping[str, str | None], target: str | None) -> list[str]:
    """Build the Dockerfile in `folder`. An argument without a value is taken from docker's environment, where `ps` and
    shell histories do not show it."""
    command = ["docker", "build", "--file", str(folder / "Dockerfile"), "--tag", tag]
    for name, value in arguments.items():
        command += ["--build-arg", name if value is None else f"{name}={value}"]
    if target is not None:
        command += ["--target", target]
    return [*command, "--", str(folder)]


def inspect_command(image: str) -> list[str]:
    """Print id, size, creation time, layers and labels of an image."""
    return [*DOCKER, "image", "inspect", "--format", _INSPECTED, "--", image]


def save_command(image: str) -> list[str]:
    """Write an image with its name, as a tar archive, to standard output."""
    return [*DOCKER, "image", "save", "--", image]


def load_command(path: str) -> list[str]:
    """Load a saved image; docker finds out itself how it is compressed."""
    return [*DOCKER, "image", "load", "--quiet", "--input", path]


def find_image(runner: Runner, name: str, deadline_seconds: float) -> Image | None:
    """The image of that name on the runner's machine, None when it is not there.

    Raises ImageFailed when docker is absent or does not answer, Unreachable when the connection breaks.
    """
    done = runner.run(inspect_command(name), deadline_seconds=deadline_seconds)
    if done.exit_status == 0:
        return _parse(name, done.stdout)
    if "no such image" in done.stderr.lower():
        return None
    raise ImageFailed(complaint(done, "docker does not answer", "start it, or add this user to the group docker"))


def complaint(done: Completed, what: str, advice: str) -> str:
    """One sentence about a docker command that failed."""
    if done.exit_status == NOT_FOUND:
        return "docker is not found on the PATH of a plain command; install it, or link it into /usr/bin"
    if done.exit_status is None:
        return f"{what}: no answer in time; look at the docker service there, or raise --timeout"
    return f"{what} ({last_line(done.stderr)}); {advice}"


def last_line(text: str) -> str:
    """The last line that a program printed, which usually names its error."""
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no reason given"


def _parse(name: str, printed: str) -> Image:
    parts = printed.strip().split(" ", 2)
    if len(parts) != 3 or not parts[0].startswith("sha256:") or not parts[1].isdigit():
        raise ImageFailed(f"docker describes {name} as {printed[:80]!r}; expected its id and size, so update docker")
    image_id, size, content = parts
    return Image(
        name=name,
        image_id=image_id,
        content=hashlib.sha256(content.encode()).hexdigest(),
        size_bytes=int(size),
    )
