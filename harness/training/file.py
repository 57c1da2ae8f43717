"""Configurations of `burst train`: strict YAML in, one frozen `TrainingConfig` out.

`docs/train.md` and `docs/reference.md` list every key.
Settings of the engine are at the top level, under the names that they have in experiments; `engine.settings` defines
their types and ranges.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from cluster.files.reader import Node, build, check_keys, convert, merge, read_yaml
from engine.checkpoint.planning.memory_settings import left_open
from engine.settings import Checkpoint, TrialSettings
from engine.training.config import TrainingConfig
from harness.base.errors import UsageError
from harness.spec.experiment import SECTIONS
from harness.spec.methods import is_native, method_named
from harness.spec.setting import SETTINGS, overriding, read_setting

# Settings without a meaning here: a run has one task, times every step, and is compared with no other method.
_LEFT_OUT = ("task", "steps", "settings", "planned")
_ENGINE = tuple(field.name for field in fields(TrialSettings) if field.name not in _LEFT_OUT)
_OWN = tuple(field.name for field in fields(TrainingConfig) if field.name != "settings")
# Keys that users write for a setting with another name.
_ELSEWHERE = {
    "optimizer.learning_rate": "learning_rate",
    "optimizer.lr": "learning_rate",
    "lr": "learning_rate",
    "lr_schedule.steps": "steps",
    "schedule.warmup": "lr_schedule.warmup",
    "schedule.minimum": "lr_schedule.minimum",
}
_OF_EXPERIMENTS = {*SECTIONS, "scales", "settings"} - {*_ENGINE, *_OWN}
# What to write here in place of such a key, where it is not just left out.
_HERE = dict.fromkeys(("sweep", "fixed"), "write its settings at the top level, with one value each") | {
    "seeds": "write seed, with one number"
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFile:
    """One configuration and where it was read."""

    path: Path
    config: TrainingConfig
    notes: tuple[str, ...] = ()  # what the user may not expect of a run that starts anew


def load_training(path: Path, overrides: Sequence[str] = ()) -> TrainingFile:
    """Read a configuration, with `key.path=value` overrides on top.

    Raises UsageError: one sentence with file and line, what was found, what was expected and what to do.
    """
    node = read_yaml(path, "training configuration")
    for text in overrides:
        node = merge(node, overriding(text, "learning_rate=0.001")[1])
    entries = node.mapping("the training configuration")
    _refuse_experiment(entries)
    _point_elsewhere(entries)
    entries = _with_tracker(entries)
    check_keys(entries, (*_ENGINE, *_OWN), "the training configuration")
    if missing := [key for key in ("model", "seq_len", "steps") if key not in entries]:
        raise UsageError(
            f"{path}: found no {', '.join(missing)}; add at the top level what is missing, as in "
            "`model: tiny`, `seq_len: 512` and `steps: 300`"
        )
    values = {key: _own(key, entries[key]) for key in _OWN if key in entries}
    if "evaluate" in entries:
        _check_evaluate(entries["evaluate"])
    settings: dict[str, Any] = {"method": "burst", "checkpoint": Checkpoint(plan="auto")}
    settings |= {key: _engine(key, entries[key], path) for key in _ENGINE if key in entries}
    try:
        trial = TrialSettings(task="train", **settings)
        trial = left_open(trial, _given(entries))
        _refuse_without_effect(trial)
        notes = (
            _weights_not_read(entries, path.parent),
            _data_not_given(path, entries),
            _memory_not_planned(entries, trial),
        )
        return TrainingFile(
            path=path, config=TrainingConfig(settings=trial, **values), notes=tuple(filter(None, notes))
        )
    except ValueError as error:
        # Such a sentence begins with the setting's dotted name.
        place = Node(entries, str(path)).place_of(str(error).partition(" ")[0].split("."))
        raise UsageError(f"{place}: {error}") from error


def _with_tracker(entries: dict[str, Node]) -> dict[str, Node]:
    """The entries with `metrics.tracker` for the `metrics.tensorboard: true` or `false` of version 0.1."""
    metrics = entries.get("metrics")
    if metrics is None or not isinstance(metrics.value, dict) or "tensorboard" not in metrics.value:
        return entries
    inner = dict(metrics.value)
    old = inner.pop("tensorboard")
    if "tracker" in inner:
        raise UsageError(f"{old.place}: metrics has both tensorboard and tracker; leave tensorboard out")
    named = "tensorboard" if convert(old, bool, "metrics.tensorboard") else "none"
    return {**entries, "metrics": Node({**inner, "tracker": Node(named, old.place)}, metrics.place)}


def _weights_not_read(entries: dict[str, Node], folder: Path) -> str:
    """One sentence where `model` is a folder of weights, of which only the shape is taken; else nothing."""
    model = entries["model"]
    if "init_from" in entries or not isinstance(model.value, str):
        return ""
    weights = folder / model.value
    if not any(weights.glob("*.safetensors")):
        return ""
    return (
        f"{model.place}: of {weights} the shape is used and not the weights: the run starts from random ones; to start "
        f"from those, add init_from: {weights}"
    )


def _data_not_given(path: Path, entries: dict[str, Node]) -> str:
    """One sentence where no `data` is given; else nothing."""
    if "data" in entries:
        return ""
    return (
        f"{path}: no data is given, so the run trains on the bytes of Python's own documentation; set data to a text "
        "file or a token store, or to python_docs"
    )


def _memory_not_planned(entries: dict[str, Node], trial: TrialSettings) -> str:
    """One sentence where `memory` is given and `checkpoint` too; else nothing."""
    if "memory" not in entries or trial.checkpoint.plan == "auto":
        return ""
    node = entries["memory"]
    return (
        f"{node.place}: memory is {node.describe()}, but nothing is planned for it, because checkpoint is set; leave "
        "checkpoint out for a step that fits"
    )


def _own(key: str, node: Node) -> Any:
    """The value of a key that only training runs have."""
    hint = typing.get_type_hints(TrainingConfig)[key]
    if is_dataclass(hint):
        return build(cast(type[Any], hint), node, key)
    if key == "init_from" and not Path(convert(node, str, key)).is_dir():
        raise UsageError(f"{node.place}: init_from is {node.describe()}, which is no directory here; give one with "
                         "config.json and safetensors files")  # fmt: skip
    return convert(node, hint, key)


def _check_evaluate(node: Node) -> None:
    """Raise UsageError where only the number of sequences is given: by default nothing is evaluated. `every: 0` with it
    is taken, since --set turns evaluation off so."""
    given = node.mapping("evaluate")
    if "sequences" in given and "every" not in given:
        place, value = given["sequences"].place, given["sequences"].describe()
        raise UsageError(
            f"{place}: evaluate.sequences is {value}, but without evaluate.every nothing is evaluated; give both, such "
            f"as evaluate: {{every: 50, sequences: {value}}}"
        )


def _engine(key: str, node: Node, path: Path) -> Any:
    """The value of a setting that experiments have as well."""
    _refuse_list(key, node)
    if key == "checkpoint":
        if node.value == "auto":
            return Checkpoint(plan="auto")
        return build(Checkpoint, node, key)
    assert key in SETTINGS or key == "model", key
    if key == "seed" and (value := convert(node, int, key)) < 0:
        raise UsageError(f"{node.place}: seed is {value}; give a number of at least 0")
    value = read_setting(node, key, path.parent)
    if key == "method" and not is_native(method_named(value)):
        raise UsageError(
            f"{node.place}: method {value} is a program of its own, and burst train trains in the engine; choose a "
            "method that runs there, such as burst"
        )
    return value


def _given(entries: dict[str, Node]) -> set[str]:
    """Dotted names of the settings that the file gives, those of `checkpoint` included."""
    checkpoint = entries.get("checkpoint")
    inner = checkpoint.value if checkpoint is not None and isinstance(checkpoint.value, dict) else {}
    return {*entries, *(f"checkpoint.{name}" for name in inner)}


def _refuse_without_effect(settings: TrialSettings) -> None:
    """Raise ValueError for a value that changes nothing in this run. Experiments take such values: a sweep may cross
    settings of which some mean nothing beside others."""
    if {"checkpoint.every", "checkpoint.whole_layers"} & set(settings.planned.split()):
        return  # the planner decides which layers are computed again
    every, layers = settings.checkpoint.every, settings.model.layers
    again = settings.checkpoint.layers_again(layers)
    unused: dict[str, str] = {}  # the reason, by setting
    if not again:
        names = ("checkpoint.tail", "checkpoint.offload", "checkpoint.replay", "head_groups")
        unused |= dict.fromkeys(names, "no layer is computed again")
    if every == 0:
        unused |= {"checkpoint.whole_layers": "no layer is computed again"}
    if every == 1:
        unused |= {"checkpoint.replay": "every layer's input is kept"}
    if again == layers:
        unused |= {"checkpoint.mlp": "every layer is computed again"}
    plain = replace(settings, checkpoint=Checkpoint(), head_groups=1)
    for name, reason in unused.items():
        if (value := attrgetter(name)(settings)) != (default := attrgetter(name)(plain)):
            raise ValueError(
                f"{name} is {value}, which changes nothing because {reason}; set it to {default}, or change "
                "checkpoint.every or checkpoint.whole_layers"
            )


def _refuse_experiment(entries: dict[str, Node]) -> None:
    """Raise UsageError for a key of experiments, whose files `burst run` takes."""
    for key, node in entries.items():
        if key in _OF_EXPERIMENTS:
            raise UsageError(
                f"{node.place}: {key} is a key of experiments, and this was read as a training configuration; give an "
                f"experiment to burst run, or {_HERE.get(key, f'leave {key} out')}"
            )
    steps = entries.get("steps")
    if steps is not None and isinstance(steps.value, dict) and steps.value:
        key, node = next(iter(steps.value.items()))
        raise UsageError(
            f"{node.place}: steps has the key {key}, as in an experiment (burst run), and in training steps is a whole "
            "number; write for example steps: 300"
        )


def _refuse_list(key: str, node: Node) -> None:
    """Raise UsageError for a list of values: a training run sweeps nothing."""
    if not isinstance(node.value, list):
        return
    values = [item for item in node.value if not isinstance(item.value, list | dict | None)]
    example = f", such as {key}: {values[0].describe()}" if values else ""
    raise UsageError(
        f"{node.place}: {key} is a list, and a training run has one value of each setting; write one{example}"
    )


def _point_elsewhere(entries: dict[str, Node], prefix: str = "") -> None:
    for key, node in entries.items():
        if place := _ELSEWHERE.get(prefix + key):
            raise UsageError(f"{node.place}: unknown key {prefix}{key}; write it as {place}")
        if isinstance(node.value, dict) and not prefix:
            _point_elsewhere(node.value, f"{key}.")
