"""The commands of `burst`: one module each, named as the command; here their common parts.

A module defines one `COMMAND`, and `VERBS` where a second word names what is done, as in `burst cluster up`. A command
reads arguments, calls other packages and prints. It computes nothing itself, and its module imports nothing heavy at
the top, so that `burst --help` and `burst plan` answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn, Protocol

from cluster.node_arguments import add_host_key_arguments
from harness.base.errors import UsageError, nearest
from harness.launch.launcher import LAUNCHERS, Launcher

if TYPE_CHECKING:
    from harness.machine.this_machine import Machine


# Commands of version 0.1 that are part of another one now: the words that stand for them until version 0.3.
RENAMED = {
    "archive": "verify pack",
    "baselines": "setup baselines",
    "calibrate": "setup calibrate",
    "check": "cluster check",
    "data": "train data",
    "env": "cluster env",
    "export": "train export",
    "image": "setup image",
    "logs": "status --logs",
    "nodes": "cluster nodes",
    "predict": "plan --phases",
}


# What `burst` alone prints: commands that follow each other in somebody's work, and what they are for.
GROUPS = (
    (("doctor", "plan"), "what this machine can run; whether a step fits, and how long it takes"),
    (("run", "status"), "measure the trials of an experiment file, and look at a run"),
    (("report", "compare", "verify"), "tables and figures of records; two runs side by side; is it all true?"),
    (("train",), "train a model on your text"),
    (("reproduce", "conform"), "the paper's figures and claims; is a context parallelism right?"),
    (("setup", "cluster"), "other systems, speeds and images of this machine; several machines"),
)


class Command(Protocol):
    """One command, or one verb of a command."""

    help: str  # one line, as `burst --help` prints it

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command; returns the exit code. Raises UsageError for an error of the user."""
        ...


class OtherProgram:
    """Base of a command that another program does: all arguments after its name stay unparsed, as `arguments.rest`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """That program has a parser of its own."""


class Verbs:
    """A command that does nothing by itself: a verb says what."""

    def __init__(self, help: str, verbs: Mapping[str, Command]) -> None:
        self.help = help
        self._verbs = verbs

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("verb", nargs="?", metavar="VERB", help="|".join(self._verbs))
        parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def run(self, arguments: argparse.Namespace) -> int:
        found = "names no verb" if arguments.verb is None else f"has no verb {arguments.verb}"
        raise UsageError(f"burst {arguments.typed[0]} {found}; {nearest(arguments.verb or '', self._verbs)}")


def command_names() -> list[str]:
    """Names of all commands, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def command_named(name: str) -> Command:
    """The command of that name, whose module alone is imported."""
    command: Command = _module(name).COMMAND
    return command


def all_commands() -> dict[str, Command]:
    """Commands by name, in alphabetical order."""
    return {name: command_named(name) for name in command_names()}


def verbs_of(name: str) -> dict[str, Command]:
    """The verbs of a command by name; none for most."""
    return dict(getattr(_module(name), "VERBS", {}))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def command_line(arguments: argparse.Namespace) -> Sequence[str]:
    """The command line as typed, for messages that give the next command."""
    return ["burst", *arguments.typed]


def parse_tolerance(text: str) -> float:
    """`2%` or `0.02` as 0.02. Raises UsageError for what is no share from 0 to below 1."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise UsageError(f"--tolerance {text}: expected a share from 0 to below 1, such as 2% or 0.02")
    return value


def add_launch_arguments(parser: argparse.ArgumentParser, *, what: str) -> None:
    """Options for the launcher and the hosts of ranks. `what`: the command's verb in the help, such as `run`."""
    parser.add_argument(
        "--launcher", choices=LAUNCHERS, help="local: this machine (default); ray: several, as --ray auto"
    )
    add_cluster_arguments(
        parser,
        nodes_help=f"inventory or list of hosts: {what} on those of them that burst cluster up has started, "
        "or, where no cluster is up, on one started for this run",
    )


def check_launch_arguments(arguments: argparse.Namespace) -> None:
    """Raises UsageError where the launcher cannot start ranks on the named hosts."""
    if (arguments.nodes or arguments.ray) and arguments.launcher == "local":
        raise UsageError("--launcher local starts ranks on this machine alone; leave it out with --nodes and --ray")
    if arguments.nodes and arguments.ray:
        raise UsageError("--nodes and --ray both name the hosts; give one of them")


def machine_and_launcher(arguments: argparse.Namespace, say: Callable[[str], None]) -> tuple[Machine, Launcher]:
    """This machine, or the hosts that `--ray` or `--nodes` names, with their launcher. Raises UsageError."""
    if arguments.nodes or arguments.ray or arguments.launcher == "ray":
        from harness.launch.ray.inventory import ray_launcher

        return ray_launcher(arguments, say)
    from harness.launch.supervisor import LocalLauncher
    from harness.machine.this_machine import discover

    return discover(), LocalLauncher()


def leave_at_once(code: int) -> NoReturn:
    """Exit without Python's exit handlers, in which a Ray without its head would wait for minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def add_cluster_arguments(parser: argparse.ArgumentParser, *, nodes_help: str) -> None:
    parser.add_argument(
        "--ray", metavar="ADDRESS|auto",
        help="the hosts of this Ray cluster: HOST:PORT of its head, or auto for the one on this machine",
    )  # fmt: skip
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
