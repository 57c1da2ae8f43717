"""Programs run in an image on this machine: how a container is started, within the limits that this machine has."""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

from cluster.images.engine import Image, ImageFailed, gpu_options

SETTINGS_VARIABLE = "CONTAINERS_CONF"  # names a file of settings for podman and buildah

IN_IMAGE = "/burst"  # where the Dockerfile puts the checkout

_CAP_SYS_RESOURCE = 24  # its bit in CapEff
_MOST_PROCESSES = 32768  # podman lowers its own limit to this, and a container's cannot be higher
_STATUS = Path("/proc/self/status")
_UNIFIED = Path("/sys/fs/cgroup/cgroup.controllers")  # where control groups are of version 2


def run_command(image: Image, words: Sequence[str], *, gpus: bool, options: Sequence[str] = ()) -> list[str]:
    """Run the image's program with `words`, and remove the container. It has no network: nothing may be fetched."""
    command = [image.engine, "run", "--rm", "--init", "--network", "none", "--ipc", "host"]
    if gpus:
        command += gpu_options(image.engine, "all")
    return [*command, *options, image.name, *words]


def tests_command(checkout: Path, paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words that run some of the checkout's tests in the stage `test`, after options of the engine that mount
    them there with the records that some of them read."""
    options = []
    for folder in ("tests", "results/published"):
        options += ["--volume", f"{checkout}/{folder}:{IN_IMAGE}/{folder}:ro"]
    return options, ["python", "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "--", *paths]


def podman_settings() -> str:
    """Settings that podman needs on this machine, as its containers.conf has them; empty where it needs none.

    Where root may not raise limits, as in a container or some virtual machines, podman's own limits are refused. Where
    control groups are of version 1 or mixed, its usual runtime refuses to start and runc does not. Raises ImageFailed
    when runc is needed and absent.
    """
    lines = []
    if not may_raise_limits(_STATUS.read_text()):
        limits = []
        for name, kind, most in (
            ("nofile", resource.RLIMIT_NOFILE, None),
            ("nproc", resource.RLIMIT_NPROC, _MOST_PROCESSES),
        ):
            hard = resource.getrlimit(kind)[1]
            chosen = [number for number in (hard, most) if number not in (None, resource.RLIM_INFINITY)]
            if chosen:
                limits.append(f'"{name}={min(chosen)}:{min(chosen)}"')
        lines += ["[containers]", f"default_ulimits = [{', '.join(limits)}]"]
    if not _UNIFIED.exists():
        if shutil.which("runc") is None:
            raise ImageFailed(
                "control groups of this machine are of version 1, for which podman needs runc; install it"
            )
        lines += ["[engine]", 'runtime = "runc"']
    return "".join(f"{line}\n" for line in lines)


def may_raise_limits(status: str) -> bool:
    """Whether /proc/self/status shows the capability for it."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> _CAP_SYS_RESOURCE & 1)
