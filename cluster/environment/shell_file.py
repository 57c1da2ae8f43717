"""Reading the assignments of an existing env.sh. Nothing in it is ever executed or expanded.

Quoting is that of the POSIX shell, by `shlex`; a value that only a shell can expand (`$HOME`, `$(hostname)`) is marked.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cluster.files.errors import UsageError

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_EXPORTS = (("export",), ("declare", "-x"), ("typeset", "-x"))
_OPEN = frozenset({"if", "for", "while", "until", "case", "select"})
_CLOSE = frozenset({"fi", "done", "esac", "}"})
_CONTINUE = frozenset({"then", "else", "do"})  # which a statement may follow on the same line
# Stand-ins, from Unicode's private area, for the two characters where quotes or a backslash make them literal.
_LITERAL = {"$": "\ue000", "`": "\ue001"}
_BACK = {ord(stand_in): character for character, stand_in in _LITERAL.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """`export NAME=VALUE`, or any other line."""

    line: int  # from 1
    name: str  # "" for a command
    value: str  # as the shell would pass it on; a command's own text where there is no name
    is_expanded: bool = False  # the shell would replace a part of it
    is_conditional: bool = False  # it stands in a branch, a loop or a function, which may or may not be run


def read_assignments(text: str, origin: str) -> list[Assignment]:
    """All statements of the file in order. Raises UsageError, naming `origin` and the line, for an unclosed quote."""
    found: list[Assignment] = []
    depth = 0
    for line, statement in _statements(text):
        try:
            words = shlex.split(statement, comments=False, posix=True)
        except ValueError:
            raise UsageError(f"{origin}:{line}: a quote is opened and never closed; close it there") from None
        depth = max(0, depth + _deeper(words))
        for assignment in _assignments(line, words, statement.translate(_BACK).strip()):
            found.append(replace(assignment, is_conditional=depth > 0))
    return found


def _deeper(words: list[str]) -> int:
    """How many blocks a statement opens, less those it closes."""
    begin = next((word for word in words if word not in _CONTINUE), "")
    opened = (begin in _OPEN) + bool(words and words[-1] == "{")
    return opened - (begin in _CLOSE)


def _assignments(line: int, words: list[str], statement: str) -> Iterator[Assignment]:
    exported = next((prefix for prefix in _EXPORTS if tuple(words[: len(prefix)]) == prefix), ())
    matches = [_ASSIGNMENT.fullmatch(word) for word in words[len(exported) :]]
    if not exported and None in matches:  # also `NAME=VALUE program`, which sets nothing for other programs
        yield Assignment(line=line, name="", value=statement)
        return
    for match in filter(None, matches):  # `export NAME` has its value elsewhere
        value = match[2]
        is_expanded = "$" in value or "`" in value or value.startswith("~")
        yield Assignment(line=line, name=match[1], value=value.translate(_BACK), is_expanded=is_expanded)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Pieces between unquoted line breaks and semicolons, without comments, each with the line it begins on."""
    line, position = 1, 0
    piece, first, quote = "", 0, ""  # the statement so far, its line (0: none yet), the quote that is open
    while position < len(text):
        character, following = text[position], text[position + 1 : position + 2]
        if not quote and character in "\n;":
            if first:
                yield first, piece
            piece, first = "", 0
        elif not quote and character == "#" and (not piece or piece[-1].isspace()):
            end = text.find("\n", position)
            position = (len(text) if end < 0 else end) - 1
        elif quote != "'" and character == "\\" and following:
            piece += _escaped(following)
            position += 1
            line += following == "\n"
        else:
            piece += _LITERAL.get(character, character) if quote == "'" else character
            if character in "'\"" and quote in ("", character):
                quote = "" if quote else character
            first = first or (0 if character.isspace() else line)
        line += character == "\n"
        position += 1
    if first:
        yield first, piece


def _escaped(character: str) -> str:
    """A character after a backslash, as `shlex` should read it: a line continues, an expansion becomes literal."""
    return "" if character == "\n" else _LITERAL.get(character, "\\" + character)
