"""The trials that options of `burst plan` describe, without an experiment file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base.errors import UsageError, nearest

if TYPE_CHECKING:
    from harness.metrics.hardware import Hardware
    from harness.spec.experiment import Experiment

_MOST = 1000  # combinations that are printed

# Options that describe trials without a file, and their defaults.
_DEFAULTS = {"model": "7b", "method": "burst", "seq_len": "1M", "cp_size": "8"}
_OPTION = {"model": "--model", "method": "--method", "seq_len": "--seq-len", "cp_size": "--cp-size"}


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """How `burst plan` without a file takes models, methods, lengths and numbers of GPUs."""
    parser.add_argument("--model", metavar="LIST", help="models (default: 7b)")
    parser.add_argument("--method", metavar="LIST", help="methods (default: burst)")
    parser.add_argument("--seq-len", metavar="LIST", help="tokens of a sequence (default: 1M)")
    parser.add_argument(
        "--gpus", "--cp-size", dest="cp_size", metavar="LIST", help="context-parallel sizes, one GPU each (default: 8)"
    )
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
    """The experiment that the options describe: the product of the lists. Raises UsageError for what no trial may
    have."""
    from engine.settings import Steps
    from harness.base.lengths import parse_length
    from harness.spec.experiment import Experiment, Limits, Search
    from harness.spec.methods import method_named
    from harness.spec.models import named_model

    reads: dict[str, Callable[[str], Any]] = {
        "model": named_model, "method": lambda text: method_named(text).name, "seq_len": parse_length,
        "cp_size": lambda text: _count("--cp-size", text),
    }  # fmt: skip
    sweep: dict[str, tuple[Any, ...]] = {}
    for name, default in _DEFAULTS.items():
        parts = [part.strip() for part in (getattr(arguments, name) or default).split(",") if part.strip()]
        if not parts:
            raise UsageError(f"{_OPTION[name]} names nothing; give at least one")
        try:
            sweep[name] = tuple(map(reads[name], parts))
        except ValueError as error:
            raise UsageError(str(error)) from error
    if math.prod(map(len, sweep.values())) > _MOST:
        raise UsageError(f"these lists have more than {_MOST} combinations; name fewer")
    fixed = dict(_change(text) for text in arguments.overrides)
    steps = {key.partition(".")[2]: fixed.pop(key) for key in tuple(fixed) if key.startswith("steps.")}
    try:
        return Experiment(
            name="question", title="", path=Path("--set"), scale=None,
            tasks=(fixed.pop("task", arguments.task or "train"),),
            sweep={key: values for key, values in sweep.items() if key not in fixed}, exclude=(),
            seeds=(fixed.pop("seed", 0),), fixed=fixed, steps=Steps(**steps), limits=Limits(),
            search=Search(), reference={},
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from error


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{option} is {text}; give whole numbers of at least 1")
    return int(text)


def _change(text: str) -> tuple[str, Any]:
    """One NAME=VALUE as a setting and its value, read as in an experiment file. Raises UsageError."""
    from cluster.files.reader import parse_yaml
    from harness.spec.experiment import AUTO_KEY
    from harness.spec.setting import SETTINGS, read_setting

    name, equals, value = text.partition("=")
    place = f"--set {text}"
    if not equals or not name:
        raise UsageError(f"{place}: expected NAME=VALUE, such as checkpoint.tail=0.5")
    if (name, value) == ("checkpoint", "auto"):
        name = AUTO_KEY
    if name not in SETTINGS:
        owner, _, field = name.rpartition(".")
        beside = [known.removeprefix(f"{owner}.") for known in SETTINGS if known.rpartition(".")[0] == owner]
        hint = nearest(field, beside) if beside else nearest(name, SETTINGS)
        raise UsageError(f"{place}: unknown setting; {hint}")
    return name, read_setting(parse_yaml(value, place, lambda _line: place), name, Path())
