"""Typed values out of YAML nodes. The types are those of the dataclass that takes the value; none is repeated here."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Collection
from typing import Any, Literal, TypeVar

from cluster.files.document import Node
from harness.base.errors import UsageError, nearest, one_of
from harness.base.lengths import parse_length

T = TypeVar("T")

_NEAR = 0.8  # likeness of two spellings by difflib: that of tunde and tuned; fp16 and fp64 have 0.75

# Counted in tokens, so 64k may be written. Not every integer: a 32k vocabulary usually means 32,000.
LENGTHS = frozenset({"bisect", "at_most", "seq_len", "warmup_seq_len", "steps.warmup_seq_len"})


def leaf_types(cls: type[Any], prefix: str = "") -> dict[str, Any]:
    """Type of every setting below a dataclass, by dotted key: `seq_len`, `model.layers`, `checkpoint.tail`."""
    leaves: dict[str, Any] = {}
    for name, annotation in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(annotation):
            leaves |= leaf_types(typing.cast(type[Any], annotation), f"{prefix}{name}.")
        else:
            leaves[prefix + name] = annotation
    return leaves


def check_keys(entries: dict[str, Node], known: Collection[str], what: str) -> None:
    """Raise UsageError for the first key that is not `known`, naming its nearest neighbour."""
    for key, node in entries.items():
        if key not in known:
            raise UsageError(f"{node.place}: unknown key {key} in {what}; {nearest(key, known)}")


def convert(node: Node, annotation: Any, label: str) -> Any:
    """The node's value as `annotation` (int, float, bool, str or a Literal). Raises UsageError naming `label`."""
    value = node.value
    if typing.get_origin(annotation) is Literal:
        choices = [str(choice) for choice in typing.get_args(annotation)]
        if value in choices:
            return value
        # All of them, because they are few and the nearest in spelling may mislead: fp16 looks like fp64.
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=_NEAR)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise _wrong(node, label, f"expected {one_of(choices)}{meant}")
    if annotation is bool:
        if isinstance(value, bool):
            return value
        raise _wrong(node, label, "expected true or false")
    if annotation is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if label in LENGTHS and isinstance(value, str):
            try:
                return parse_length(value)
            except ValueError as error:
                raise UsageError(f"{node.place}: {label}: {error}") from error
        raise _wrong(node, label, "expected a whole number" + (" such as 4096 or 64k" if label in LENGTHS else ""))
    if annotation is float:
        return _number(node, label)
    if annotation is str:
        if isinstance(value, str) and value.strip():
            return value
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        raise _wrong(node, label, "expected text; write it in quotes" if number else "expected text")
    raise AssertionError(f"no conversion to {annotation} for {label}")


def build(cls: type[T], node: Node, what: str, **given: Any) -> T:
    """A dataclass from a mapping, strictly: known keys only, typed values, ranges checked by the class itself.

    `given` fills fields the mapping may leave out. Raises UsageError.
    """
    entries = node.mapping(what)
    types = typing.get_type_hints(cls)
    check_keys(entries, types.keys(), what)
    values = given | {key: convert(entry, types[key], key) for key, entry in entries.items()}
    missing = [field.name for field in dataclasses.fields(cls) if _required(field) and field.name not in values]  # type: ignore[arg-type]
    if missing:
        raise UsageError(f"{node.place}: {what} lacks {', '.join(missing)}; add what is missing")
    try:
        return cls(**values)
    except ValueError as error:
        raise UsageError(f"{node.place}: {error}") from error


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _number(node: Node, label: str) -> float:
    value = node.value
    if isinstance(value, str):
        # YAML 1.1 takes 1e-3 for text: its floats need a point and a signed exponent.
        try:
            value = float(value)
        except ValueError:
            raise _wrong(node, label, "expected a number") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(node, label, "expected a number")
    try:
        number = float(value)
    except OverflowError:
        raise _wrong(node, label, "expected a number a float can hold") from None
    if not math.isfinite(number):
        raise _wrong(node, label, "expected a finite number")
    return number


def _wrong(node: Node, label: str, expected: str) -> UsageError:
    return UsageError(f"{node.place}: {label} is {node.describe()}; {expected}")
