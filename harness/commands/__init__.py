"""The commands of `burst`: one module each, named as the command, which defines one `COMMAND`.

Modules import nothing heavy at their top, so that `burst --help` and `burst plan` answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Sequence
from typing import Protocol


class Command(Protocol):
    """One subcommand."""

    help: str  # one line, as `burst --help` prints it
    forwards: bool  # everything after the command's name is handed on unparsed, as `arguments.rest`

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; returns the exit code. Raises UsageError for what the user got wrong."""
        ...


def all_commands() -> dict[str, Command]:
    """Commands by name, in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").COMMAND for name in names}


def command_line(arguments: argparse.Namespace) -> Sequence[str]:
    """What the user typed, for messages that give the next command."""
    return ["burst", *arguments.typed]
