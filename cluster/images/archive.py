"""An image saved to a compressed file on this machine, once for all nodes, with its checksum."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.files.filesystem import cache_folder
from cluster.images.engine import Image, ImageFailed, last_line, save_command

_CHUNK_BYTES = 2**20

# Program, arguments, ending. Both are read by `image load` of either engine, so a node needs neither.
_COMPRESSORS = (("zstd", ["-q", "-3", "-T0", "-c"], ".tar.zst"), ("gzip", ["-1", "-c"], ".tar.gz"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """A saved image."""

    image: Image
    path: Path
    sha256: str  # of the file, in hexadecimal
    size_bytes: int

    @property
    def file_name(self) -> str:
        """Its name on nodes, by its content."""
        return f"{self.sha256}{''.join(self.path.suffixes[-2:])}"


def default_folder() -> Path:
    """The folder for archives until every node has its image."""
    return cache_folder("images")


def save(image: Image, folder: Path, on_bytes: Callable[[int], None]) -> Archive:
    """Save the image below `folder`, or take the archive that an earlier call left there.

    Written aside and renamed, so that a file of that name is whole. `on_bytes` gets the bytes written or read so far.
    Raises ImageFailed when the disk has no room, a program is missing or the engine fails; nothing is left then.
    """
    program, options, ending = _compressor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ImageFailed(
            f"{folder} cannot be made ({error.strerror}); give --archives a folder for saved images"
        ) from error
    # The archive holds the image's name beside its content, in its engine's way: all three are in the key.
    key = hashlib.sha256(f"{image.engine}\n{image.name}\n{image.image_id}".encode()).hexdigest()[:32]
    path = folder / f"{key}{ending}"
    if not path.exists():
        free = shutil.disk_usage(folder).free
        if free < image.size_bytes:
            raise ImageFailed(
                f"{folder} has {_gib(free)} free, and {image.name} may take {_gib(image.size_bytes)}; make room there, "
                "or give --archives a folder on another disk"
            )
        _write(image, [program, *options], path, on_bytes)
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            on_bytes(size)
    return Archive(image=image, path=path, sha256=digest.hexdigest(), size_bytes=size)


def _compressor() -> tuple[str, list[str], str]:
    for program, options, ending in _COMPRESSORS:
        if found := shutil.which(program):
            return found, options, ending
    raise ImageFailed("neither zstd nor gzip is installed here; install one of them")


def _write(image: Image, compressor: list[str], path: Path, on_bytes: Callable[[int], None]) -> None:
    """`image save | compressor > path`, with the exit status of both checked."""
    descriptor, aside_name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
    aside = Path(aside_name)
    try:
        with os.fdopen(descriptor, "wb") as target, tempfile.TemporaryFile("w+") as said:
            saving = subprocess.Popen(save_command(image.engine, image.name), stdout=subprocess.PIPE, stderr=said)
            compressing = subprocess.Popen(compressor, stdin=saving.stdout, stdout=subprocess.PIPE, stderr=said)
            assert saving.stdout is not None
            assert compressing.stdout is not None
            saving.stdout.close()  # the compressor has it; the engine must notice when that one ends
            try:
                written = 0
                while chunk := compressing.stdout.read(_CHUNK_BYTES):
                    target.write(chunk)
                    written += len(chunk)
                    on_bytes(written)
            finally:
                compressing.stdout.close()  # ends both programs when the loop ended early
                statuses = (saving.wait(), compressing.wait())
            said.seek(0)
            if any(statuses):
                raise ImageFailed(f"{image.name} was not saved ({last_line(said.read())}); look at {image.engine} here")
            target.flush()
            os.fsync(target.fileno())
        aside.rename(path)
    except OSError as error:
        raise ImageFailed(f"{path} cannot be written ({error.strerror}); check its folder and disk") from error
    finally:
        aside.unlink(missing_ok=True)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
