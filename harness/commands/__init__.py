"""The commands of `burst`: one module each, named as the command, which defines one `COMMAND`; here their common parts.

A command reads arguments, calls other rooms and prints. It computes nothing itself, and its module imports nothing
heavy at the top, so that `burst --help` and `burst plan` answer at once.
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
    forwards: bool  # all arguments after the command's name stay unparsed, as `arguments.rest`

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command; returns the exit code. Raises UsageError for an error of the user."""
        ...


def all_commands() -> dict[str, Command]:
    """Commands by name, in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").COMMAND for name in names}


def command_line(arguments: argparse.Namespace) -> Sequence[str]:
    """The command line as typed, for messages that give the next command."""
    return ["burst", *arguments.typed]


def add_cluster_arguments(parser: argparse.ArgumentParser, *, nodes_help: str) -> None:
    parser.add_argument("--nodes", type=Path, metavar="FILE", help=nodes_help)
    add_state_argument(parser)
    add_host_key_arguments(parser)


def add_state_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state", type=Path, metavar="DIR",
        help="directory that records the cluster that is up (default: ~/.local/state/burst/cluster)",
    )  # fmt: skip


def state_directory(arguments: argparse.Namespace) -> Path:
    """The folder that `--state` names."""
    from cluster.ray_cluster.state import default_directory

    return arguments.state or default_directory()
