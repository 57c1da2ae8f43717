"""An archive of unknown origin, unpacked into a temporary folder: plain files of limited size, and nowhere else.

SHA256SUMS has the sums of its files, in the form that `sha256sum -c` reads.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import re
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from cluster.files.archive import DAMAGED, members_of
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
            with open_regular(archive, "archive") as file:
                _unpack(file, archive, Path(folder))
        except UsageError as error:
            if str(archive) in str(error):
                raise
            raise UsageError(f"{archive}: {error}; nothing of it is used") from error
        except DAMAGED as error:
            raise UsageError(
                f"{archive} is no whole .tar.gz file ({shown_value(str(error))}); give one that `burst archive` made"
            ) from error
        tops = list(Path(folder).iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise UsageError(
                f"{archive} holds {len(tops)} entries at its top; expected one folder, as `burst archive` makes"
            )
        yield tops[0]


def _unpack(file: IO[bytes], archive: Path, folder: Path) -> None:
    seen: set[PurePosixPath] = set()
    with gzip.GzipFile(fileobj=file) as plain:
        content = _Limited(plain, archive)
        for tar, member in members_of(content):
            path = PurePosixPath(member.name)
            if problem := _problem(member, path) or ("is there twice" if path in seen else ""):
                raise UsageError(f"{archive}: {shown_value(member.name)} {problem}; nothing of it is used")
            seen.add(path)
            if len(seen) > MAX_FILES:
                raise UsageError(f"{archive} holds more than {MAX_FILES:,} files; nothing of it is used")
            try:
                tar.extract(member, folder, set_attrs=False, filter="data")
            except OSError as error:  # such as a file where another name needs a folder
                name = shown_value(member.name)
                raise UsageError(f"{archive}: {name} cannot be unpacked ({error.strerror})") from error
        while content.read(1 << 16):  # to the end, where the sum of all bytes stands
            pass


def _problem(member: tarfile.TarInfo, path: PurePosixPath) -> str:
    """Why a member is refused; empty for a plain file or folder below the archive's own."""
    if not (member.isfile() or member.isdir()) or member.issparse():
        return "is a link, a device or a sparse file"
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in member.name:
        return "leads outside of the archive"
    if any(len(part) > _MAX_NAME for part in path.parts) or not member.name.isprintable():
        return "is no usable name"
    return f"is larger than {MAX_BYTES >> 20} MiB" if member.size > MAX_BYTES else ""


class _Limited(io.RawIOBase):
    """What an archive unpacks to, read once from its beginning, up to MAX_BYTES: compressed zeros grow a
    thousandfold."""

    def __init__(self, source: gzip.GzipFile, archive: Path) -> None:
        self._source = source
        self._archive = archive
        self._left = MAX_BYTES

    def tell(self) -> int:
        return self._source.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        assert (whence, offset) >= (0, self.tell()), "an archive is read once"
        while (ahead := offset - self.tell()) and self.read(min(ahead, 1 << 16)):
            pass
        return self.tell()

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(self._left + 1 if size < 0 else min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise UsageError(f"{self._archive} unpacks to more than {MAX_BYTES >> 20} MiB; nothing of it is used")
        return data


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
        yield wrong(SUMS_FILE, "no readable file", "the sums that `burst archive` writes")
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
