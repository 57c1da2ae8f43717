"""The trials that options of `burst plan` describe, without an experiment file."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.base.errors import UsageError

if TYPE_CHECKING:
    from cluster.files.reader import Node
    from harness.metrics.hardware import Hardware
    from harness.spec.experiment import Experiment

_MOST = 1000  # combinations that are printed

# Options that describe trials without a file, and their defaults.
_DEFAULTS = {"model": "7b", "method": "burst", "seq_len": "1M", "cp_size": "8"}
_OPTION = {"model": "--model", "method": "--method", "seq_len": "--seq-len", "cp_size": "--gpus", "task": "--task"}


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """How `burst plan` without a file takes models, methods, lengths and numbers of GPUs."""
    parser.add_argument("--model", metavar="LIST", help="models (default: 7b)")
    parser.add_argument("--method", metavar="LIST", help="methods (default: burst)")
    parser.add_argument("--seq-len", metavar="LIST", help="tokens of a sequence (default: 1M)")
    sizes = parser.add_mutually_exclusive_group()  # one option with two names
    sizes.add_argument(
        "--gpus", dest="cp_size", metavar="LIST", help="context-parallel sizes, one GPU each (default: 8)"
    )
    sizes.add_argument("--cp-size", dest="cp_size", metavar="LIST", help="the same as --gpus")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="ranks of a node (default: the hardware file's)")
    parser.add_argument("--task", choices=("train", "attention"), help="(default: train)")


def asks_question(arguments: argparse.Namespace) -> bool:
    """Whether one of these options is given."""
    return any(getattr(arguments, name) is not None for name in (*_DEFAULTS, "task"))


def hardware_asked(arguments: argparse.Namespace) -> Hardware:
    """The hardware file, with nodes as the command line says."""
    from harness.metrics.hardware import hardware_named

    hardware, asked = hardware_named(arguments.hardware), arguments.gpus_per_node
    if asked is not None and asked < 1:
        raise UsageError(f"--gpus-per-node is {asked}; give a number of at least 1")
    return hardware if asked is None else replace(hardware, gpus_per_node=asked)


def question(arguments: argparse.Namespace) -> Experiment:
    """The experiment that the options describe: the product of the lists, and what --set says. Raises UsageError."""
    from cluster.files.reader import Node
    from harness.spec.experiment import experiment_without_file

    for override in arguments.overrides:
        name = override.partition("=")[0].strip().removeprefix("fixed.").removeprefix("sweep.")
        if name in _OPTION and (given := getattr(arguments, name)) is not None:
            raise UsageError(f"{_OPTION[name]} {given} and --set {override} both give {name}; leave one of them out")
    sweep: dict[str, Node] = {}
    for name, default in _DEFAULTS.items():
        option = _OPTION[name]
        given = getattr(arguments, name)
        parts = [part.strip() for part in (default if given is None else given).split(",") if part.strip()]
        if not parts:
            raise UsageError(f"{option} names nothing; give at least one")
        sweep[name] = Node([_value(part, f"{option} {part}") for part in parts], option)
    if math.prod(len(one.items()) for one in sweep.values()) > _MOST:
        raise UsageError(f"these lists have more than {_MOST} combinations; name fewer")
    asked = {"task": Node(arguments.task or "train", "--task"), "sweep": Node(sweep, "the options")}
    return experiment_without_file(asked, arguments.overrides)


def _value(text: str, place: str) -> Node:
    from cluster.files.reader import parse_yaml

    return parse_yaml(text, place, lambda _line: place)
