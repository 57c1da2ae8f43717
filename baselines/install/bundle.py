"""Packed sources and wheels, for machines without a network; and reading them, or what a user put together by hand.

A bundle is a folder, or a tar archive of one, with `wheels/` and `sources/<commit>/*.pack`, git's own packs. `--from`
takes it, and also any folder with wheels and clones at its top: a clone is recognised by the commits it holds, a wheel
by its hash.
"""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from baselines.checkout import PACKS, pack
from baselines.install.interpreter import look_at, this_interpreter
from baselines.install.packages import fetch
from baselines.install.places import InstallPlace
from baselines.pin import allows, canonical, name_of, without
from cluster.files.archive import unpack_tar
from cluster.files.errors import UsageError

WHEELS = "wheels"


@contextlib.contextmanager
def opened(given: Path | None, scratch: Path) -> Iterator[Path | None]:
    """The folder of a bundle, or the folder that was given; an archive is unpacked below `scratch` for the block.
    Raises UsageError."""
    if given is None or given.is_dir():
        yield given and given.absolute()
        return
    if not given.exists():
        raise UsageError(
            f"--from {given} does not exist; give a folder, or an archive that burst setup baselines bundle made"
        )
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=scratch) as folder:
        unpack_tar(given, Path(folder), "give a bundle, or pack it again")
        yield Path(folder)


def wheels_of(given: Path | None) -> Path | None:
    """Where the wheels of an opened bundle or folder lie."""
    return given / WHEELS if given and (given / WHEELS).is_dir() else given


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
        folder.mkdir()
        if pinned.checkout is not None:
            with opened(given, Path(scratch)) as sources:
                pack(pinned.checkout, folder, sources)
        packages = without(pinned.packages, {*left_out, *(pinned.borrowable if borrow else ())})
        fetch({**pinned.build, **packages}, folder / WHEELS, path, version=version)
        with tarfile.open(folder.with_suffix(".tar"), "w") as archive:
            for part in (PACKS, WHEELS):
                if (folder / part).exists():
                    archive.add(folder / part, arcname=part)
        folder.with_suffix(".tar").rename(out)
