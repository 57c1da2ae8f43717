"""Strict YAML into frozen dataclasses: every error names file and line, an unknown key its nearest neighbour."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from cluster.document import Node, read_yaml
from cluster.errors import UsageError, nearest

T = TypeVar("T")

_TYPE_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
    type(None): "null",
}


def load(cls: type[T], path: Path, what: str) -> T:
    """Read one YAML mapping as `cls`, whose fields are scalars, paths, optional values, dataclasses or tuples of them.

    `what` names the file's role in errors. Raises UsageError for a file that cannot be read or parsed, a key `cls` does
    not have or that appears twice, a value of the wrong type, and whatever the dataclasses themselves refuse.
    """
    result: T = _build(cls, read_yaml(path, what), "")
    return result


def _build(cls: Any, node: Node, where: str) -> Any:
    """One dataclass from one mapping; `where` is the dotted key it stands at."""
    hints = typing.get_type_hints(cls)
    if not isinstance(node.value, dict):
        raise _error(node, where, "a mapping of " + ", ".join(hints))
    values: dict[str, Any] = {}
    for key, entry in node.value.items():
        dotted = f"{where}.{key}" if where else key
        if key not in hints:
            raise UsageError(f"{entry.place}: unknown key {dotted}; {nearest(key, hints)}")
        values[key] = _value(hints[key], entry, dotted)
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UsageError(f"{node.place}: {where or 'the file'} lacks {missing[0]}; add it")
    try:
        return cls(**values)
    except ValueError as error:
        raise UsageError(f"{node.place}: {error}") from error


def _value(hint: Any, node: Node, where: str) -> Any:
    """One value of the annotated type."""
    if dataclasses.is_dataclass(hint):
        return _build(hint, node, where)
    found = node.value
    if typing.get_origin(hint) is tuple:
        if not isinstance(found, list):
            raise _error(node, where, "a list")
        return tuple(_value(typing.get_args(hint)[0], item, where) for item in found)
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(found) in kinds and not (isinstance(found, float) and not math.isfinite(found)):
        return found
    if float in kinds and type(found) is int:
        return float(found)
    if Path in kinds and type(found) is str:
        return Path(found)
    raise _error(node, where, " or ".join(_TYPE_WORDS[kind] for kind in kinds))


def _error(node: Node, where: str, expected: str) -> UsageError:
    return UsageError(f"{node.place}: {where} is {node.describe()}; expected {expected}")
