"""A base image of Debian made here: debootstrap fills a folder, and the engine imports it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from cluster.images.engine import Engine, ImageFailed, import_command, last_line

BASE_TAG = "localhost/burst-base:bookworm"  # the Dockerfile's CUDA_NONE_IMAGE
SUITE = "bookworm"

# What debootstrap downloaded, and lists that any later `apt-get update` writes anew.
_LEFT_OVER = ("var/cache/apt/archives/*.deb", "var/cache/apt/*.bin", "var/lib/apt/lists/*_*", "var/log/bootstrap.log")


def debootstrap_command(folder: Path, *, suite: str, mirror: str | None) -> list[str]:
    """Fill `folder` with the packages that Debian calls essential, and apt. No mirror: debootstrap's own choice."""
    return ["debootstrap", "--variant=minbase", "--", suite, str(folder), *([mirror] if mirror else [])]


def make_base(engine: Engine, *, tag: str, suite: str, mirror: str | None) -> None:
    """Make the image `tag`. Raises ImageFailed, and leaves nothing but an image."""
    if os.geteuid() != 0:
        raise ImageFailed("debootstrap makes devices and changes owners, so it needs root; run this as root")
    for program in ("debootstrap", "tar"):
        if shutil.which(program) is None:
            raise ImageFailed(f"{program} is not found; install Debian's package {program}")
    # Not /tmp, which may be in memory, or mounted without devices.
    with tempfile.TemporaryDirectory(prefix="burst-base-", dir="/var/tmp") as scratch:
        folder = Path(scratch, "root")
        done = subprocess.run(
            debootstrap_command(folder, suite=suite, mirror=mirror), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ImageFailed(
                f"debootstrap made no {suite} ({last_line(done.stderr or done.stdout)}); look at --suite and --mirror"
            )
        for pattern in _LEFT_OVER:
            for path in folder.glob(pattern):
                path.unlink()
        _import(engine, folder, tag)


def _import(engine: Engine, folder: Path, tag: str) -> None:
    packing = subprocess.Popen(
        ["tar", "--directory", str(folder), "--one-file-system", "--numeric-owner", "--create", "."],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert packing.stdout is not None
    with packing.stdout as archive:
        done = subprocess.run(import_command(engine, tag), stdin=archive, capture_output=True, text=True, check=False)
    if packing.wait() or done.returncode:
        raise ImageFailed(f"{engine} did not import {folder.name} as {tag} ({last_line(done.stderr)}); free its disk")
