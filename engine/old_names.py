"""The names that settings, their values and keywords had earlier: one table, read wherever an old file or call may be.

Experiment and training files, records and keywords are read by it; a trial's id is hashed under the names of its left
column, so that a trial keeps the id it had before a name changed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

SETTINGS = {"gradient_wire": "grad_comm_dtype"}
VALUES = {  # by the setting's name of today
    "schedule": {"head_exchange": "ulysses", "heads_inside": "usp", "heads_across": "usp_transposed"},
}
KEYWORDS = SETTINGS | {"head_parts": "num_head_chunks", "stored": "saved", "replayed": "recompute"}

# Of what `auto` became, as records hold it.
RESOLVED = {"head_parts": "num_head_chunks"}
RESOLVED_VALUES = {"schedule": {"all_to_all": "ulysses"} | VALUES["schedule"]}


def current_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings out of JSON, under the names of today. `between_nodes: plain`, which records have, is no setting now."""
    found = _renamed(settings, SETTINGS, VALUES)
    if found.get("between_nodes") == "plain":
        del found["between_nodes"]
    return found


def first_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names they had first: the inverse of `current_settings`."""
    first = {new: old for old, new in SETTINGS.items()}
    values = {first.get(key, key): {new: old for old, new in names.items()} for key, names in VALUES.items()}
    return _renamed(settings, first, values)


def current_resolved(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """What `auto` became, out of a record, under the names of today; so are the schedules of its estimate."""
    found = _renamed(resolved, RESOLVED, RESOLVED_VALUES)
    if isinstance(estimate := found.get("estimate"), str):
        # Such as `head_exchange 198 ms, ring 211 ms`.
        words = (RESOLVED_VALUES["schedule"].get(word, word) for word in estimate.split(" "))
        found["estimate"] = " ".join(words)
    return found


def renamed_keywords(function: Callable[P, R], names: Mapping[str, str] = KEYWORDS) -> Callable[P, R]:
    """`function`, which also takes keywords and values by their old names, each with a DeprecationWarning.

    Raises TypeError where a keyword is given under both names.
    """

    @functools.wraps(function)
    def renaming(*args: P.args, **keywords: P.kwargs) -> R:
        for old, new in names.items():  # plain loops: `torch.compile` traces them
            if old not in keywords:
                continue
            if new in keywords:
                raise TypeError(f"{function.__name__} was given {old} and {new}, which is its name now; give {new}")
            warnings.warn(f"{old} is now {new}; write {new}=", DeprecationWarning, stacklevel=2)
            keywords[new] = keywords.pop(old)
        for key in VALUES:
            value = keywords.get(key)
            if isinstance(value, str) and (new := VALUES[key].get(value, value)) != value:
                warnings.warn(f"{key} {value} is now {new}; write {key}={new!r}", DeprecationWarning, stacklevel=2)
                keywords[key] = new
        return function(*args, **keywords)

    return renaming


def renamed_fields(**names: str) -> Callable[[type[T]], type[T]]:
    """A class decorator: the class also takes keyword arguments by their old names, as `renamed_keywords` does."""

    def decorate(cls: type[T]) -> type[T]:
        cls.__init__ = renamed_keywords(cls.__init__, names)  # type: ignore[method-assign]
        return cls

    return decorate


def _renamed(
    entries: Mapping[str, Any], names: Mapping[str, str], values: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """The entries under other names, where `values` maps the values of the other name.

    An entry given under both names keeps its own, so that whatever reads it refuses it as unknown.
    """
    found: dict[str, Any] = {}
    for name, value in entries.items():
        key = names.get(name, name)
        if key != name and key in entries:
            key = name
        found[key] = values[key].get(value, value) if key in values and isinstance(value, str) else value
    return found
