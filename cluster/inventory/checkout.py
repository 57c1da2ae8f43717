"""The software of a run: versions of interpreter and packages, and a digest of the project's files.

`burst cluster check`, `burst cluster up` and the supervisors of a run compare them with this machine's, which drives
the run. The file is also a program: a node's interpreter gets it as text, so it imports only the standard library.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

ROOT = Path(globals().get("__file__", "/a/b/c")).resolve().parents[2]  # of this program, which is not there on a node
CODE = ("harness", "engine", "baselines", "cluster", "experiments")  # folders that a trial may read
LIBRARIES = ("ray", "torch")
ANSWER = "versions "  # begins the program's line of JSON
_SUFFIXES = (".py", ".yaml", ".j2")
_DIGITS = 12


def code_digest(root: Path) -> str:
    """Digest of names and contents of all code and data that a trial may read; equal for equal trees at any path.

    Nodes with another commit, or with edits, differ, also where the checkout has no history.
    """
    digest = hashlib.sha256()
    for package in CODE:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in _SUFFIXES and "upstream" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{path.relative_to(root)} {content}\n".encode())
    return digest.hexdigest()[:_DIGITS]


def versions(folder: Path) -> dict[str, str | None]:
    """Of this interpreter and the checkout in `folder`, by name; None for what is absent. Imports no library."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["code"] = code_digest(folder) if (folder / "harness" / "__main__.py").is_file() else None
    return found


@functools.cache
def own_versions() -> Mapping[str, str | None]:
    """Those of this program, as it was when it first asked."""
    return versions(ROOT)


def difference(own: Mapping[str, str | None], found: Mapping[str, str | None]) -> str:
    """How a node's versions differ from this machine's; empty when they are equal.

    What this machine lacks is not compared. A build (`2.13.0+cpu`) counts as its version. Ray itself refuses another
    patch version of Python late.
    """
    parts = [
        f"{what} is {found[what] or 'absent'} there but {version} on this machine"
        for what, version in own.items()
        if version and what in found and _public(found[what]) != _public(version)
    ]
    return ", ".join(parts)


def mismatch(versions: Mapping[str, Mapping[str, str]]) -> str:
    """One sentence naming the versions that differ and their nodes, empty when all agree.

    `versions` is by node and then by name. The value most nodes have is taken for the right one; on a tie the first
    node's.
    """
    parts = []
    for what in dict.fromkeys(what for found in versions.values() for what in found):
        by_node = {node: found.get(what, "not known") for node, found in versions.items()}
        [(usual, count)] = Counter(by_node.values()).most_common(1)
        if count < len(by_node):
            others = ", ".join(f"{value} on {node}" for node, value in by_node.items() if value != usual)
            parts.append(f"{what} is {usual} on {count} of {len(by_node)} nodes but {others}")
    return "; ".join(parts) + "; install the same everywhere, or leave those nodes out" if parts else ""


def _public(version: str | None) -> str:
    return (version or "").partition("+")[0]


if __name__ == "__main__":
    print(ANSWER + json.dumps(versions(Path(sys.argv[1]))))
