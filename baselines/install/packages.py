"""What goes into an environment: the pinned files, which pip fetches and installs, or another build in their place.

Another build is an archive of packages as they lie in an environment, with their `.dist-info`, where the files that the
pin names cannot be had. Their versions have to be those of the pin; what is different about the build is said in words
that stay with the installation and with every record.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baselines.install.interpreter import clean_environment
from baselines.pin import Flavour, canonical, requirements
from cluster.files.archive import unpack_tar
from cluster.files.errors import UsageError, shown_value

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


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherBuild:
    """What a user gives with --build."""

    package: str  # a pinned one; the archive may hold more of them
    archive: Path  # tar, in any compression that tarfile reads
    note: str  # how it differs from the package's own build

    @property
    def words(self) -> str:
        """The note, and which archive it was."""
        return f"{self.note} (archive {_sha256(self.archive).hex()[:12]})"


def other_builds(given: Sequence[str], note: str) -> list[OtherBuild]:
    """From PACKAGE=ARCHIVE, each. Raises UsageError."""
    builds = []
    for text in given:
        package, _, path = text.partition("=")
        if not package or not path:
            raise UsageError(
                f"--build {shown_value(text)} is not PACKAGE=ARCHIVE; give a package of the pin and a tar archive"
            )
        if not Path(path).is_file():
            raise UsageError(f"--build {shown_value(text)}: there is no such archive; give the path of a tar archive")
        builds.append(OtherBuild(package=canonical(package), archive=Path(path), note=note))
    if builds and not note.strip():
        raise UsageError("--build needs --build-note: say in a few words how the build differs from the package's own")
    return builds


def unpack(builds: Sequence[OtherBuild], pinned: Flavour, into: Path) -> dict[str, str]:
    """Put the builds into folder `into`; returns name -> what it is, for each package found in them.

    Raises UsageError for an archive that cannot be read, or holds other packages or versions than the pin.
    """
    versions = {canonical(name): version for name, _, version in (each.partition("==") for each in pinned.packages)}
    found: dict[str, str] = {}
    for build in builds:
        with tempfile.TemporaryDirectory(prefix=".other-build-", dir=into) as scratch:
            folder = Path(scratch)
            unpack_tar(build.archive, folder, "give a tar archive")
            named = (path.stem.rpartition("-") for path in folder.glob("*.dist-info"))
            here = {canonical(name): version for name, _, version in named}
            for name, version in {build.package: "absent", **here}.items():
                if versions.get(name) != version:
                    raise UsageError(
                        f"{build.archive} has {shown_value(name)} {shown_value(version)}, the pin says "
                        f"{versions.get(name, 'no such package')}; give a build of the pinned packages"
                    )
            for path in folder.glob("*.dist-info"):
                _record_anew(path / "RECORD", build)
            for path in folder.iterdir():
                if (into / path.name).exists():
                    raise UsageError(f"{build.archive} and another archive both have {path.name}; give one of them")
                path.rename(into / path.name)
            found |= {name: f"{version}, another build: {build.words}" for name, version in here.items()}
    return found


def _record_anew(record: Path, build: OtherBuild) -> None:
    """A package's list of files with the hashes that they have in this build, by which `verify` finds changed ones.
    Raises UsageError where a listed file is missing."""
    top = record.parents[1]
    try:
        lines = []
        for name, known, size in csv.reader(record.read_text(encoding="utf-8").splitlines()):
            if Path(name).is_absolute() or ".." in Path(name).parts:
                continue  # a program beside the packages, which no archive has
            digest = base64.urlsafe_b64encode(_sha256(top / name)).rstrip(b"=").decode() if known else ""
            lines.append([name, f"sha256={digest}" if known else "", size])
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{build.archive}: files of {record.parent.name} are not as its RECORD lists them ({error}); pack the "
            "packages whole"
        ) from None
    with open(record, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def _sha256(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
