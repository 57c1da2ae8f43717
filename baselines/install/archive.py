"""Tar archives that a user names: bundles and other builds of packages."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from pathlib import Path

from cluster.files.errors import UsageError, shown_value


def unpack_tar(archive: Path, folder: Path, expected: str) -> None:
    """Unpack a tar archive, compressed or not, into `folder`; no file of it comes to lie outside.

    Raises UsageError, which says what to give (`expected`), for one that cannot be read, is damaged or cut off.
    """
    try:
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
    except tarfile.ReadError:  # whose text has a line for each way of packing that was tried
        raise UsageError(f"{archive} cannot be unpacked: it is no whole tar archive; {expected}") from None
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{archive} cannot be unpacked: {shown_value(reason)}; {expected}") from None
