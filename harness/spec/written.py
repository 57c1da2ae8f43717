"""An experiment as the file that means it: what `experiment.yaml` of a run's directory holds.

One scale and the command line are already laid over it, models are written out, and nothing is left to a default of
sections: the file means the same trials where model files or defaults have changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from engine.lora import Lora
from engine.reader import to_json
from engine.shape import ModelShape
from harness.spec.experiment import Experiment, Search


def experiment_text(experiment: Experiment, heading: str = "") -> str:
    """YAML that `load_experiment` reads as the same experiment, with `heading` as comments above it."""
    comments = "".join(f"# {line}\n" for line in heading.splitlines())
    body = yaml.safe_dump(_document(experiment), sort_keys=False, allow_unicode=True, width=120)
    return comments + str(body)


def same_meaning(text: str, other: str) -> bool:
    """Whether two such texts differ at most in their comments."""
    try:
        return bool(yaml.safe_load(text) == yaml.safe_load(other))
    except (yaml.YAMLError, ValueError, RecursionError):  # a file of the user's that is no such text
        return False


def _document(experiment: Experiment) -> dict[str, Any]:
    # Every value is made anew: YAML would write one that occurs twice as an alias, which experiment files do not have.
    fixed = dict(experiment.fixed)
    model = fixed.pop("model", None)
    document: dict[str, Any] = {
        "name": experiment.name,
        "title": experiment.title,
        "task": list(experiment.tasks),
        "model": None if model is None else _value(model),
        "sweep": {key: [_value(value) for value in values] for key, values in experiment.sweep.items()},
        "fixed": {key: _value(value) for key, value in fixed.items()},
        "exclude": [_exclusion(entry) for entry in experiment.exclude],
        "steps": to_json(experiment.steps) | {"rounds": experiment.rounds},
        "seeds": list(experiment.seeds),
        "limits": to_json(experiment.limits),
        "search": {} if experiment.search == Search() else to_json(experiment.search),
        "reference": dict(experiment.reference),
    }
    return {key: value for key, value in document.items() if value not in (None, {}, [])}


def _exclusion(entry: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {key: [_value(value) for value in values] for key, values in entry.items()}


def _value(value: Any) -> Any:
    """One value of a setting. A model is a mapping, whose note is left out where it is empty, as text may not be."""
    if isinstance(value, Lora):
        return to_json(value)
    if not isinstance(value, ModelShape):
        return value
    return {key: item for key, item in dataclasses.asdict(value).items() if key != "note" or item}
