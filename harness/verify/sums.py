"""SHA256SUMS of an archive's folder, in the form that `sha256sum -c` reads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from engine.reader import read_regular
from harness.verify.finding import Failure

SUMS_FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


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
