"""pip, on behalf of an environment: fetch the pinned files, and install exactly those."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from baselines.install.interpreter import clean_environment
from baselines.pin import requirements
from cluster.files.errors import UsageError

_SECONDS = 3600.0  # packages with kernels are compiled
# What wheels are built for: pip takes those that it is given, exactly.
_LINUX = ["manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 36)), "linux"]
QUIET = ["--quiet", "--quiet", "--disable-pip-version-check", "--no-input"]
_OWN = [
    "--ignore-installed",
    "--no-warn-script-location",
]  # what is borrowed is no reason not to install the pinned one


def fetch(
    packages: Mapping[str, str], wheels: Path, python: Path, given: Path | None = None, version: str = ""
) -> None:
    """Put the pinned file of each package into `wheels`, for `python`, from `given` or from pip's index.

    With `version`, such as 3.12, the files are those for that Python on Linux.

    Files that are there are not fetched again. With `given` no package index is contacted. Raises UsageError.
    """
    wheels.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--no-build-isolation", "--dest", str(wheels), "--find-links", str(wheels)]
    options += ["--no-index", "--find-links", str(given)] if given else []
    if version:
        options += ["--implementation", "cp", "--python-version", version]
        options += [f"--platform={system}_{platform.machine()}" for system in _LINUX]
    where = f"{given} and {wheels}" if given else "pip's index"
    _with_list(
        packages, wheels.parent, ["download", *options], python,
        f"look whether {where} has each package of the pin with its hash",
    )  # fmt: skip


def install(packages: Mapping[str, str], wheels: Path, python: Path, environment: Mapping[str, str]) -> None:
    """Install the pinned files into the environment of `python`, without an index. Raises UsageError."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--find-links", str(wheels), *_OWN]
    advice = "read what it prints, and see to the compilers where a package is built"
    _with_list(packages, wheels.parent, ["install", *options], python, advice, environment)


def install_folder(source: Path, folder: Path, python: Path, environment: Mapping[str, str]) -> None:
    """Build a package from a copy of its folder, because building writes into it, and install it. Raises UsageError."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
        copy = Path(scratch) / source.name
        shutil.copytree(source, copy, symlinks=True)
        arguments = ["install", "--no-deps", "--no-build-isolation", "--no-index", *_OWN, str(copy)]
        _pip(arguments, folder, python, f"see to the compilers that {source.name} is built with", environment)


def _with_list(
    packages: Mapping[str, str],
    folder: Path,
    arguments: list[str],
    python: Path,
    advice: str,
    environment: Mapping[str, str] | None = None,
) -> None:
    """pip with the packages as a requirements file; it stays, for whoever wants to repeat the command by hand."""
    if packages:
        listed = folder / f"{arguments[0]}.txt"
        listed.write_text(requirements(packages), encoding="utf-8")
        _pip([*arguments, "--require-hashes", "--requirement", str(listed)], folder, python, advice, environment)


def _pip(
    arguments: list[str], folder: Path, python: Path, advice: str, environment: Mapping[str, str] | None = None
) -> None:
    """pip of this environment, run by the other one's interpreter, which needs none of its own. Raises UsageError."""
    command = [sys.executable, "-m", "pip", "--python", str(python), arguments[0], *QUIET, *arguments[1:]]
    try:
        done = subprocess.run(
            command,
            env=clean_environment() | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"pip {arguments[0]} did not end within {_SECONDS:g} s; repeat the command") from None
    if done.returncode:
        log = folder / "pip.log"
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
        said = [line for line in (done.stderr + done.stdout).splitlines() if "ERROR" in line] or ["no reason given"]
        raise UsageError(f"pip {arguments[0]} failed ({said[0].strip()[:300]}), all it printed is in {log}; {advice}")
