"""git's own hashes of files and folders, computed here: they show that a folder holds a pinned commit's files.

A `Listing` is what `git ls-tree -r` prints. It leads from the pinned hash of a folder to the hash of each file, also of
files that were never fetched, so a folder with parts left out is compared as strictly as a whole one.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LINK, COMMIT = "120000", "160000"  # git's modes of a symbolic link and of a submodule


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeEntry:
    """A file, symbolic link or submodule of a listing."""

    mode: str
    hash: str  # of its content; of a submodule, its commit
    path: str  # below the listed folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """Everything below one folder of a commit, and the commit itself where the folder is all of it."""

    entries: list[TreeEntry] = field(default_factory=list)
    commit: str = ""  # the commit object's text

    @property
    def tree(self) -> str:
        """git's hash of the folder."""
        return _tree_hash([(entry.path.split("/"), entry.mode, entry.hash) for entry in self.entries])

    def is_commit(self, name: str) -> bool:
        """Whether this is all of the commit `name`."""
        data = self.commit.encode("utf-8", "surrogateescape")
        return object_hash("commit", data) == name and self.commit.startswith(f"tree {self.tree}\n")


def parse_listing(output: bytes, commit: str = "") -> Listing:
    """From the output of `git ls-tree -r -z`."""
    entries = []
    for line in output.split(b"\0"):
        if line:
            facts, _, path = line.partition(b"\t")
            mode, _, name = facts.decode("ascii").split(" ")
            entries.append(TreeEntry(mode=mode, hash=name, path=os.fsdecode(path)))
    return Listing(entries=entries, commit=commit)


def object_hash(kind: str, content: bytes) -> str:
    """git's name of an object; SHA-1 is git's choice."""
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether `path` is one of `folders` or inside one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def differences(folder: Path, listing: Listing, without: Sequence[str] = ()) -> list[str]:
    """Files below `folder` that are missing, differ, or are not in the listing; Python's caches do not count.

    Nothing below a path in `without` or at a submodule is looked at.
    """
    skipped = [*without, *(entry.path for entry in listing.entries if entry.mode == COMMIT)]
    expected = {entry.path: entry for entry in listing.entries if not is_below(entry.path, skipped)}
    found = []
    for path, entry in expected.items():
        if (problem := _difference(folder / path, entry)) is not None:
            found.append(f"{path} {problem}")
    for here, folders, files in os.walk(folder):
        below = os.path.relpath(here, folder)
        folders[:] = [name for name in folders if name != "__pycache__"]
        links = [name for name in folders if os.path.islink(os.path.join(here, name))]
        for name in [*files, *links]:
            path = name if below == "." else f"{below}/{name}"
            if path not in expected and not is_below(path, skipped):
                found.append(f"{path} is not part of the commit")
    return sorted(found)


def _difference(path: Path, entry: TreeEntry) -> str | None:
    try:
        mode = path.lstat().st_mode
        if entry.mode == LINK:
            content = os.fsencode(os.readlink(path)) if stat.S_ISLNK(mode) else b""
        else:
            content = path.read_bytes() if stat.S_ISREG(mode) else b""
    except OSError:
        return "is missing"
    if stat.S_ISLNK(mode) != (entry.mode == LINK) or object_hash("blob", content) != entry.hash:
        return "differs"
    return None


def _tree_hash(files: list[tuple[list[str], str, str]]) -> str:
    """git's hash of a folder, from (path, mode, hash) of all that is below it."""
    here: list[tuple[bytes, str, str]] = []
    folders: dict[str, list[tuple[list[str], str, str]]] = {}
    for path, mode, name in files:
        if len(path) == 1:
            here.append((os.fsencode(path[0]), mode, name))
        else:
            folders.setdefault(path[0], []).append((path[1:], mode, name))
    here += [(os.fsencode(name), "40000", _tree_hash(below)) for name, below in folders.items()]
    here.sort(key=lambda each: each[0] + (b"/" if each[1] == "40000" else b""))  # git's order
    return object_hash(
        "tree", b"".join(mode.encode() + b" " + name + b"\0" + bytes.fromhex(one) for name, mode, one in here)
    )
