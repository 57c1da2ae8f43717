"""The commands of `burst`: one module each, named as the command, which defines one `COMMAND`.

Modules import nothing heavy at their top, so that `burst --help` and `burst plan` answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from cluster.node_arguments import add_host_key_arguments


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


def add_cluster_arguments(parser: argparse.ArgumentParser, *, nodes_help: str) -> None:
    parser.add_argument("--nodes", type=Path, metavar="FILE", help=nodes_help)
    add_state_argument(parser)
    add_host_key_arguments(parser)


def add_state_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state", type=Path, metavar="DIR",
        help="where the cluster that is up is remembered (default: ~/.local/state/burst/cluster)",
    )  # fmt: skip


def state_directory(arguments: argparse.Namespace) -> Path:
    """The folder that `--state` names."""
    from cluster.ray_cluster.state import default_directory

    return arguments.state or default_directory()
