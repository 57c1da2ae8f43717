"""One reader of typed values: plain ones, as JSON and YAML have them, as the types that take them, and back.

msgspec converts (docs/notes/2026-11-24-one-reader.md says why). It is strict about types; this module adds what it
does not do: an unknown key is an error that names its nearest neighbour, a wrong value is named by its dotted key, and
what no program here writes (numbers beyond 64 bits, endless texts and nesting) is refused. `cluster.files.reader`
lays the lines of a YAML file over it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, Required, TypeAlias, TypeVar

import msgspec
from msgspec import Meta as Meta

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
_NEAR = 0.8  # likeness by difflib: that of tunde and tuned; fp16 and fp64 have 0.75

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    type(None): "null",
    list: "a list",
    tuple: "a list",
}


class Unfit(ValueError):
    """A value that its type does not take.

    `path` leads to it, by keys and places in lists; `sentence` takes the name of that value and says what was found and
    what is expected. As text, the value has its dotted key as a name.
    """

    def __init__(self, path: tuple[str | int, ...], sentence: Callable[[str], str]) -> None:
        self.path = path
        self.sentence = sentence
        super().__init__(sentence(dotted(path) or "the whole"))


def dotted(path: Iterable[str | int]) -> str:
    """The name of a value: its keys with dots between; an item of a list has the list's name."""
    keys = (key for key in path if isinstance(key, str))
    return ".".join(key if len(key) <= _SHOWN_CHARACTERS else f"{key[:_SHOWN_CHARACTERS]}..." for key in keys)


def nearest(word: str, choices: Iterable[str], likeness: float = 0.6, listed: Iterable[str] = ()) -> str:
    """End of a sentence about an unknown `word`: its nearest neighbour, or when none is near the choices that are to be
    `listed`, by default all.

    `likeness` of two spellings is that of difflib."""
    import difflib  # takes as long as all else here, and is needed for errors alone

    known = list(choices)
    by_folded = {choice.casefold(): choice for choice in known}
    match = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=likeness)
    return f"did you mean {by_folded[match[0]]}?" if match else f"expected {one_of(listed or known)}"


def one_of(choices: Iterable[object]) -> str:
    """The choices as prose: `a`, `a or b`, `a, b or c`."""
    *head, last = [str(choice) for choice in choices]
    return f"{', '.join(head)} or {last}" if head else last


@typing.overload
def to_json(value: DataclassInstance) -> dict[str, Json]: ...
@typing.overload
def to_json(value: object) -> Json: ...
def to_json(value: object) -> Json:
    """A dataclass as plain JSON values, nested ones, lists and mappings copied; the inverse of `from_json`."""
    plain: Json = msgspec.to_builtins(value, enc_hook=str)  # paths are the only values that JSON does not have
    return plain


def from_json(cls: type[T], data: object) -> T:
    """Rebuild a dataclass from `to_json` output, or any other annotated type from plain values.

    A dataclass may name older keys of its fields in `RENAMED`. A field that is a TypedDict is a mapping whose known
    keys hold what it declares; others hold any plain value.

    Raises Unfit, a ValueError, for an unknown key, a missing key and a value of another type, and with the class's own
    errors.
    """
    try:
        _inspect(cls, data, 0)
    except Unfit:
        data = _renamed(cls, data)
        _inspect(cls, data, 0)
    try:
        found = msgspec.convert(data, cls, dec_hook=_convert_other)
    except msgspec.ValidationError:
        raise next(_faults(cls, data, ())) from None
    if dataclasses.is_dataclass(found):
        _restore_others(cls, typing.cast(dict[str, Any], data), found)
    return found


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
        value: Json = json.loads(content, parse_constant=_no_number)
        return value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shown(value: object) -> str:
    """A plain value as a sentence shows it, cut to a length that fits."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if value is None or isinstance(value, bool):
        return {None: "empty", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= _LARGEST_INTEGER:
        return "a number of more than 64 bits"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def expected(hint: object) -> str:
    """Values that an annotated type takes, in words; those of a `Meta(description=...)`, where it has one."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _bounded(arguments[0], arguments[1])
    if origin is Literal:
        return one_of(arguments)
    if origin in (types.UnionType, typing.Union):  # the second of Literal[...] | None
        return " or ".join(expected(kind) for kind in arguments)
    if origin in _WORDS:
        return _WORDS[origin]
    if _is_record(hint):
        return "a mapping of " + ", ".join(_hints(hint))
    return _WORDS.get(hint) or f"a mapping of names to {'text' if _of_items(hint) is str else 'values'}"


def _bounded(kind: Any, bounds: Meta) -> str:
    if bounds.description is not None:
        return bounds.description
    if bounds.ge is not None and bounds.le is not None:
        return f"{expected(kind)} from {bounds.ge:g} to {bounds.le:g}"
    return expected(kind)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _convert_other(kind: Any, value: Any) -> Any:
    """msgspec's hook for types that are not its own: paths, and `object`, which is any plain value."""
    if kind is object:
        return value
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"expected {expected(kind)}")


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


@cache
def bare(hint: object) -> object:
    """The type that has parts: without bounds, without `| None`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Annotated, Required, NotRequired):
        return bare(arguments[0])
    if origin in (types.UnionType, typing.Union):  # the second of Literal[...] | None
        return bare(next(kind for kind in arguments if kind is not type(None)))
    return hint


@cache
def _of_items(hint: Any) -> Any:
    """The type of the items of a list, or of the values of a mapping from any names."""
    arguments = typing.get_args(hint)
    if not arguments or typing.get_origin(hint) is Literal:
        return Any
    return arguments[0] if typing.get_origin(hint) in (list, tuple) else arguments[-1]


def _is_record(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or typing.is_typeddict(hint)


def parts(hint: Any, value: Any) -> Iterator[tuple[str | int, Any, Any]]:
    """Of a list or mapping: the key, the type and the value of each part."""
    hint = bare(hint)
    if isinstance(value, dict):
        known, other = (_hints(hint), Any) if _is_record(hint) else ({}, _of_items(hint))
        for key, item in value.items():
            yield key, known.get(key, other), item
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield index, _of_items(hint), item


def _inspect(hint: Any, value: Any, level: int) -> None:
    """Raise Unfit for an unknown key, and for what fits no type: see the module."""
    kind = type(value)
    if kind is float:
        if not math.isfinite(value) and bare(hint) in (float, Any, object):  # 1e999 is JSON
            raise Unfit((), lambda name: f"{name} is {value}; expected a finite number")
    elif kind is str:
        _inspect_text(value)
    elif kind is int:
        if not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER and bare(hint) in (int, float, Any, object):
            raise Unfit((), lambda name: f"{name} is {shown(value)}; give a smaller one")
    elif kind is dict or kind is list:
        if level == MAX_LEVELS:
            raise Unfit((), lambda name: f"{name} is nested in more than {MAX_LEVELS} levels")
        if kind is dict:
            _inspect_keys(bare(hint), value)
        for key, of_part, part in parts(hint, value):
            try:
                _inspect(of_part, part, level + 1)
            except Unfit as error:
                raise Unfit((key, *error.path), error.sentence) from None


def _renamed(hint: Any, value: Any) -> Any:
    """The value with the present names of keys that a dataclass calls `RENAMED`."""
    names: dict[str | int, str] = getattr(bare(hint), "RENAMED", {})
    if isinstance(value, dict):
        return {names.get(key, key): _renamed(of, part) for key, of, part in parts(hint, value)}
    return [_renamed(of, part) for _, of, part in parts(hint, value)] if isinstance(value, list) else value


def _inspect_text(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        length = f"{len(text):,} characters; expected at most {MAX_CHARACTERS:,}"
        raise Unfit((), lambda name: f"{name} is a text of {length}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Unfit((), lambda name: f"{name} holds half a character, which no file can hold") from None


def _inspect_keys(hint: Any, value: dict[str, Any]) -> None:
    for key in value:
        _inspect_text(key)
    if not _is_record(hint):
        return
    known = _hints(hint)
    others = [key for key in value if key not in known]
    if others and dataclasses.is_dataclass(hint):
        raise Unfit((others[0],), lambda name: f"unknown key {name}; {nearest(others[0], known)}")
    if joined := [key for key in others if "." in key]:  # dotted keys, as columns have them, name one value each
        raise Unfit((), lambda name: f"{name} holds {shown(joined[0])}; expected names without a dot")


def _faults(hint: Any, value: Any, path: tuple[str | int, ...]) -> Iterator[Unfit]:
    """The errors of a value that msgspec refused, innermost first."""
    if typing.get_origin(hint) in (Required, NotRequired):
        hint = typing.get_args(hint)[0]
    for key, of_part, part in parts(hint, value):
        yield from _faults(of_part, part, (*path, key))
    try:
        msgspec.convert(value, hint, dec_hook=_convert_other)
    except msgspec.ValidationError as error:
        yield Unfit(path, _sentence(hint, value, error))


def _sentence(hint: Any, value: Any, error: msgspec.ValidationError) -> Callable[[str], str]:
    kind = bare(hint)
    if isinstance(value, dict) and _is_record(kind):
        if missing := [name for name in _required(kind) if name not in value]:
            return lambda name: f"{name} lacks {', '.join(missing)}; add what is missing"
        said = str(error.__cause__ or error)  # of the class itself
        return lambda name: said
    return lambda name: f"{name} is {shown(value)}; expected {expected(hint)}{_hint(hint, kind, value)}"


def _hint(hint: Any, kind: Any, value: Any) -> str:
    """What was meant, where that can be told."""
    if kind is str and expected(hint).startswith("text") and type(value) in (int, float, bool):
        return "; write it in quotes"
    if kind in (int, float) and isinstance(value, str) and _is_number(value):
        return "; leave the quotes out"
    if typing.get_origin(kind) is Literal and isinstance(value, str):
        # All choices are named, because they are few and the nearest in spelling may mislead: fp16 looks like fp64.
        near = nearest(value, map(str, typing.get_args(kind)), _NEAR)
        return f"; {near}" if near.startswith("did") else ""
    return ""


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


@cache
def _required(cls: Any) -> tuple[str, ...]:
    if typing.is_typeddict(cls):
        return tuple(name for name, hint in _hints(cls).items() if typing.get_origin(hint) is Required)
    return tuple(
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )


def _restore_others(cls: Any, data: dict[str, Any], found: Any) -> None:
    """Give back the further keys of mappings that are TypedDicts, of which msgspec keeps the known ones alone."""
    for name, hint in _hints(cls).items():
        kind = bare(hint)
        if data.get(name) is not None:
            if typing.is_typeddict(kind):
                object.__setattr__(found, name, data[name])
            elif dataclasses.is_dataclass(kind):
                _restore_others(kind, data[name], getattr(found, name))
