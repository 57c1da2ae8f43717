"""Where an installation lies, in which state it is, and the lock that keeps two programs from making it at once.

`baselines/<system>/upstream/<flavour>/` has `source` (the checkout), `wheels` (pip's files), `env` (the virtual
environment), `borrowed` (links to torch) and, written last, `installed.json`. Without that file an installation is
half-finished; with one of another pin it is outdated.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from baselines.pin import FOLDER, Flavour, FlavourName, Pin, load_pin, pinned_systems
from baselines.stand_ins import FLASH_ATTN, FLASH_ATTN_4, FLASH_ATTN_4_PACKAGES, FLASH_ATTN_PACKAGE, python_path
from cluster.files.errors import UsageError
from cluster.files.filesystem import try_lock
from engine.reader import from_json, read_json

UPSTREAM, STATE_FILE, BORROWED = "upstream", "installed.json", "borrowed"
Condition = Literal["installed", "not installed", "half-finished", "outdated", "broken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Installation:
    """`installed.json`: the pin that was followed, and what was found around it."""

    pin: str  # digest of the flavour
    python: str
    torch: str
    cuda: str  # of torch; "" for a build without
    packages: dict[str, str] = field(default_factory=dict)  # name -> version, of all that pip installed
    borrowed: dict[str, str] = field(
        default_factory=dict
    )  # name -> version, of pinned packages taken from beside torch
    builds: dict[str, str] = field(default_factory=dict)  # name -> what another build of a pinned package is, in words
    finished_at: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallPlace:
    """One flavour of one system, installed or not."""

    system: str  # its folder below baselines/
    flavour: FlavourName
    base: Path = FOLDER  # folder of the systems

    @property
    def folder(self) -> Path:
        return self.base / self.system / UPSTREAM / self.flavour

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.folder / "env" / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Where its own packages lie."""
        return next((self.folder / "env" / "lib").glob("python*/site-packages"))

    @property
    def extensions(self) -> Path:
        """Where torch compiles extensions for it: no other system shares its locks."""
        return self.folder / "extensions"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that it runs with: those of the pin, its folder of extensions, the folders of stand-ins, and
        libraries beside torch that come before the machine's."""
        found = [path for name in self.pinned.preload if (path := self.folder / BORROWED / name).exists()]
        preload = {
            "LD_LIBRARY_PATH": ":".join(dict.fromkeys(str(path.parent) for path in found)),
            "LD_PRELOAD": ":".join(map(str, found)),
        }
        return {
            **self.pinned.environment,
            **({"PYTHONPATH": python_path(self.stand_ins)} if self.stand_ins else {}),
            "TORCH_EXTENSIONS_DIR": str(self.extensions),
            **(preload if found else {}),
        }

    @property
    def stand_ins(self) -> list[str]:
        """Packages that its interpreter was to provide and has not, and that stand-ins of ours replace: flash_attn, on
        CPU ranks, and on GPUs where `has_flash_attention_4`."""
        needed = "cpu" in self.pinned.devices and FLASH_ATTN_PACKAGE in self.pinned.provided
        # FlashAttention-4 alone has a folder of that name too, without modules at its top.
        return [FLASH_ATTN] if needed and not any((self.folder / BORROWED / FLASH_ATTN).glob("*.py")) else []

    @property
    def has_flash_attention_4(self) -> bool:
        """Whether FlashAttention-4 lay beside torch at installation: `kernel: fa4` needs it, and the stand-in computes
        with it on GPUs."""
        return (self.folder / BORROWED / FLASH_ATTN / FLASH_ATTN_4).is_dir()

    @property
    def pin(self) -> Pin:
        return load_pin(self.system, self.base)

    @property
    def pinned(self) -> Flavour:
        return self.pin.flavour(self.flavour)

    @property
    def install_command(self) -> str:
        """The line that a user types."""
        return f"burst setup baselines install {self.system} --flavour {self.flavour}"

    def state(self) -> Installation | None:
        """What `installed.json` says; None where there is none. Raises ValueError for one that cannot be read."""
        try:
            found = from_json(Installation, read_json(self.folder / STATE_FILE))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"{STATE_FILE}: {error.strerror}") from error
        return found

    def condition(self) -> tuple[Condition, str]:
        """Its state, and one sentence; looks at a few files and runs nothing (`verify` compares all of it)."""
        try:
            state = self.state()
        except ValueError as error:
            return "broken", f"{STATE_FILE} cannot be read ({error}); install it anew: {self.install_command} --anew"
        if state is None:
            if self.folder.is_dir() and any(self.folder.iterdir()):
                return "half-finished", f"an installation was cut off; finish it: {self.install_command}"
            return "not installed", f"install it: {self.install_command}"
        if state.pin != self.pinned.digest:
            return "outdated", f"the pin has changed since; install it again: {self.install_command}"
        if not self.python.exists():
            return "broken", f"its interpreter is gone; install it anew: {self.install_command} --anew"
        return "installed", f"Python {state.python}, torch {state.torch}"

    def not_installed_reason(self, system: str) -> str | None:
        """Why the system, by the name that users read, cannot run from here; None where it is installed."""
        condition, sentence = self.condition()
        return None if condition == "installed" else f"{system} is {condition}; {sentence}"


def beside_torch(provided: Iterable[str]) -> list[str]:
    """Packages that an environment takes from beside torch: those of the pin, and what a stand-in computes with."""
    names = list(provided)
    return names + (list(FLASH_ATTN_4_PACKAGES) if FLASH_ATTN_PACKAGE in names else [])


def places(system: str | None = None, base: Path = FOLDER) -> list[InstallPlace]:
    """Every flavour of every pinned system, or of one. Raises UsageError for an unknown one."""
    systems = pinned_systems(base) if system is None else [system]
    return [
        InstallPlace(system=name, flavour=flavour, base=base)
        for name in systems
        for flavour in load_pin(name, base).flavours
    ]


@contextlib.contextmanager
def locked(place: InstallPlace) -> Iterator[None]:
    """Hold a place against other installations; the kernel drops the lock when its holder ends.

    Raises UsageError when another program holds it.
    """
    place.folder.parent.mkdir(parents=True, exist_ok=True)
    path = place.folder.with_suffix(".lock")
    with open(path, "a+", encoding="utf-8") as file:
        if try_lock(file) is False:
            file.seek(0)
            holder = file.read().strip() or "another program"
            raise UsageError(f"{place.system} ({place.flavour}) is being installed by {holder}; wait for it")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
