"""Packed sources and wheels, for machines without a network; and reading them, or what a user put together by hand.

A bundle is a folder, or a tar archive of one, with `wheels/` and `sources/<commit>/`, and installing it needs no git.
`--from` takes it, and also any folder with wheels and clones at its top: a clone is recognised by the commits it holds,
a wheel by its hash.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from baselines.checkout import LISTINGS, SOURCE, write_source
from baselines.install.interpreter import look_at, this_interpreter
from baselines.install.packages import fetch
from baselines.install.places import InstallPlace
from baselines.pin import Checkout, allows, canonical, name_of, without
from cluster.files.archive import unpack_tar
from cluster.files.errors import UsageError

WHEELS, SOURCES = "wheels", "sources"


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallSources:
    """What an installation may use instead of the network. Without `wheels` pip asks its index."""

    wheels: Path | None = None
    repositories: dict[str, Path] = field(default_factory=dict)  # commit -> repository on this machine
    sources: Path | None = None  # folder of checked-out sources, by commit

    def copy_source(self, checkout: Checkout, folder: Path) -> None:
        """Put a source that a bundle has into `folder`, where none is; whoever needs it compares it with the pin."""
        packed = None if self.sources is None else self.sources / checkout.commit
        if packed is not None and packed.is_dir() and not (folder / SOURCE).exists():
            shutil.copytree(packed / SOURCE, folder / SOURCE, symlinks=True)
            shutil.copyfile(packed / LISTINGS, folder / LISTINGS)


class _Repositories(dict[str, Path]):
    """Finds the repository that holds a commit, at the first use of that commit; refuses a commit that none holds."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def get(self, commit: str, default: object = None) -> Path:
        candidates = [self._folder, *sorted(self._folder.iterdir())]
        for path in candidates:
            if path.is_dir() and _holds(path, commit):
                return path
        raise UsageError(f"{self._folder} has no repository with commit {commit[:12]}; put a clone with it there")


@contextlib.contextmanager
def opened(given: Path | None, scratch: Path) -> Iterator[InstallSources]:
    """The files of a bundle, or of a folder; an archive is unpacked below `scratch` for the block. Raises
    UsageError."""
    if given is None:
        yield InstallSources()
        return
    if given.is_dir():
        yield _of_folder(given.absolute())
        return
    if not given.exists():
        raise UsageError(
            f"--from {given} does not exist; give a folder, or an archive that burst baselines bundle made"
        )
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=scratch) as folder:
        unpack_tar(given, Path(folder), "give a bundle, or pack it again")
        yield _of_folder(Path(folder))


def _of_folder(folder: Path) -> InstallSources:
    wheels = folder / WHEELS
    return InstallSources(
        wheels=wheels if wheels.is_dir() else folder, repositories=_Repositories(folder), sources=folder / SOURCES
    )


def make_bundle(
    place: InstallPlace,
    out: Path,
    *,
    python: Path | None = None,
    version: str = "",
    given: Path | None = None,
    borrow: bool = False,
    leave_out: Collection[str] = (),
) -> None:
    """Pack what `place` needs into the archive `out`, which must not be there yet. Raises UsageError.

    The wheels are those for `python`'s version, or for `version` on Linux, which has to be one that the pin allows;
    torch does not matter. `given` is a folder with clones, in the place of the repositories' addresses. With `borrow`
    packages are left out that the pin also allows from beside torch; so are those that `leave_out` names.
    """
    if out.exists():
        raise UsageError(f"{out} exists; give --out a path that does not")
    pinned = place.pinned
    path = python or this_interpreter()
    found = version or look_at(path).python
    left_out = {canonical(name) for name in leave_out}
    if unknown := left_out - set(map(name_of, pinned.packages)):
        raise UsageError(f"{place.system} pins no {sorted(unknown)[0]}; give --without one of its packages")
    if not allows(pinned.python, found):
        raise UsageError(
            f"{place.system} ({place.flavour}) needs Python {pinned.python}, and wheels are chosen for the Python that "
            f"packs them, found {found}; give another with --python or --python-version"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=out.parent.absolute()) as scratch:
        folder = Path(scratch) / "bundle"
        (folder / WHEELS).mkdir(parents=True)
        if pinned.checkout is not None:
            clones = _Repositories(given.absolute()) if given else None
            write_source(pinned.checkout, folder / SOURCES / pinned.checkout.commit, clones)
        packages = without(pinned.packages, {*left_out, *(pinned.borrowable if borrow else ())})
        fetch({**pinned.build, **packages}, folder / WHEELS, path, version=version)
        part = Path(scratch) / "bundle.tar"
        with tarfile.open(part, "w") as archive:
            for name in (WHEELS, SOURCES):
                if (folder / name).exists():
                    archive.add(folder / name, arcname=name)
        part.rename(out)


def _holds(folder: Path, commit: str) -> bool:
    """Whether `folder` itself, and no repository around it, is one that has the commit."""
    if not ((folder / ".git").exists() or (folder / "HEAD").is_file()):
        return False
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), "cat-file", "-e", f"{commit}^{{commit}}"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        raise UsageError("git is not installed; install it to fetch compared systems") from None
