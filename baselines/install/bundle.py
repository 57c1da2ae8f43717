"""Packed sources and wheels, for machines without a network; and reading them, or what a user put together by hand.

A bundle is a folder, or a tar archive of one, with `wheels/` and `repositories/<commit>.git`. `--from` takes it, and
also any folder with wheels and clones at its top: a clone is recognised by the commits it holds, a wheel by its hash.
"""

from __future__ import annotations

import contextlib
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from baselines.checkout import pack_repository
from baselines.install.interpreter import look_at, this_interpreter
from baselines.install.packages import fetch
from baselines.install.places import Place
from baselines.pin import Checkout, Flavour, allows
from cluster.files.errors import UsageError

WHEELS, REPOSITORIES = "wheels", "repositories"


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What an installation may use instead of the network. Without `wheels` pip asks its index."""

    wheels: Path | None = None
    repositories: dict[str, Path] = field(default_factory=dict)  # commit -> repository on this machine


class _Repositories(dict[str, Path]):
    """Finds the repository that holds a commit, at the first use of that commit; refuses a commit that none holds."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def get(self, commit: str, default: object = None) -> Path:
        candidates = [self._folder / REPOSITORIES / f"{commit}.git", self._folder, *sorted(self._folder.iterdir())]
        for path in candidates:
            if path.is_dir() and _holds(path, commit):
                return path
        raise UsageError(f"{self._folder} has no repository with commit {commit[:12]}; put a clone with it there")


@contextlib.contextmanager
def opened(given: Path | None, scratch: Path) -> Iterator[Given]:
    """The files of a bundle, or of a folder; an archive is unpacked below `scratch` for the block. Raises
    UsageError."""
    if given is None:
        yield Given()
        return
    if given.is_dir():
        yield _of_folder(given.absolute())
        return
    if not given.exists():
        raise UsageError(
            f"--from {given} does not exist; give a folder, or an archive that burst baselines bundle made"
        )
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=scratch) as folder:
        try:
            with tarfile.open(given) as archive:
                archive.extractall(folder, filter="data")
        except (tarfile.TarError, OSError, EOFError) as error:
            raise UsageError(f"{given} cannot be unpacked ({error}); give a bundle, or pack it again") from None
        yield _of_folder(Path(folder))


def _of_folder(folder: Path) -> Given:
    wheels = folder / WHEELS
    return Given(wheels=wheels if wheels.is_dir() else folder, repositories=_Repositories(folder))


def make_bundle(place: Place, out: Path, *, python: Path | None = None) -> None:
    """Pack what `place` needs into the archive `out`, which must not be there yet. Raises UsageError.

    The wheels are those for `python`'s version, which has to be one that the pin allows; its torch does not matter.
    """
    if out.exists():
        raise UsageError(f"{out} exists; give --out a path that does not")
    pinned = place.pinned
    path = python or this_interpreter()
    found = look_at(path)
    if not allows(pinned.python, found.python):
        raise UsageError(
            f"{place.system} ({place.flavour}) needs Python {pinned.python}, and wheels are chosen for the Python that "
            f"packs them, found {found.python}; give another with --python"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=out.parent) as scratch:
        folder = Path(scratch) / "bundle"
        (folder / WHEELS).mkdir(parents=True)
        for checkout in _checkouts(pinned):
            pack_repository(checkout, folder / REPOSITORIES / f"{checkout.commit}.git")
        fetch({**pinned.build, **pinned.packages}, folder / WHEELS, path)
        part = Path(scratch) / "bundle.tar"
        with tarfile.open(part, "w") as archive:
            for name in (WHEELS, REPOSITORIES):
                if (folder / name).exists():
                    archive.add(folder / name, arcname=name)
        part.rename(out)


def _checkouts(pinned: Flavour) -> list[Checkout]:
    """The repositories that are needed, submodules as repositories of their own."""
    if pinned.checkout is None:
        return []
    own = [Checkout(repository=one.repository, commit=one.commit, tree="0" * 40) for one in pinned.checkout.submodules]
    return [pinned.checkout, *own]


def _holds(folder: Path, commit: str) -> bool:
    """Whether `folder` itself, and no repository around it, is one that has the commit."""
    if not ((folder / ".git").exists() or (folder / "HEAD").is_file()):
        return False
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), "cat-file", "-e", f"{commit}^{{commit}}"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        raise UsageError("git is not installed; install it to fetch compared systems") from None
