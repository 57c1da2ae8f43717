"""EXP.yaml, --scale and --set: how every command that takes an experiment is given one."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.spec.experiment import Experiment, load_experiment


def add_experiment_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", type=Path, metavar="EXP.yaml", help="experiment file")
    parser.add_argument("--scale", metavar="NAME", help="the same question at another size, as the file's scales say")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE",
        help="replace one value, such as steps.measured=5; may be repeated",
    )  # fmt: skip


def chosen_experiment(arguments: argparse.Namespace) -> Experiment:
    """The experiment the command line names. Raises UsageError."""
    return load_experiment(arguments.experiment, arguments.scale, arguments.overrides)
