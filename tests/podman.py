"""podman and buildah for tests: here with the settings this machine needs, and on hosts of the lab."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cluster.images.engine import ImageFailed
from cluster.images.trying import SETTINGS_VARIABLE, podman_settings
from tests.debian import missing
from tests.lab import Lab, LabHost
from tests.patience import AMPLE

ROOT = Path(__file__).resolve().parents[1]
IMAGE = "localhost/burst-tests:cpu"
_GENERAL = {"rw", "ro", "relatime", "noatime", "nosuid", "nodev", "noexec"}  # options of any file system
BUILD_SECONDS = 3000.0  # of all layers on a busy machine; a few when `make image` has built them


def unavailable() -> str:
    """Why no image can be built and run on this machine; empty when it can."""
    if os.geteuid() != 0:
        return "building by chroot and filling a base by debootstrap need root; run the tests as root"
    if reason := missing(*((name, name) for name in ("debootstrap", "buildah", "podman", "catatonit", "runc"))):
        return reason
    try:
        podman_settings()
    except ImageFailed as error:
        return str(error)
    return ""


@functools.cache
def variables(folder: Path) -> dict[str, str]:
    """The environment of commands of podman; `folder` keeps their settings."""
    path = folder / "containers.conf"
    path.write_text(podman_settings())
    return {**os.environ, SETTINGS_VARIABLE: str(path), "COLUMNS": "200"}


def burst(*arguments: str, seconds: float = BUILD_SECONDS) -> str:
    """What a command on this machine prints; it has to end well, and in time."""
    done = _ended([sys.executable, "-m", "harness", *arguments], None, seconds)
    return done.stdout + done.stderr


def run(folder: Path, *words: str, network: str = "none") -> subprocess.CompletedProcess[str]:
    """`podman run` with these words, ended well; `folder` keeps the settings of podman."""
    command = ["podman", "run", "--rm", "--init", "--network", network, "--ipc", "host", *words]
    return _ended(command, variables(folder), AMPLE)


def _ended(command: list[str], environment: dict[str, str] | None, seconds: float) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, (command, done.stdout[-4000:], done.stderr[-4000:])
    return done


@contextlib.contextmanager
def built(tag: str, *options: str) -> Iterator[str]:
    """The image of this checkout for CPUs, for the block. Its name goes afterwards; what `make image` built stays."""
    burst("image", "base", "--engine", "podman")
    burst("image", "build", "--engine", "podman", "--cuda", "none", "--tag", tag, "--pip-setup", *options)
    try:
        yield tag
    finally:
        subprocess.run(["podman", "image", "rm", "--force", tag], capture_output=True, check=True)


def give_podman(lab: Lab, host: LabHost, folder: Path) -> None:
    """A host of the lab with a podman of its own: images, containers, locks and settings, all below `folder`."""
    settings = folder / "settings"
    shutil.copytree("/etc/containers", settings)
    (settings / "containers.conf").write_text(podman_settings())
    lab.run(host, "mount", "--bind", str(settings), "/etc/containers")
    for name in ("/var/lib/containers", "/run/containers", "/run/libpod", "/var/tmp"):
        own = folder / name.replace("/", "_")
        own.mkdir(parents=True)
        Path(name).mkdir(parents=True, exist_ok=True)
        lab.run(host, "mount", "--bind", str(own), name)
    lab.run(host, "mount", "-t", "tmpfs", "lab", "/dev/shm")
    # A host of the lab has a /sys of its own, in which control groups are not mounted.
    for line in Path("/proc/self/mounts").read_text().splitlines():
        source, target, kind, options, *_ = line.split()
        if target.startswith("/sys/fs/cgroup"):
            chosen = ",".join(word for word in options.split(",") if word not in _GENERAL)
            lab.run(host, "mkdir", "-p", target)
            lab.run(host, "mount", "-t", kind, *(["-o", chosen] if chosen else []), source, target)
