"""YAML files read strictly, as the types that take them; every value keeps the place it was written at.

Experiments, training files, inventories, sites and all other YAML files of users are read here: `read_yaml` makes a
tree of `Node`, the map from keys to lines, and `build` makes a dataclass of it with `engine.reader`, so that an error
points to the line. Values are those of `yaml.safe_load`, but 1e-3 is a number. Errors are values that YAML 1.1 reads in
a surprising way (bare yes/no/on/off, base-60 and octal numbers, dates), duplicate keys, aliases and foreign tags.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import yaml
from yaml.constructor import SafeConstructor
from yaml.reader import ReaderError

from cluster.files.errors import UsageError, nearest, shown_value
from cluster.files.filesystem import read_text
from engine.reader import MAX_LEVELS as MAX_LEVELS
from engine.reader import Meta, Unfit, bare, dotted, from_json, parts

T = TypeVar("T")
Text = Annotated[str, Meta(pattern=r"\S", description="text")]  # that is not empty

Scalar: TypeAlias = "bool | int | float | str | None"
Content: TypeAlias = "Scalar | list[Node] | dict[str, Node]"

_TAG = "tag:yaml.org,2002:"
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # of YAML 1.2; 1.1 takes 1e-3 for text


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a document, and where it stands: `file.yaml:12`, or the command-line option it came from."""

    value: Content
    place: str

    def describe(self) -> str:
        """The value as an error message shows it."""
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return "a list"
        if self.value is None:
            return "empty"
        if isinstance(self.value, bool):
            return str(self.value).lower()
        return shown_value(repr(self.value))

    def mapping(self, what: str) -> dict[str, Node]:
        """The entries of a mapping; raises UsageError naming `what` for anything else."""
        if not isinstance(self.value, dict):
            raise UsageError(f"{self.place}: {what} is {self.describe()}; expected a mapping of keys to values")
        return self.value

    def items(self) -> list[Node]:
        """The items of a list; any other value counts as a list of one."""
        return self.value if isinstance(self.value, list) else [self]

    @property
    def plain(self) -> Any:
        """The value without the places."""
        return _plain(Any, self)

    def place_of(self, path: Collection[str | int]) -> str:
        """Where the value stands that a path of keys and places in lists leads to, or the last one on the way."""
        node: Any = self
        for key in path:
            try:
                node = node.value[key]
            except (TypeError, LookupError):
                break
        return str(node.place)


def read_yaml(path: Path, what: str) -> Node:
    """Read one YAML file that holds a mapping. `what` names the file's role in errors. Raises UsageError."""
    text = read_text(path, what)
    node = parse_yaml(text, str(path), lambda line: f"{path}:{line}")
    if node.value is None:
        raise UsageError(f"{path}: the {what} is empty; expected a mapping of keys to values")
    node.mapping(f"the {what}")
    return node


def parse_yaml(text: str, origin: str, place_of_line: Callable[[int], str]) -> Node:
    """Parse one YAML document. `origin` names it as a whole, `place_of_line` one of its lines. Raises UsageError."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return Node(None, origin)
        return _Converter(place_of_line).convert(root)
    except ReaderError as error:
        place = place_of_line(text.count("\n", 0, error.position) + 1)
        character = chr(error.character).encode("unicode_escape").decode()
        raise UsageError(f"{place}: found the character {character}, which is not text; remove it") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = place_of_line(mark.line + 1) if mark else origin
        if error.problem and "'\\t'" in error.problem:
            raise UsageError(f"{place}: found a tab; indent with spaces") from error
        problem = " ".join(filter(None, [error.context, error.problem]))
        raise UsageError(f"{place}: not readable as YAML ({problem}); correct the syntax there") from error
    except RecursionError:
        raise _too_deep(origin) from None


def _too_deep(place: str) -> UsageError:
    return UsageError(f"{place}: nested too deeply; expected at most {MAX_LEVELS} levels of lists and mappings")


def merge(base: Node, over: Node) -> Node:
    """`over` laid over `base`: mappings merge key by key, everything else, lists included, is replaced."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return Node(merged, over.place)


def build(cls: type[T], node: Node, where: str = "", **given: object) -> T:
    """One mapping as the dataclass `cls`; `where` is the dotted key it stands at, "" for a whole file.

    `given` fills fields that the mapping may leave out. Raises UsageError with file and line for an unknown key, which
    names its nearest neighbour, for a missing one, a value of another type, and a value that the class itself refuses.
    """
    if not isinstance(node.value, dict):
        raise UsageError(
            f"{node.place}: {where or 'the file'} is {node.describe()}; expected a mapping of keys to values"
        )
    try:
        found: T = from_json(cls, given | _plain(cls, node))
    except Unfit as error:
        said = error.sentence(dotted((where, *error.path) if where else error.path) or "the file")
        raise UsageError(f"{_place(node, error.path, said)}: {said}") from error
    return found


def load(cls: type[T], path: Path, what: str) -> T:
    """Read one YAML file as `build` does. `what` names the file's role in errors."""
    return build(cls, read_yaml(path, what))


def convert(node: Node, hint: Any, label: str) -> Any:
    """The node's value as the annotated type; text must not be empty. Raises UsageError naming `label`."""
    try:
        return from_json(Text if hint is str else hint, _plain(hint, node))
    except Unfit as error:
        raise UsageError(f"{node.place_of(error.path)}: {error.sentence(label)}") from error


def check_keys(entries: Mapping[str, Node], known: Collection[str], what: str) -> None:
    """Raise UsageError for the first key that is not `known`, naming its nearest neighbour."""
    for key, node in entries.items():
        if key not in known:
            raise UsageError(f"{node.place}: unknown key {key} in {what}; {nearest(key, known)}")


def _plain(hint: Any, node: Node) -> Any:
    """The node's value without the places. Where a mapping is from names to text, as of variables, a whole number is
    the text it is written as."""
    if isinstance(node.value, list):
        return [_plain(of_item, item) for _, of_item, item in parts(hint, node.value)]
    if not isinstance(node.value, dict):
        return node.value
    found = {key: _plain(of_item, item) for key, of_item, item in parts(hint, node.value)}
    kind = bare(hint)
    if typing.get_origin(kind) is Mapping and typing.get_args(kind)[1] is str:
        return {key: str(item) if type(item) is int else item for key, item in found.items()}
    return found


def _place(node: Node, path: Collection[str | int], said: str) -> str:
    """The line of an error: that of the value, and of a mapping that its class refuses the first key that is named."""
    for word in re.findall(r"[\w.]+", said):
        place = node.place_of((*path, word.rpartition(".")[2]))
        if place != node.place_of(path):
            return place
    return node.place_of(path)


class _Converter:
    """Turns PyYAML's node graph into a tree of `Node`."""

    def __init__(self, place_of_line: Callable[[int], str]) -> None:
        self._place_of_line = place_of_line
        self._seen: set[int] = set()
        self._scalars = SafeConstructor()

    def convert(self, node: yaml.Node, place: str = "", level: int = 0) -> Node:
        """`place` is the place of the value's key, which errors name; `level`: how many lists and mappings it is in."""
        place = place or self._place_of_line(node.start_mark.line + 1)
        if level > MAX_LEVELS:
            raise _too_deep(place)
        # Only an alias leads to the same node twice; refusing it also bounds what a small file can expand to.
        if id(node) in self._seen:
            raise UsageError(f"{place}: one value is shared by an anchor and an alias; write it out in both places")
        self._seen.add(id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return Node(self._mapping(node, level + 1), place)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return Node([self.convert(item, level=level + 1) for item in node.value], place)
        if isinstance(node, yaml.ScalarNode):
            return Node(self._scalar(node, place), place)
        raise UsageError(f"{place}: found the YAML tag {node.tag}; write plain values without tags")

    def _mapping(self, node: yaml.MappingNode, level: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            key = self.convert(key_node)
            if not isinstance(key.value, str):
                raise UsageError(f"{key.place}: the key {key.describe()} is not text; write it in quotes")
            if key.value in entries:
                first = entries[key.value].place
                raise UsageError(f"{key.place}: the key {key.value} was already given at {first}; keep one of the two")
            entries[key.value] = self.convert(value_node, key.place, level)
        return entries

    def _scalar(self, node: yaml.ScalarNode, place: str) -> Scalar:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        if kind == "str":
            number = node.style is None and _FLOAT.fullmatch(text) is not None and math.isfinite(float(text))
            return float(text) if number else str(text)
        if kind == "null":
            return None
        if kind == "bool":
            if text.lower() not in ("true", "false"):
                raise UsageError(f"{place}: YAML reads the bare word {text} as a truth value; "
                                 f"write true or false, or '{text}' in quotes for the word")  # fmt: skip
            return text.lower() == "true"
        if kind in ("int", "float"):
            if ":" in text:
                raise UsageError(f"{place}: YAML reads {text} as a base-60 number; write '{text}' in quotes for text")
            if kind == "int" and _OCTAL.fullmatch(text):
                raise UsageError(f"{place}: YAML reads {text} as an octal number; write it without the leading zero")
            try:
                return self._number(node, kind)
            except ValueError as error:
                raise UsageError(f"{place}: {text[:20]!r} is not a usable number; write a smaller one") from error
        if kind == "timestamp":
            raise UsageError(f"{place}: YAML reads {text} as a date; write '{text}' in quotes for text")
        if kind == "merge":
            raise UsageError(f"{place}: found the merge key <<; write the values out or use scales")
        raise UsageError(f"{place}: found the YAML tag {node.tag}; write plain values without tags")

    def _number(self, node: yaml.ScalarNode, kind: str) -> int | float:
        if kind == "int":
            return int(self._scalars.construct_yaml_int(node))
        return float(self._scalars.construct_yaml_float(node))
