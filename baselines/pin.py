"""Pins of the compared systems: `baselines/<system>/pin.yaml`, read strictly.

This repository holds no code of the systems. A pin names a system's repository, commit and packages, each with a hash,
and the Python, torch and CUDA that they need.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cluster.files import reader
from cluster.files.errors import UsageError, nearest
from engine.reader import to_json

FlavourName = Literal["paper", "current"]
FLAVOURS: tuple[FlavourName, ...] = ("paper", "current")
Device = Literal["cpu", "cuda"]

FOLDER = Path(__file__).parent
_OBJECT = re.compile(r"[0-9a-f]{40}")
_VERSIONS = re.compile(r"\d+\.\d+(-\d+\.\d+)?")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submodule:
    """A repository that stands at a folder of another one; the other one's commit names its commit too."""

    path: str  # of the folder, relative to the checked-out one
    repository: str
    commit: str

    def __post_init__(self) -> None:
        _check_source(self.repository, commit=self.commit)
        _check_path("path", self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkout:
    """A folder of a git repository. git's hash of the folder shows whether the fetched files are the pinned ones."""

    repository: str  # https://..., anonymous
    commit: str
    tree: str  # `git rev-parse COMMIT:SUBTREE`
    subtree: str = "."  # the folder, relative to the repository; . is all of it
    submodules: tuple[Submodule, ...] = ()  # those that are needed; the others stay empty folders
    without: tuple[str, ...] = ()  # files and folders below the subtree that are not fetched

    def __post_init__(self) -> None:
        _check_source(self.repository, commit=self.commit, tree=self.tree)
        if self.subtree != ".":
            _check_path("subtree", self.subtree)
        for path in self.without:
            _check_path("without", path)

    @property
    def object(self) -> str:
        """The folder as git names it."""
        return self.commit + ":" + ("" if self.subtree == "." else self.subtree)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flavour:
    """One copy of a system: source, packages, or both; and what they need around them."""

    python: str  # minor version, or the first and last of several: "3.10", "3.11-3.13"
    torch: str
    cuda: str  # of torch on a machine with GPUs
    devices: tuple[Device, ...] = ("cuda",)  # what it runs on
    checkout: Checkout | None = None
    packages: Mapping[str, str] = field(default_factory=dict)  # name==version -> SHA-256 of each file that may be taken
    build: Mapping[str, str] = field(default_factory=dict)  # the same, installed first: what others are built with
    folders: tuple[str, ...] = ()  # folders of the checkout that pip builds, from copies, and installs
    provided: tuple[str, ...] = ()  # packages that may come from the interpreter that has torch: those that `packages`
    # pins too only where a user asks for it
    preload: tuple[
        str, ...
    ] = ()  # libraries of packages beside torch that it has to use, whatever else the machine has
    imports: tuple[str, ...] = ()  # modules that can be imported where it is installed
    prepare: str = ""  # Python that it runs once when installed: compiles what a trial would otherwise wait for
    entry: str = ""  # the program: a file below the checked-out folder, or a module
    environment: Mapping[str, str] = field(default_factory=dict)  # while it is installed, and when it runs
    disk_mib: int = 200  # free space that an installation needs
    note: str = ""  # what a user has to know beside this, one sentence

    def __post_init__(self) -> None:
        for name, value in (("python", self.python), ("torch", self.torch), ("cuda", self.cuda)):
            if not _VERSIONS.fullmatch(value):
                raise ValueError(
                    f"{name} is {value!r}; expected a version such as '3.12', or '3.11-3.13' for several, in quotes"
                )
        for package, hashes in {**self.packages, **self.build}.items():
            if not _PACKAGE.fullmatch(package):
                raise ValueError(f"packages has {package!r}; expected name==version")
            if not hashes.split() or not all(map(_SHA256.fullmatch, hashes.split())):
                raise ValueError(f"the hash of {package} is {hashes[:80]!r}; expected SHA-256, 64 hexadecimal digits")
        for path in self.folders:
            _check_path("folders", path)
        if self.folders and self.checkout is None:
            raise ValueError("folders are those of a checkout, and there is none; give checkout too")
        for name in self.provided:
            if not _NAME.fullmatch(name):
                raise ValueError(f"provided has {name!r}; expected the name of a package without its version")
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"environment has {name!r}; expected a variable such as DS_BUILD_OPS")
        for path in self.preload:
            _check_path("preload", path)
        if self.disk_mib < 1:
            raise ValueError(f"disk_mib is {self.disk_mib}; expected at least 1")
        if self.checkout is None and not self.packages:
            raise ValueError("the flavour has neither checkout nor packages; give one of them")

    @property
    def release(self) -> str:
        """What is pinned, in a few words: its first package, or the commit."""
        if self.packages or self.checkout is None:
            return next(iter(self.packages)).replace("==", " ")
        return f"commit {self.checkout.commit[:7]}"

    @property
    def borrowable(self) -> frozenset[str]:
        """Pinned packages that may also be taken from beside torch."""
        return frozenset(map(canonical, self.provided)) & frozenset(map(name_of, self.packages))

    @property
    def digest(self) -> str:
        """A short hash of everything that is pinned: an installation of another pin has another one."""
        content = to_json(self)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """One compared system: `paper` is what published numbers came from, `current` a release."""

    system: str  # its own name
    licence: str
    home: str  # where its authors publish it
    paper: Flavour | None = None
    current: Flavour | None = None

    def __post_init__(self) -> None:
        if self.paper is None and self.current is None:
            raise ValueError("the pin has neither paper nor current; give one of them")

    @property
    def flavours(self) -> list[FlavourName]:
        """Those that are pinned."""
        return [name for name in FLAVOURS if getattr(self, name) is not None]

    def flavour(self, name: FlavourName) -> Flavour:
        """Raises UsageError when the system has no such copy."""
        found = self.paper if name == "paper" else self.current
        if found is None:
            other = "current" if name == "paper" else "paper"
            raise UsageError(f"{self.system} is not pinned as {name}; take --flavour {other}")
        return found


def pinned_systems(folder: Path = FOLDER) -> list[str]:
    """The systems there is a pin for, by the names of their folders."""
    return sorted(path.parent.name for path in folder.glob("*/pin.yaml"))


def load_pin(system: str, folder: Path = FOLDER) -> Pin:
    """Raises UsageError for a system without a pin, and with file and line for a pin that is not valid."""
    systems = pinned_systems(folder)
    if system not in systems:
        raise UsageError(f"there is no pin for {system}; {nearest(system, systems)}")
    return reader.load(Pin, folder / system / "pin.yaml", "pin")


def requirements(packages: Mapping[str, str]) -> str:
    """The packages as a requirements file of pip, which accepts only files with these hashes."""
    lines = (" ".join([name, *(f"--hash=sha256:{one}" for one in hashes.split())]) for name, hashes in packages.items())
    return "".join(f"{line}\n" for line in lines)


def name_of(package: str) -> str:
    """The canonical name in name==version."""
    return canonical(package.partition("==")[0])


def canonical(name: str) -> str:
    """A package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def without(packages: Mapping[str, str], names: Container[str]) -> dict[str, str]:
    """The packages whose canonical names are not among `names`."""
    return {package: hashes for package, hashes in packages.items() if name_of(package) not in names}


def allows(versions: str, found: str) -> bool:
    """Whether version `found`, such as 3.11.7 or 2.13.0+cpu, is among `versions` as a pin has them."""
    first, _, last = versions.partition("-")
    parts = re.match(r"(\d+)\.(\d+)", found)
    return parts is not None and _minor(first) <= (int(parts[1]), int(parts[2])) <= _minor(last or first)


def specifier(versions: str) -> str:
    """`versions` of a pin as pip writes them: >=2.11,<2.14."""
    first, _, last = versions.partition("-")
    major, minor = _minor(last or first)
    return f">={first},<{major}.{minor + 1}"


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")
    return int(major), int(minor)


def _check_source(repository: str, **objects: str) -> None:
    if not repository.startswith(("https://", "file:///")):
        raise ValueError(f"repository is {repository!r}; expected an https address")
    for name, value in objects.items():
        if not _OBJECT.fullmatch(value):
            raise ValueError(f"{name} is {value!r}; expected all 40 hexadecimal digits, since names can move")


def _check_path(name: str, path: str) -> None:
    outside = not path or path.startswith(("/", "-")) or not {"", ".", ".."}.isdisjoint(path.split("/"))
    if outside or set("*?[]!#\\\n") & set(path):  # which git reads as patterns
        raise ValueError(f"{name} has {path!r}; expected a folder below the repository")
