"""Dataclasses as plain JSON values and back, strictly: a value of another type than the class declares is an error."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import types
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NotRequired, Required, TypeAlias, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

# A JSON value as Python has it.
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_BYTES = 64 << 20  # of a file: more than the record of a run on every GPU there is
MAX_CHARACTERS = 100_000  # of a text in it
MAX_LEVELS = 20  # of lists and mappings in each other
_LARGEST_INTEGER = 1 << 63
_SHOWN_CHARACTERS = 60


class Within(NamedTuple):
    """Annotation of a number: the least and the most that it may be."""

    least: float
    most: float


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@typing.overload
def to_json(value: DataclassInstance) -> dict[str, Json]: ...
@typing.overload
def to_json(value: object) -> Json: ...
def to_json(value: object) -> Json:
    """A dataclass as plain JSON values, nested ones, lists and mappings copied; the inverse of `from_json`."""
    plain: Json = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _WORDS or value is None:
        return value
    if kind is dict:
        return {key: _plain(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [_plain(item) for item in value]
    return {
        name: item if type(item := getattr(value, name)) in _WORDS else _plain(item)
        for name in _field_names(kind)  # type: ignore[arg-type]
    }


def from_json(cls: type[T], data: object, where: str = "") -> T:
    """Rebuild a dataclass from `to_json` output; `where` is its dotted key.

    A field that is a TypedDict is a mapping whose known keys hold what it declares; others hold any plain value.
    Raises ValueError naming the key for an unknown key, a missing key and a value of another type, and with the class's
    own errors.
    """
    return _reader(cls)(data, where)  # type: ignore[arg-type]


def read_json(path: Path) -> Json:
    """The JSON value in a regular file. Raises OSError, and ValueError for one that no program here has written."""
    return parse_json(read_regular(path))


def read_regular(path: Path, most_bytes: int = MAX_BYTES) -> bytes:
    """A regular file whole. Raises OSError, and ValueError for a pipe or a device, which may never end, or a huge
    file."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it is larger than {most_bytes >> 20} MiB")
    return content


def parse_json(content: bytes | str) -> Json:
    """A JSON value, as the standard has it: no NaN and no infinity. Raises ValueError."""
    try:
        return json.loads(content, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


@cache
def _field_names(cls: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


_Reader = Callable[[Any, str], Any]


@cache
def _reader(hint: Any) -> _Reader:
    """A function of a JSON value and its dotted key that returns a value of the annotated type."""
    if dataclasses.is_dataclass(hint):
        return _dataclass_reader(typing.cast(type[Any], hint))
    if typing.is_typeddict(hint):
        return _typed_mapping_reader(hint)
    if hint is Any or hint is object:
        return _anything
    if hint is str:
        return _text
    if hint is float:
        return _number
    if hint is int:
        return _integer
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return _choice_reader(arguments)
    if origin is Annotated:
        return _within_reader(*arguments)
    if origin in (Required, NotRequired):
        return _reader(arguments[0])
    if origin is list:
        return _list_reader(_reader(arguments[0]))
    if origin is dict:
        return _mapping_reader(_reader(arguments[1]))
    if origin is types.UnionType:
        inner = _reader(next(kind for kind in arguments if kind is not type(None)))
        return lambda value, where: None if value is None else inner(value, where)
    assert hint is bool, hint
    return _truth


def _dataclass_reader(cls: type[Any]) -> _Reader:
    hints = typing.get_type_hints(cls, include_extras=True)
    readers = {name: _reader(hints[name]) for name in _field_names(cls)}  # type: ignore[arg-type]
    required = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(value, where, "a mapping of keys to values")
        prefix = f"{where}." if where else ""
        if unknown := sorted(value.keys() - readers.keys()):
            raise ValueError(f"{prefix}{_shown(unknown[0])} is unknown")
        if missing := sorted(required - value.keys()):
            raise ValueError(f"{prefix}{missing[0]} is missing")
        return cls(**{name: readers[name](item, prefix + name) for name, item in value.items()})

    return read


def _typed_mapping_reader(cls: Any) -> _Reader:
    """Of a TypedDict. An unknown name holds no dot, so that dotted keys name one value each."""
    hints = typing.get_type_hints(cls, include_extras=True)
    readers = {name: _reader(hint) for name, hint in hints.items()}
    required = sorted(name for name, hint in hints.items() if typing.get_origin(hint) is Required)

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(value, where, "a mapping of names to values")
        if missing := [name for name in required if name not in value]:
            raise ValueError(f"{where}.{missing[0]} is missing")
        if dotted := [name for name in value.keys() - readers.keys() if "." in name]:
            raise ValueError(f"{where} holds {_shown(min(dotted))}; expected names without a dot")
        return {
            _text(name, where): readers.get(name, _anything)(item, f"{where}.{name[:_SHOWN_CHARACTERS]}")
            for name, item in value.items()
        }

    return read


def _within_reader(kind: Any, bounds: Within) -> _Reader:
    read_number = _reader(kind)

    def read(value: Any, where: str) -> Any:
        number = read_number(value, where)
        if not bounds.least <= number <= bounds.most:
            raise ValueError(f"{where} is {number:g}; expected {bounds.least:g} to {bounds.most:g}")
        return number

    return read


def _choice_reader(choices: tuple[Any, ...]) -> _Reader:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, str) or value not in choices:
            raise _wrong(value, where, f"one of {', '.join(map(str, choices))}")
        return value

    return read


def _list_reader(item: _Reader) -> _Reader:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise _wrong(value, where, "a list")
        return [item(one, where) for one in value]

    return read


def _mapping_reader(item: _Reader) -> _Reader:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(value, where, "a mapping of names to values")
        return {_text(name, where): item(one, where) for name, one in value.items()}

    return read


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(value, where, "text")
    if len(value) > MAX_CHARACTERS:
        raise ValueError(f"{where} is a text of {len(value):,} characters; expected at most {MAX_CHARACTERS:,}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where} holds half a character, which no file can hold") from None
    return value


def _truth(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(value, where, _WORDS[bool])
    return value


def _integer(value: Any, where: str) -> int:
    if type(value) is not int:
        raise _wrong(value, where, _WORDS[int])
    if not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
        raise ValueError(f"{where} is a number of {len(str(abs(value)))} digits; expected one of 64 bits")
    return value


def _number(value: Any, where: str) -> float:
    if type(value) is int:
        return _integer(value, where)
    if type(value) is not float:
        raise _wrong(value, where, _WORDS[float])
    if not math.isfinite(value):  # 1e999 is JSON
        raise ValueError(f"{where} is {value}; expected a finite number")
    return value


def _anything(value: Any, where: str, level: int = 0) -> Any:
    """Any JSON value of finite 64-bit numbers and texts that can be written."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int | float):
        return _number(value, where)
    if level == MAX_LEVELS:
        raise ValueError(f"{where} is nested in more than {MAX_LEVELS} levels")
    if isinstance(value, list):
        return [_anything(item, where, level + 1) for item in value]
    return {_text(name, where): _anything(item, where, level + 1) for name, item in value.items()}


def _wrong(value: Any, where: str, expected: str) -> ValueError:
    return ValueError(f"{where or 'the whole'} is {_shown(value)}; expected {expected}")


def _shown(value: Any) -> str:
    """A value as a message shows it, cut to a length that fits a sentence."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= _LARGEST_INTEGER:
        return "a number of more than 64 bits"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
