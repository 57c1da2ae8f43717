"""Experiment files: strict YAML in, one frozen `Experiment` out. `docs/reference.md` lists every key.

A file is a stack of layers - the base, one scale, each `--set` - and a later layer wins. Inside a layer a setting is
either swept or fixed; a later layer may turn one into the other. Which settings exist, their types and ranges come from
`engine.settings`, so a new setting needs no line here.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cluster.files.reader import Node, build, check_keys, convert, merge, read_yaml
from engine.settings import Steps, Task
from harness.base.errors import UsageError, nearest, one_of
from harness.base.lengths import with_lengths
from harness.spec.models import MODELS_DIR, model_name
from harness.spec.references import read_paper_reference
from harness.spec.setting import SETTINGS, overriding, read_setting

_OF_STEPS = (*(field.name for field in dataclasses.fields(Steps)), "rounds")  # keys of section `steps`
# Decided by sections of their own rather than under sweep or fixed; `model` may be swept as well.
SECTION_OF = {"task": "task", "seed": "seeds", "model": "model", "steps": "steps"} | {
    f"steps.{name}": "steps" for name in _OF_STEPS
}
REFERENCES = ("paper",)
AUTO_KEY = "checkpoint.plan"  # what `checkpoint: auto` is short for
MAX_ROUNDS = 1000  # more are a mistake


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a trial may take, in wall time; 0: the default, which `harness.run.attempt` says."""

    trial_seconds: float = 0.0  # from the end of start-up
    start_seconds: float = 0.0  # of start-up: imports, joining the other ranks, building the task
    hang_seconds: float = 0.0  # without progress

    def __post_init__(self) -> None:
        for name in ("trial_seconds", "start_seconds", "hang_seconds"):
            if (seconds := getattr(self, name)) < 0:
                raise ValueError(f"limits.{name} is {seconds:g}; expected seconds, or 0 for its default")


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """How a run adapts its sequence lengths, for each combination of the other settings alone. No part of a trial's
    settings or its id.

    After the first length that ends as `until` says (`oom`: memory of a GPU or of the host ran out; `failure`: also
    failed, timeout or hang), longer ones do not run. Then the longest that trains is found to within `bisect` tokens.
    """

    until: Literal["no", "oom", "failure"] = "no"
    bisect: int = 0  # tokens, of which searched lengths are multiples; 0: no further lengths
    at_most: int = 0  # tokens; lengths are doubled up to it while all train; 0: none beyond those of the sweep

    def __post_init__(self) -> None:
        if self.bisect < 0 or self.at_most < 0:
            raise ValueError("search.bisect and search.at_most are numbers of tokens; expected at least 0")
        if self.until == "no" and (self.bisect or self.at_most):
            raise ValueError("search.bisect and search.at_most need search.until; add until: oom")
        if self.at_most and not self.bisect:
            raise ValueError("search.at_most needs search.bisect; add the precision in tokens, such as bisect: 16k")

    def __str__(self) -> str:
        """In words, for a reader of a plan."""
        ends = "memory runs out" if self.until == "oom" else "a trial fails or memory runs out"
        found = f", then the longest that trains to within {self.bisect} tokens" if self.bisect else ""
        return f"lengths ascend until {ends}{found}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One question, ready to be planned: its scale and the command line are already laid over it.

    Keys of `sweep`, `fixed` and `exclude` are settings by dotted name (`seq_len`, `checkpoint.tail`); values have the
    setting's type, models are shapes. An `exclude` entry drops the trials that match all its keys.
    """

    name: str  # the file's stem, where the file gives no other
    title: str
    path: Path
    options: str = field(default="", compare=False)  # what errors name in place of the path, where there is no file
    scale: str | None
    scales: tuple[str, ...] = field(default=(), compare=False)  # of the file, asked for or not: no part of the question
    tasks: tuple[Task, ...]
    sweep: Mapping[str, tuple[Any, ...]]  # in the order of the file
    exclude: tuple[Mapping[str, tuple[Any, ...]], ...]
    fixed: Mapping[str, Any]
    steps: Steps
    rounds: int = 1  # all trials once, then again; no part of a trial's settings or id, so a resumed run may have more
    seeds: tuple[int, ...]
    limits: Limits
    search: Search
    reference: Mapping[str, str]

    @property
    def source(self) -> str:
        """What errors name: the file, or the options that stand for one."""
        return self.options or str(self.path)


def load_experiment(path: str | Path, scale: str | None = None, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment file at one of its scales, with `key.path=value` overrides on top.

    All scales are checked, asked for or not. Raises UsageError: one sentence with file and line, what was found, what
    was expected and what to do.
    """
    path = Path(path)
    document = read_yaml(path, "experiment file")
    entries = dict(document.mapping("the experiment"))
    scales = entries.pop("scales", Node({}, str(path))).mapping("scales")
    base = _layer(Node(entries, str(path)), "the experiment")
    layers = {name: _stack(base, _layer(node, f"scale {name}")) for name, node in scales.items()}

    if scale is not None and scale not in layers:
        hint = nearest(scale, layers) if layers else "the file has none; leave --scale out"
        raise UsageError(f"{path}: unknown scale {scale}; {hint}")
    for name, layer in [(None, base), *layers.items()]:
        _read(layer, path, name)

    chosen = base if scale is None else layers[scale]
    return dataclasses.replace(_read(_overridden(chosen, overrides), path, scale), scales=tuple(layers))


def experiment_without_file(entries: Mapping[str, Node], overrides: Sequence[str] = ()) -> Experiment:
    """The experiment `question` of these top-level keys, with `key.path=value` overrides on top; models are looked up
    from the working directory. Raises UsageError."""
    base = _layer(Node(dict(entries), "the question"), "the question")
    asked = _read(_overridden(base, overrides), Path("question.yaml"), None)
    return dataclasses.replace(asked, options=" ".join(["the options", *(f"--set {one}" for one in overrides)]))


def add_experiment_arguments(parser: argparse.ArgumentParser, *, may_lack: bool = False) -> None:
    """EXP.yaml, --scale and --set: how every command takes an experiment. `may_lack`: the file may be left out."""
    few = "?" if may_lack else None
    parser.add_argument(
        "experiment", type=Path, metavar="EXP.yaml", nargs=few,
        help="experiment file, such as experiments/quickstart.yaml, a small demo",
    )  # fmt: skip
    parser.add_argument("--scale", metavar="NAME", help="the same question at another size, as the file's scales say")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE",
        help="replace one value, such as seq_len=64k, steps.measured=5 or sweep.cp_size=[1,2]; may be repeated",
    )  # fmt: skip


def chosen_experiment(arguments: argparse.Namespace) -> Experiment:
    """The experiment the command line names. Raises UsageError; for a file that is not there it names ours."""
    path: Path = arguments.experiment
    if not path.exists():
        known = {one.stem: one for one in sorted(MODELS_DIR.parent.glob("*.yaml"))}
        hint = f"did you mean {known[path.stem]}?" if path.stem in known else nearest(path.stem, known)
        raise UsageError(f"{path}: no such experiment file; {hint}")
    return load_experiment(arguments.experiment, arguments.scale, arguments.overrides)


# Layers: mappings of sections in which sweep and fixed are flat, so that two of them can be laid over each other.

_SETTABLE = [key for key in SETTINGS if key not in SECTION_OF]
# Keys of `burst train` that no experiment has: its files are told apart by them.
_OF_TRAINING_RUNS = ("optimizer", "lr_schedule", "evaluate", "save", "metrics", "init_from")
SECTIONS = ("name", "title", "task", "model", "sweep", "exclude", "fixed", "steps", "seeds", "limits", "search",
            "reference")  # fmt: skip


def _layer(node: Node, what: str) -> Node:
    """Check a layer's keys, flatten its sweep and fixed to dotted keys, and refuse a setting in both."""
    entries = node.mapping(what)
    for key, entry in entries.items():
        if key in _OF_TRAINING_RUNS:
            raise UsageError(
                f"{entry.place}: {key} is a key of training configurations, and this was read as an experiment; "
                "give a training configuration to burst train"
            )
    for key, entry in entries.items():
        if key in _SETTABLE:
            raise UsageError(f"{entry.place}: {key} is a setting; write it as fixed.{key} or sweep.{key}")
    check_keys(entries, (*SECTIONS, "scales") if what == "the experiment" else SECTIONS, what)
    sweep = _settings(entries.get("sweep"), "sweep", (*_SETTABLE, "model"))
    fixed = _settings(entries.get("fixed"), "fixed", _SETTABLE)
    for key, swept in sweep.items():
        other = entries.get("model") if key == "model" else fixed.get(key)
        if other is not None:
            raise UsageError(f"{swept.place}: {key} is swept, but {other.place} gives it one value; keep one")
    flat = {"sweep": Node(sweep, node.place), "fixed": Node(fixed, node.place)}
    return Node(entries | flat, node.place)


def _settings(node: Node | None, section: str, known: Sequence[str]) -> dict[str, Node]:
    """Entries of sweep or fixed by dotted key: `checkpoint: {tail: 0}` and `checkpoint.tail: 0` are the same."""
    if node is None:
        return {}
    flat: dict[str, Node] = {}

    def visit(entries: dict[str, Node], prefix: str) -> None:
        for name, entry in entries.items():
            key = prefix + name
            if key == "checkpoint" and entry.value == "auto":
                key = AUTO_KEY
            if isinstance(entry.value, dict) and any(setting.startswith(f"{key}.") for setting in known):
                visit(entry.value, f"{key}.")
            elif key in SECTION_OF and key not in known:
                raise UsageError(f"{entry.place}: {key} does not belong in {section}; write it as {SECTION_OF[key]}")
            elif key not in known and (inner := [setting for setting in known if setting.startswith(f"{key}.")]):
                raise UsageError(f"{entry.place}: {key} is {entry.describe()}; it has the settings {one_of(inner)}")
            elif key not in known:
                raise UsageError(f"{entry.place}: unknown setting {key} in {section}; {nearest(key, known)}")
            elif key in flat:
                raise UsageError(f"{entry.place}: {section}.{key} was already given at {flat[key].place}; keep one")
            else:
                flat[key] = entry

    visit(node.mapping(section), "")
    return flat


def _stack(base: Node, over: Node) -> Node:
    """Lay one layer over another: what the upper sweeps is no longer fixed below, and the reverse. Under one that says
    `checkpoint: auto` nothing of `checkpoint` counts as set by hand."""
    lower, upper = base.mapping("base"), over.mapping("over")
    swept, fixed = upper["sweep"].mapping("sweep"), upper["fixed"].mapping("fixed")
    if AUTO_KEY in fixed and fixed[AUTO_KEY].value == "auto":
        lower = lower | {
            section: _without(lower[section], [key for key in SETTINGS if key.startswith("checkpoint.")])
            for section in ("sweep", "fixed")
        }
    now_fixed = fixed.keys() | ({"model"} & upper.keys())
    kept = {
        key: node for key, node in lower.items() if not (key == "model" and "model" in swept)
    } | {
        "sweep": _without(lower["sweep"], now_fixed),
        "fixed": _without(lower["fixed"], swept.keys()),
    }  # fmt: skip
    return merge(Node(kept, base.place), over)


def _without(node: Node, keys: Collection[str]) -> Node:
    return Node({key: value for key, value in node.mapping("settings").items() if key not in keys}, node.place)


def _overridden(layer: Node, overrides: Sequence[str]) -> Node:
    for override in overrides:
        layer = _stack(layer, _layer(_override(override, layer), "--set"))
    return layer


def _override(text: str, layer: Node) -> Node:
    """One `key.path=value` as a layer above `layer`. A setting may be given by its own name, as it is below `fixed`;
    so may a field of a model that `layer` names. In one that it spells out the field is replaced."""
    first, node = overriding(text, "seq_len=64k")
    if first == "scales":
        raise UsageError(
            f"{node.place}: scales cannot be set here; choose one with --scale and set the keys it decides"
        )
    of_field = text.partition("=")[0].strip().startswith("model.")
    if first in SECTIONS and not (of_field and _names_model(layer)):
        return node
    if not any(name == first or name.startswith(f"{first}.") for name in SETTINGS):
        known = (*SECTIONS, *SETTINGS, *(f"{section}.{name}" for section in ("fixed", "sweep") for name in _SETTABLE))
        hint = nearest(text.partition("=")[0].strip(), known)
        raise UsageError(f"{node.place}: {first} is no setting and no key of an experiment; {hint}")
    return Node({"fixed": node}, node.place)


def _names_model(layer: Node) -> bool:
    """Whether a layer names its model, or sweeps several, and does not spell one out."""
    entries = layer.mapping("the experiment")
    given = entries.get("model")
    return "model" in entries["sweep"].mapping("sweep") or (given is not None and not isinstance(given.value, dict))


# Reading a finished stack of layers.


def _read(layer: Node, path: Path, scale: str | None) -> Experiment:
    entries = layer.mapping("the experiment")
    where = f"{path} at scale {scale}" if scale else str(path)

    sweep = {
        key: tuple(read_setting(item, key, path.parent) for item in _listed(node, f"sweep.{key}"))
        for key, node in entries["sweep"].mapping("sweep").items()
    }
    fixed = {key: read_setting(node, key, path.parent) for key, node in entries["fixed"].mapping("fixed").items()}
    if "model" in entries:
        fixed = {"model": read_setting(entries["model"], "model", path.parent)} | fixed
    for key in ("model", "method", "seq_len"):
        if key not in sweep and key not in fixed:
            choice = "model" if key == "model" else f"fixed.{key}"
            raise UsageError(f"{where}: no {key} is given; add {choice} or sweep.{key}")

    if "task" not in entries:
        raise UsageError(f"{where}: no task is given; add task: train, attention, lm_head, linear or a list of them")
    tasks = [convert(item, Task, "task") for item in _listed(entries["task"], "task")]
    seeds = [_seed(item) for item in _listed(entries["seeds"], "seeds")] if "seeds" in entries else [0]
    name = _name(entries["name"]) if "name" in entries else path.stem
    steps, rounds = _steps(entries.get("steps"))
    return Experiment(
        name=name,
        title=convert(entries["title"], str, "title") if "title" in entries else name,
        path=path,
        scale=scale,
        tasks=tuple(dict.fromkeys(tasks)),
        sweep=sweep,
        exclude=_exclude(entries.get("exclude"), path),
        fixed=fixed,
        steps=steps,
        rounds=rounds,
        seeds=tuple(dict.fromkeys(seeds)),
        limits=build(Limits, entries["limits"], "limits") if "limits" in entries else Limits(),
        search=_search(entries.get("search"), where, sweep),
        reference=_reference(entries.get("reference")),
    )


def _listed(node: Node, what: str) -> list[Node]:
    """The values to run through: those of a list, or a single one."""
    if node.value == []:
        raise UsageError(f"{node.place}: {what} is an empty list; give at least one value")
    return node.items()


def _name(node: Node) -> str:
    """The experiment's name, which is also that of its folder below results/runs."""
    name: str = convert(node, str, "name")
    if name.startswith(".") or not name.isprintable() or Path(name).name != name:
        raise UsageError(f"{node.place}: name is {node.describe()}; expected one word that can name a folder")
    return name


def _steps(node: Node | None) -> tuple[Steps, int]:
    """Section `steps`: what a trial runs, which is part of its settings, and in how many rounds, which is not."""
    if node is None:
        return Steps(), 1
    entries = dict(with_lengths(node, ("warmup_seq_len",), "steps").mapping("steps"))
    check_keys(entries, _OF_STEPS, "steps")
    rounds = 1
    if (often := entries.pop("rounds", None)) is not None:
        rounds = convert(often, int, "steps.rounds")
        if not 1 <= rounds <= MAX_ROUNDS:
            raise UsageError(f"{often.place}: steps.rounds is {rounds}; expected a number from 1 to {MAX_ROUNDS}")
    return build(Steps, Node(entries, node.place), "steps"), rounds


def _search(node: Node | None, where: str, sweep: Mapping[str, Any]) -> Search:
    """Without a section nothing is searched."""
    if node is None:
        return Search()
    search: Search = build(Search, with_lengths(node, ("bisect", "at_most"), "search"), "search")
    if search.until != "no" and "seq_len" not in sweep and not search.bisect:
        raise UsageError(f"{node.place}: search.until stops a sweep over seq_len, and {where} sweeps none; add the "
                         "lengths as sweep.seq_len, or search.bisect")  # fmt: skip
    return search


def _seed(node: Node) -> int:
    seed: int = convert(node, int, "seeds")
    if seed < 0:
        raise UsageError(f"{node.place}: seeds has {seed}; give numbers of at least 0")
    return seed


def _exclude(node: Node | None, path: Path) -> tuple[Mapping[str, tuple[Any, ...]], ...]:
    """Entries of `exclude`; a list as a value means any of its members. A model is named, not described."""
    if node is None:
        return ()
    if not isinstance(node.value, list):
        raise UsageError(f"{node.place}: exclude is {node.describe()}; expected a list of mappings")
    known = (*_SETTABLE, "model", "task", "seed")
    entries = []
    for item in node.value:
        matches = item.mapping("an entry of exclude")
        if not matches:
            raise UsageError(f"{item.place}: an empty entry of exclude matches every trial; name settings")
        check_keys(matches, known, "exclude")
        entries.append({key: tuple(_excluded(one, key, path) for one in _listed(value, f"exclude.{key}"))
                        for key, value in matches.items()})  # fmt: skip
    return tuple(entries)


def _excluded(node: Node, key: str, path: Path) -> Any:
    if key == "model":
        return model_name(convert(node, str, "model"), path.parent)
    return convert(node, SETTINGS[key], key) if key in ("task", "seed") else read_setting(node, key, path.parent)


def _reference(node: Node | None) -> dict[str, str]:
    """What the results are to be put beside: `paper` names an experiment of the paper."""
    if node is None:
        return {}
    entries = node.mapping("reference")
    check_keys(entries, REFERENCES, "reference")
    return {key: read_paper_reference(value) for key, value in entries.items()}
