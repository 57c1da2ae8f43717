"""Docker and podman, here and on nodes: command lines as pure functions, and the look-up of an image.

Podman takes docker's commands. This module holds the differences: podman has no daemon, buildah builds its images, its
ids have no `sha256:` before them, and it calls an absent image "not known".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.transport.runner import Completed, Runner

# Engines that keep images in containerd count ids in another way, so the same image has two ids where fleets are mixed.
# Creation time, layers and labels are from the image's own configuration, which both keep.
_INSPECTED = "{{.Id}} {{.Size}} {{.Created}} {{json .RootFS.Layers}} {{json .Config.Labels}}"

Engine = Literal["docker", "podman"]
ENGINES: tuple[Engine, ...] = ("docker", "podman")
NOT_FOUND = 127

_ABSENT = ("no such image", "image not known")
_ID = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_CUDA = re.compile(r'"burst\.cuda":"(\w+)"')
_ADVICE = {
    "docker": "start it, or add this user to the group docker",
    "podman": "run podman info there as this user, which says more",
}
# Of `info`: where the engine keeps unpacked images.
IMAGE_FOLDER = {"docker": "{{.DockerRootDir}}", "podman": "{{.Store.GraphRoot}}"}


class ImageFailed(Exception):
    """An image that cannot be found, saved, loaded or verified: one sentence with the reason and the next step."""


Key = tuple[Engine, str]  # docker and podman of one machine have images of their own


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """One image as an engine shows it."""

    engine: Engine
    name: str  # name:tag, as the caller gave it
    image_id: str  # sha256:...
    content: str  # SHA-256 of a part of its configuration: creation, layers, labels
    size_bytes: int  # unpacked
    cuda: str = ""  # its label burst.cuda: a version, or none; empty: an image without it

    def same_as(self, other: Image) -> bool:
        """Whether two engines hold one image, even when they count ids differently."""
        return self.image_id == other.image_id or self.content == other.content


def build_command(
    engine: Engine,
    folder: Path,
    *,
    tag: str,
    arguments: Mapping[str, str | None],
    target: str | None = None,
    volumes: Sequence[str] = (),
    options: Sequence[str] = (),
) -> list[str]:
    """Build the Dockerfile in `folder`. An argument without a value is taken from the engine's environment, where `ps`
    and shell histories do not show it. `volumes` are mounted while podman's images are built; docker cannot do that.
    """
    if engine == "docker":
        assert not volumes, volumes
        command = ["docker", "build"]
    else:
        # Isolation by chroot needs neither a daemon nor control groups nor another user namespace, so root can build
        # inside a container too. Docker's format keeps labels and the absence of a health check, and the image's id
        # when it is saved and loaded.
        command = ["buildah", "build", "--isolation", "chroot", "--format", "docker", "--layers", "--force-rm"]
        for volume in volumes:
            command += ["--volume", volume]
    command += ["--file", str(folder / "Dockerfile"), "--tag", tag]
    for name, value in arguments.items():
        command += ["--build-arg", name if value is None else f"{name}={value}"]
    if target is not None:
        command += ["--target", target]
    return [*command, *options, "--", str(folder)]


def engine_command(engine: Engine, *words: str) -> list[str]:
    """A command of the engine in English. `env` answers 127 where there is no such program, as a shell would."""
    return ["env", "LC_ALL=C", engine, *words]


def version_command(engine: Engine) -> list[str]:
    """Print the version of what runs containers; fails where docker's daemon does not answer."""
    return engine_command(engine, "version", "--format", "{{.Server.Version}}")


def inspect_command(engine: Engine, image: str) -> list[str]:
    """Print id, size, creation time, layers and labels of an image."""
    return engine_command(engine, "image", "inspect", "--format", _INSPECTED, "--", image)


def save_command(engine: Engine, image: str) -> list[str]:
    """Write an image with its name, as a tar archive, to standard output."""
    return engine_command(engine, "image", "save", "--", image)


def load_command(engine: Engine, path: str) -> list[str]:
    """Load a saved image; the engine finds out itself how it is compressed."""
    return engine_command(engine, "image", "load", "--quiet", "--input", path)


def import_command(engine: Engine, tag: str) -> list[str]:
    """Make an image of the tar archive of a root folder on standard input."""
    return engine_command(engine, "import", "-", tag)


def gpu_options(engine: str, gpus: str) -> list[str]:
    """GPUs for a container: docker has an option, podman takes devices of the Container Device Interface by name."""
    return ["--device", f"nvidia.com/gpu={gpus}"] if engine == "podman" else ["--gpus", gpus]


def find_image(runner: Runner, engine: Engine, name: str, deadline_seconds: float) -> Image | None:
    """The image of that name on the runner's machine, None when it is not there.

    Raises ImageFailed when the engine is absent or does not answer, Unreachable when the connection breaks.
    """
    done = runner.run(inspect_command(engine, name), deadline_seconds=deadline_seconds)
    if done.exit_status == 0:
        return _parse(engine, name, done.stdout)
    if any(words in done.stderr.lower() for words in _ABSENT):
        return None
    raise ImageFailed(silence(engine, done))


def silence(engine: Engine, done: Completed) -> str:
    """One sentence about an engine that does not answer."""
    return complaint(engine, done, f"{engine} does not answer", _ADVICE[engine])


def complaint(engine: Engine, done: Completed, what: str, advice: str) -> str:
    """One sentence about a command of the engine that failed."""
    if done.exit_status == NOT_FOUND:
        return f"{engine} is not found on the PATH of a plain command; install it, or link it into /usr/bin"
    if done.exit_status is None:
        where = "docker service" if engine == "docker" else "load and disk"
        return f"{what}: no answer in time; look at the {where} there, or raise --timeout"
    return f"{what} ({last_line(done.stderr)}); {advice}"


def last_line(text: str) -> str:
    """The last line that a program printed, which usually names its error."""
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no reason given"


def _parse(engine: Engine, name: str, printed: str) -> Image:
    parts = printed.strip().split(" ", 2)
    image_id = _ID.fullmatch(parts[0])
    if len(parts) != 3 or image_id is None or not parts[1].isdigit():
        raise ImageFailed(f"{engine} describes {name} as {printed[:80]!r}; expected id and size, so update {engine}")
    return Image(
        engine=engine,
        name=name,
        image_id=f"sha256:{image_id[1]}",
        content=hashlib.sha256(parts[2].encode()).hexdigest(),
        size_bytes=int(parts[1]),
        cuda=found[1] if (found := _CUDA.search(parts[2])) else "",
    )
