"""Strict YAML into frozen dataclasses: every error names file and line, an unknown key its nearest neighbour."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from cluster.files.document import Node, read_yaml
from cluster.files.errors import UsageError, nearest, one_of

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
    """Read one YAML file as `build` does. `what` names the file's role in errors."""
    return build(cls, read_yaml(path, what))


def build(cls: type[T], node: Node, where: str = "") -> T:
    """One mapping as the dataclass `cls`; `where` is the dotted key it stands at, "" for a whole file.

    Fields are scalars, paths, literals, dataclasses, tuples of them, mappings from text to text, or any of these or
    null. Raises UsageError for a file that cannot be read or parsed, a key `cls` does not have or that appears twice, a
    value of the wrong type, and a value that a dataclass itself refuses.
    """
    result: T = _build(cls, node, where)
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
    if isinstance(hint, types.UnionType):
        structured = [
            kind for kind in typing.get_args(hint) if typing.get_origin(kind) or dataclasses.is_dataclass(kind)
        ]
        if structured:  # `... | None`: null, or a value of the other type
            return None if found is None else _value(structured[0], node, where)
    origin = typing.get_origin(hint)
    if origin is tuple:
        if not isinstance(found, list):
            raise _error(node, where, "a list")
        return tuple(_value(typing.get_args(hint)[0], item, where) for item in found)
    if origin is Literal:
        if found not in typing.get_args(hint):
            raise _error(node, where, one_of(typing.get_args(hint)))
        return found
    if origin is Mapping:
        if not isinstance(found, dict):
            raise _error(node, where, "a mapping of names to text")
        return {name: _text(entry, f"{where}.{name}") for name, entry in found.items()}
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(found) in kinds and not (isinstance(found, float) and not math.isfinite(found)):
        return found
    if float in kinds and type(found) is int:
        return float(found)
    if Path in kinds and type(found) is str:
        return Path(found)
    raise _error(node, where, " or ".join(_TYPE_WORDS[kind] for kind in kinds))


def _text(node: Node, where: str) -> str:
    """A mapping's value; a whole number is the text it is written as, so that `NCCL_IB_TC: 106` needs no quotes."""
    if type(node.value) is int:
        return str(node.value)
    if isinstance(node.value, str):
        return node.value
    raise _error(node, where, "text; put it in quotes")


def _error(node: Node, where: str, expected: str) -> UsageError:
    return UsageError(f"{node.place}: {where} is {node.describe()}; expected {expected}")
