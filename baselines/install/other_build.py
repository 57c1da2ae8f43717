"""Another build of pinned packages in the place of the files that the pin names, where those cannot be had.

An archive holds packages as they lie in an environment, with their `.dist-info`. Their versions have to be those of the
pin; what is different about the build is said in words that stay with the installation and with every record.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from baselines.install.places import InstallPlace
from baselines.pin import Flavour, canonical
from cluster.files.archive import unpack_tar
from cluster.files.errors import UsageError, shown_value
from engine.measurement import write_json
from engine.reader import read_json

FILES = "builds.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherBuild:
    """What a user gives with --build."""

    package: str  # a pinned one; the archive may hold more of them
    archive: Path  # tar, in any compression that tarfile reads
    note: str  # how it differs from the package's own build

    @property
    def words(self) -> str:
        """The note, and which archive it was."""
        return f"{self.note} (archive {_sha256(self.archive)[:12]})"


def parse(given: Sequence[str], note: str) -> list[OtherBuild]:
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
            unpack_tar(build.archive, Path(scratch), "give a tar archive")
            here = packages_in(Path(scratch))
            for name, version in {build.package: "absent", **here}.items():
                if versions.get(name) != version:
                    raise UsageError(
                        f"{build.archive} has {shown_value(name)} {shown_value(version)}, the pin says "
                        f"{versions.get(name, 'no such package')}; give a build of the pinned packages"
                    )
            for path in Path(scratch).iterdir():
                if (into / path.name).exists():
                    raise UsageError(f"{build.archive} and another archive both have {path.name}; give one of them")
                path.rename(into / path.name)
            found |= {name: f"{version}, another build: {build.words}" for name, version in here.items()}
    return found


def write_files(names: Collection[str], folder: Path, place: InstallPlace) -> None:
    """Note what was unpacked into `folder`, before it is moved: the packages, and the SHA-256 of each file."""
    files = {str(path.relative_to(folder)): _sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    write_json(place.folder / FILES, {"packages": sorted(names), "files": files})


def read_files(place: InstallPlace) -> list[str]:
    """The packages of an installation that are another build."""
    path = place.folder / FILES
    return list(cast(dict[str, list[str]], read_json(path))["packages"]) if path.exists() else []


def changed_files(packages: Collection[str], place: InstallPlace) -> list[str]:
    """Files of other builds that are missing or are not as in their archive."""
    if not packages:
        return []
    files = cast(dict[str, dict[str, str]], read_json(place.folder / FILES))["files"]
    paths = {name: place.packages / name for name in files}
    return [f"{name}: it is not as its archive had it" for name, path in paths.items() if _sha256(path) != files[name]]


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "missing"


def packages_in(folder: Path) -> dict[str, str]:
    """The packages that lie in a folder, by the names of their .dist-info: canonical name -> version."""
    named = (path.name.removesuffix(".dist-info").rpartition("-") for path in folder.glob("*.dist-info"))
    return {canonical(name): version for name, _, version in named}
