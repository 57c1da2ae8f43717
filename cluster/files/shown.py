"""Text from a user, a file or a node, as it is put on a terminal: nothing in it steers the terminal or floods it."""

from __future__ import annotations

MAX_CHARACTERS = 1000  # of a line: a path of the longest kind fits beside a sentence
_END_CHARACTERS = 300  # of them behind the gap, where an error says what to do


def shown(text: str, most: int = MAX_CHARACTERS) -> str:
    """The text with control characters written as escapes (`\\x1b`) and every line of at most about `most` characters.

    Line breaks and tabs stay. What is left out of a long line is its middle, and the line says how much that is.
    """
    if text.isprintable() and len(text) <= most:
        return text
    return "\n".join(_line(line, most) for line in text.split("\n"))


def shown_value(text: str) -> str:
    """One value inside a sentence or a table: on one line, and short."""
    return shown(text, 200).replace("\n", "\\n").replace("\t", "\\t")


def _line(line: str, most: int) -> str:
    if len(line) > most:
        end = min(_END_CHARACTERS, most // 3)
        left_out = len(line) - most
        line = f"{line[: most - end]}... ({left_out:,} characters left out) ...{line[len(line) - end :]}"
    if line.isprintable():
        return line
    return "".join(one if one.isprintable() or one == "\t" else _escape(one) for one in line)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
