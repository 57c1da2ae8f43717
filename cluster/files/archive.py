"""Tar archives of unknown origin, unpacked member by member: nothing outside, bounded memory, bounded size.

The standard library's `data` filter keeps files inside. It does not bound what the headers of a small compressed file
grow to, how many of them follow each other, nor the maps of sparse files, which no archive of ours holds.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from cluster.files.errors import UsageError, shown_value
from cluster.files.filesystem import open_regular

MAX_MEMBERS = 1_000_000
MAX_LEVELS = 100  # of folders in each other
_MAX_READ = 1 << 20  # bytes of one header with long names; data is read in smaller pieces
_MAX_HEADERS = 8  # that describe one member: long names, extended attributes
_TOO_LARGE = f"one of its headers is larger than {_MAX_READ >> 20} MiB"
_DESCRIBING = (  # types of headers that describe the next member
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
_COMPRESSED = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\x00", lzma.open))
DAMAGED = (  # what the library raises for an archive that is not what its headers say
    tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, ArithmeticError, LookupError,
    RecursionError,
)  # fmt: skip


class Source(Protocol):
    """Bytes that are read forwards."""

    def read(self, size: int, /) -> bytes: ...
    def seek(self, offset: int, whence: int, /) -> int: ...
    def tell(self) -> int: ...


def unpack_tar(archive: Path, folder: Path, expected: str) -> None:
    """Unpack a tar archive, compressed or not, into `folder`; no file of it comes to lie outside.

    Raises UsageError, which says what to give (`expected`), for one that cannot be read, is damaged, cut off, or larger
    than the room there is.
    """
    room = shutil.disk_usage(folder).free
    try:
        with open_regular(archive, "archive") as file:
            for tar, member in members_of(_plain(file)):
                room -= member.size
                if room < 0:
                    raise UsageError("it unpacks to more than the file system has room for")
                extract_inside(tar, member, folder)
    except tarfile.ReadError:  # whose text has a line for each way of packing that was tried
        raise UsageError(f"{archive} cannot be unpacked: it is no whole tar archive; {expected}") from None
    except DAMAGED as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = "its links or headers lead to each other" if isinstance(error, RecursionError) else reason
        raise UsageError(f"{archive} cannot be unpacked: {shown_value(reason)}; {expected}") from None


def extract_inside(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, *, set_attrs: bool = True) -> None:
    """Extract a member into `folder`, by the library's `data` filter; with its mode and times if `set_attrs`.

    Python has that filter since 3.11.4. With an older one, such as that of Debian 12, files, folders and links are made
    here. Raises TarError for a member that would lie outside or lead there, and for one that is none of these.
    """
    if hasattr(tarfile, "data_filter"):
        tar.extract(member, folder, set_attrs=set_attrs, filter="data")
        return

    def inside(place: Path, does: str) -> Path:
        found = Path(os.path.realpath(place))
        if not found.is_relative_to(os.path.realpath(folder)):
            raise tarfile.ExtractError(f"{member.name!r} {does} {str(found)!r}, outside of its folder")
        return found

    named = folder / member.name.lstrip("/")
    path = inside(named.parent, "would be extracted to") / named.name
    inside(path, "would be extracted to")
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    if not (member.isreg() or member.issym() or member.islnk()):
        raise tarfile.ExtractError(f"{member.name!r} is a special file")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # so that nothing is written through another name
    if member.issym():
        inside(path.parent / member.linkname, "would link to")
        path.symlink_to(member.linkname)
        return
    if member.islnk():
        path.hardlink_to(inside(folder / member.linkname, "would link to"))
        return
    content = tar.extractfile(member)
    assert content is not None, "a regular file has content"
    with content, path.open("wb") as file:
        shutil.copyfileobj(content, file)
    if set_attrs:
        path.chmod(0o755 if member.mode & 0o100 else 0o644)
        os.utime(path, (member.mtime, member.mtime))


def members_of(plain: Source) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The members of a tar archive in their order, each with the archive, of which it is to be extracted at once.

    Raises UsageError for a sparse file, headers or nesting without end and too many members; those of DAMAGED.
    """

    class Header(tarfile.TarInfo):
        """Refuses what cannot be bounded before the library has read it whole."""

        following = 0  # headers since the last member

        def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
            Header.following += 1
            if Header.following > _MAX_HEADERS:
                raise UsageError(f"more than {_MAX_HEADERS} headers describe one file")
            if self.type in _DESCRIBING and self.size > _MAX_READ:  # Python 3.14 reads it in pieces
                raise UsageError(_TOO_LARGE)
            try:
                return super()._proc_member(tar)  # type: ignore[misc]
            except tarfile.HeaderError as error:  # which the library takes as the end of the archive
                raise tarfile.ReadError(str(error)) from None

        def _refuse_sparse(self, *_: object) -> tarfile.TarInfo:
            raise UsageError("it holds a sparse file")

        # By the library's names, as above: the old GNU format, and three forms inside extended headers.
        _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse

    with tarfile.open(fileobj=_Bounded(plain), mode="r:", tarinfo=Header) as tar:
        count = 0
        while (member := tar.next()) is not None:
            Header.following, count = 0, count + 1
            if member.size < 0:  # which newer libraries refuse
                raise UsageError("it holds a file with a size below zero")
            if count > MAX_MEMBERS:
                raise UsageError(f"it holds more than {MAX_MEMBERS:,} files")
            if member.name.count("/") > MAX_LEVELS or member.linkname.count("/") > MAX_LEVELS:
                raise UsageError(f"it holds folders in more than {MAX_LEVELS} levels")
            tar.members.clear()  # type: ignore[attr-defined]  # the library would keep every header
            yield tar, member


def _plain(file: IO[bytes]) -> Source:
    """What a compressed file holds, or the file itself."""
    head = file.read(6)
    file.seek(0)
    for magic, opened in _COMPRESSED:
        if head.startswith(magic):
            return opened(file)
    return file


class _Bounded(io.RawIOBase):
    """Refuses to read much at once, and to read on at the end: the library may try for ever."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._at_end = 0

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_READ:
            raise UsageError(_TOO_LARGE)
        content = self._source.read(size)
        self._at_end = 0 if content or not size else self._at_end + 1
        if self._at_end > 2:
            raise EOFError("it is cut off")
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()
