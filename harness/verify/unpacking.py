"""An archive of unknown origin, unpacked into a temporary folder: plain files of limited size, and nowhere else.

SHA256SUMS has the sums of its files, in the form that `sha256sum -c` reads.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import re
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from cluster.files.archive import DAMAGED, extract_inside, members_of
from cluster.files.errors import shown_value
from cluster.files.filesystem import open_regular
from engine.reader import read_regular
from harness.base.errors import UsageError
from harness.verify.finding import Failure

MAX_BYTES = 1 << 30  # of all files unpacked: ten thousand records are 100 MB
MAX_FILES = 100_000
_MAX_NAME = 240  # characters of one part of a path
SUMS_FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


@contextlib.contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """The one folder that `archive` holds, unpacked; it is gone at the end.

    Raises UsageError for a file that is no such archive, and for one with links, devices, names that lead outside, the
    same name twice, or more than MAX_FILES files or MAX_BYTES bytes.
    """
    with tempfile.TemporaryDirectory(prefix="burst-verify-") as folder:
        try:
            with open_regular(archive, "run or archive") as file, tempfile.TemporaryFile() as plain:
                _decompress(file, plain)
                _unpack(plain, Path(folder))
        except UsageError as error:
            if str(archive) in str(error):
                raise
            raise UsageError(f"{archive}: {error}; nothing of it is used") from error
        except DAMAGED as error:
            raise UsageError(
                f"{archive} is no run, and no whole .tar.gz archive of one ({shown_value(str(error))}); give a run's "
                "directory, or what `burst verify pack` made of it, .jsonl or .tar.gz"
            ) from error
        tops = list(Path(folder).iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise UsageError(
                f"{archive} holds {len(tops)} entries at its top; expected one folder, as `burst verify pack` makes"
            )
        yield tops[0]


def _decompress(file: IO[bytes], plain: IO[bytes]) -> None:
    """Write the tar file that a .tar.gz holds, to its end, where the sum of all bytes stands: compressed zeros grow a
    thousandfold."""
    with gzip.GzipFile(fileobj=file) as packed:
        while block := packed.read(1 << 20):
            plain.write(block)
            if plain.tell() > MAX_BYTES:
                raise UsageError(f"it unpacks to more than {MAX_BYTES >> 20} MiB")
    plain.seek(0)


def _unpack(plain: IO[bytes], folder: Path) -> None:
    """Extract every member inside the folder. What no archive of ours holds is refused before."""
    seen: set[PurePosixPath] = set()
    for tar, member in members_of(plain):
        path, name = PurePosixPath(member.name), shown_value(member.name)
        if problem := _problem(member, path) or ("is there twice" if path in seen else ""):
            raise UsageError(f"{name} {problem}")
        seen.add(path)
        if len(seen) > MAX_FILES:
            raise UsageError(f"it holds more than {MAX_FILES:,} files")
        try:
            extract_inside(tar, member, folder, set_attrs=False)
        except OSError as error:  # such as a file where another name needs a folder
            raise UsageError(f"{name} cannot be unpacked ({error.strerror})") from error


def _problem(member: tarfile.TarInfo, path: PurePosixPath) -> str:
    """Why a member is refused; empty for a plain file or folder below the archive's own."""
    if not (member.isfile() or member.isdir()) or member.issparse():
        return "is a link, a device or a sparse file"
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in member.name:
        return "leads outside of the archive"
    if any(len(part) > _MAX_NAME for part in path.parts) or not member.name.isprintable():
        return "is no usable name"
    return ""


def sums_of(folder: Path) -> str:
    """A line per file below `folder`, in order of their names; SHA256SUMS itself has none."""
    return "".join(f"{_digest(folder / name)}  {name}\n" for name in _files(folder))


def sums_failures(folder: Path) -> Iterator[Failure]:
    """Files below `folder` that differ from its SHA256SUMS, are missing there, or are not in it."""

    def wrong(place: str, found: str, expected: str) -> Failure:
        return Failure(place=place, check=SUMS_FILE, found=found, expected=expected)

    try:
        lines = read_regular(folder / SUMS_FILE).decode().splitlines()
    except (OSError, ValueError):
        yield wrong(SUMS_FILE, "no readable file", "the sums that `burst verify pack` writes")
        return
    stated: dict[str, str] = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None or match[2] in stated:
            yield wrong(SUMS_FILE, f"the line {line[:80]!r}", "a SHA-256 digest, two spaces and a name, each name once")
        else:
            stated[match[2]] = match[1]
    files = set(_files(folder))
    for name in sorted(stated.keys() | files):
        if name not in files:
            yield wrong(name, "no such file", "a file, as SHA256SUMS names it")
        elif name not in stated:
            yield wrong(name, "a file that SHA256SUMS does not name", "no other files")
        elif (digest := _digest(folder / name)) != stated[name]:
            yield wrong(name, f"SHA-256 {digest[:16]}...", f"{stated[name][:16]}...")


def _files(folder: Path) -> list[str]:
    """Names of all files below `folder`, links among them."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in paths if path != folder / SUMS_FILE)


def _digest(path: Path) -> str:
    """Of a regular file; empty for anything else, which no line matches."""
    if path.is_symlink() or not path.is_file():
        return ""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
