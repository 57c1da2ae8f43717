"""Pins of the compared systems: `baselines/<system>/pin.yaml`, read strictly.

This repository holds no code of the systems. A pin names a system's repository, its commit and its requirements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.files import strict_yaml
from cluster.files.errors import UsageError, nearest

FlavourName = Literal["paper", "current"]
FLAVOURS: tuple[FlavourName, ...] = ("paper", "current")

_FOLDER = Path(__file__).parent
_OBJECT = re.compile(r"[0-9a-f]{40}")
_VERSION = re.compile(r"\d+\.\d+")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkout:
    """A folder of a git repository. git's hash of the folder shows whether the fetched files are the pinned ones."""

    repository: str  # https://..., anonymous
    commit: str
    subtree: str  # the folder, relative to the repository
    tree: str  # `git rev-parse COMMIT:SUBTREE`

    def __post_init__(self) -> None:
        if not self.repository.startswith(("https://", "file:///")):
            raise ValueError(f"repository is {self.repository!r}; expected an https address")
        for name, value in (("commit", self.commit), ("tree", self.tree)):
            if not _OBJECT.fullmatch(value):
                raise ValueError(f"{name} is {value!r}; expected all 40 hexadecimal digits, since names can move")
        if not self.subtree or self.subtree.startswith(("/", "-")) or ".." in self.subtree.split("/"):
            raise ValueError(f"subtree is {self.subtree!r}; expected a folder below the repository")


@dataclass(frozen=True, kw_only=True, slots=True)
class Flavour:
    """One copy of a system: source, packages, or both; and the versions it runs with."""

    python: str
    torch: str
    cuda: str
    checkout: Checkout | None = None
    packages: tuple[str, ...] = ()  # name==version each

    def __post_init__(self) -> None:
        for name, value in (("python", self.python), ("torch", self.torch), ("cuda", self.cuda)):
            if not _VERSION.fullmatch(value):
                raise ValueError(f"{name} is {value!r}; expected a version such as '3.12', in quotes")
        for package in self.packages:
            if not _PACKAGE.fullmatch(package):
                raise ValueError(f"packages has {package!r}; expected name==version")
        if self.checkout is None and not self.packages:
            raise ValueError("the flavour has neither checkout nor packages; give one of them")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """One compared system: `paper` is what published numbers came from, `current` a release."""

    system: str  # its own name
    licence: str
    paper: Flavour | None = None
    current: Flavour | None = None

    def flavour(self, name: FlavourName) -> Flavour:
        """Raises UsageError when the system has no such copy."""
        found = self.paper if name == "paper" else self.current
        if found is None:
            other = "current" if name == "paper" else "paper"
            raise UsageError(f"{self.system} is not pinned as {name}; take --flavour {other}")
        return found


def pinned_systems(folder: Path = _FOLDER) -> list[str]:
    """The systems there is a pin for, by the names of their folders."""
    return sorted(path.parent.name for path in folder.glob("*/pin.yaml"))


def load_pin(system: str, folder: Path = _FOLDER) -> Pin:
    """Raises UsageError for a system without a pin, and with file and line for a pin that is not valid."""
    systems = pinned_systems(folder)
    if system not in systems:
        raise UsageError(f"there is no pin for {system}; {nearest(system, systems)}")
    return strict_yaml.load(Pin, folder / system / "pin.yaml", "pin")
