"""podman for tests: the image for CPUs built here as root, without a registry, and podman on hosts of the lab.

The base of the image is made by debootstrap. Builds mount this machine's configuration of pip with the files it names.
podman gets settings for a machine where root may not raise limits, and for control groups of version 1.
"""

from __future__ import annotations

import ast
import configparser
import contextlib
import functools
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.hosts.debian import missing
from tests.hosts.lab import Lab, LabHost
from tests.patience import AMPLE

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/burst-tests:cpu"
BASE = "localhost/burst-base:bookworm"
SETTINGS_VARIABLE = "CONTAINERS_CONF"  # names a file of settings for podman
IN_BUILD = "/etc/xdg/pip"  # where pip looks for configuration on every distribution, and none of them keeps any
_PIP_OPTIONS = {
    *("cert", "client-cert", "constraint", "extra-index-url", "find-links", "index-url", "no-index", "proxy"),
    *("default-timeout", "retries", "timeout", "trusted-host"),
}
_CAP_SYS_RESOURCE = 24  # its bit in CapEff
_MAX_PROCESSES = 32768  # podman lowers its own limit to this, and a container's cannot be higher
_GENERAL = {"rw", "ro", "relatime", "noatime", "nosuid", "nodev", "noexec"}  # options of any file system
BUILD_SECONDS = 3000.0  # of all layers on a busy machine; a few when `make image` has built them


def unavailable() -> str:
    """Why no image can be built and run on this machine; empty when it can."""
    if os.geteuid() != 0:
        return "building by chroot and filling a base by debootstrap need root; run the tests as root"
    return missing(*((name, name) for name in ("debootstrap", "buildah", "podman", "catatonit", "runc")))


def podman_settings() -> str:
    """Settings that podman needs on this machine, as its containers.conf has them; empty where it needs none."""
    lines = []
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None or not int(found[1], 16) >> _CAP_SYS_RESOURCE & 1:
        limits = []
        for name, kind, most in (
            ("nofile", resource.RLIMIT_NOFILE, None),
            ("nproc", resource.RLIMIT_NPROC, _MAX_PROCESSES),
        ):
            hard = resource.getrlimit(kind)[1]
            chosen = [number for number in (hard, most) if number not in (None, resource.RLIM_INFINITY)]
            if chosen:
                limits.append(f'"{name}={min(chosen)}:{min(chosen)}"')
        lines += ["[containers]", f"default_ulimits = [{', '.join(limits)}]"]
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        lines += ["[engine]", 'runtime = "runc"']
    return "".join(f"{line}\n" for line in lines)


def _make_base() -> None:
    """The image BASE, unless it is there."""
    if subprocess.run(["podman", "image", "exists", BASE], check=False).returncode == 0:
        return
    with tempfile.TemporaryDirectory(prefix="burst-base-", dir="/var/tmp") as scratch:
        root = f"{scratch}/root"
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", root], check=True, capture_output=True)
        pack = f"tar -C {root} --one-file-system --numeric-owner -c . | podman import - {BASE}"
        subprocess.run(["bash", "-o", "pipefail", "-c", pack], check=True, capture_output=True)


def _pip_setup(folder: Path) -> list[str]:
    """Options that mount this machine's configuration of pip, written to `folder` with copies of the files it names."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    written, mounted = configparser.RawConfigParser(), dict[Path, None]()
    written.add_section("global")
    for line in sorted(printed.splitlines(), key=lambda line: line.startswith(":env:")):  # variables have precedence
        option, _, value = line.partition("=")
        name = option.rpartition(".")[2]
        if name in _PIP_OPTIONS:
            words = [_word(word, folder, mounted) for word in str(ast.literal_eval(value)).split()]
            written.set("global", name, "\n".join(words))
    with (folder / "pip.conf").open("w") as file:
        written.write(file)
    outermost = [path for path in mounted if not any(parent in mounted for parent in path.parents)]
    return [f"--volume={folder}:{IN_BUILD}:ro", *(f"--volume={path}:{path}:ro" for path in outermost)]


def _word(word: str, folder: Path, mounted: dict[Path, None]) -> str:
    """One word of a value as the build reads it: a file's copy, a mounted folder, anything else as it is."""
    path = Path(unquote(urlsplit(word).path) if word.startswith("file:") else word)
    if not path.is_absolute() or not path.exists():
        return word
    if path.is_file():
        copy = folder / f"{len(os.listdir(folder))}-{path.name}"
        shutil.copyfile(path, copy)
        return f"{IN_BUILD}/{copy.name}"
    mounted[path.parent if word.startswith("file:") else path] = None  # pages of an index may link to files beside it
    return word


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


def run(folder: Path, *words: str, network: str = "none", seconds: float = AMPLE) -> subprocess.CompletedProcess[str]:
    """`podman run` with these words, ended well; `folder` keeps the settings of podman."""
    command = ["podman", "run", "--rm", "--init", "--network", network, "--ipc", "host", *words]
    return _ended(command, variables(folder), seconds)


def _ended(command: list[str], environment: dict[str, str] | None, seconds: float) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, (command, done.stdout[-4000:], done.stderr[-4000:])
    return done


@contextlib.contextmanager
def built(tag: str, *options: str) -> Iterator[str]:
    """The image of this checkout for CPUs, for the block. Its name goes afterwards; its layers stay."""
    _make_base()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        # Isolation by chroot needs neither control groups nor another user namespace, so root can build in a container
        # too. A stage that only a default names is an image to older versions of podman.
        given = ["--isolation=chroot", "--force-rm", *_pip_setup(Path(folder))]
        given += [f"--build-arg={name}={BASE}" for name in ("CUDA_NONE_IMAGE", "DEVEL_IMAGE")]
        given += ["--build-arg=BASELINE_IMAGE=devel"]
        words = [f"--engine-option={option}" for option in given]
        burst("setup", "image", "build", "--engine", "podman", "--cuda", "none", "--tag", tag, *words, *options)
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
