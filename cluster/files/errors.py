"""Sentences for a user: errors (found, expected, next step), and text made safe for a terminal.

No control character of a file, a node or a user reaches the terminal, and no line is endless.
"""

from __future__ import annotations

import re

from engine.reader import nearest as nearest
from engine.reader import one_of as one_of


class UsageError(ValueError):
    """Bad input from a user: a command line, an experiment, model, hardware or site file.

    The message is one complete sentence; a program prints it without a traceback and exits (`burst` with 2).
    """


def counted(number: int, thing: str) -> str:
    """`1 node`, `8 nodes`, `1,024 nodes`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def quantity(value: float) -> str:
    """A measured number in a sentence: three digits, and never an exponent: `3.35`, `55.4`, `4230`."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def last_line(text: str) -> str:
    """The last line that a program printed, which usually names its error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no reason given"


MAX_CHARACTERS = 1000  # of a line: a path of the longest kind fits beside a sentence
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_BREAK = re.compile(r"\n(?!  )")
_END_CHARACTERS = 300  # kept of the end of a line, where an error states the next step


def shown(text: str, most: int = MAX_CHARACTERS) -> str:
    """The text with control characters written as escapes (`\\x1b`) and every line of at most about `most` characters.

    Line breaks and tabs stay. A long line loses its middle, and states how many characters are left out.
    """
    if text.isprintable() and len(text) <= most:
        return text
    return "\n".join(_line(line, most) for line in text.split("\n"))


def shown_value(text: str) -> str:
    """One value inside a sentence or a table: on one line, and short."""
    return shown(text, 200).replace("\n", "\\n").replace("\t", "\\t")


def shown_error(text: str) -> str:
    """The sentence of an error, on one line: a line break, such as that of a path, is written as an escape.

    Line breaks before two spaces stay. They begin the lines of a list below the sentence, which some errors have.
    """
    return shown(_BREAK.sub(r"\\n", text))


def without_color(text: str) -> str:
    """The text without a terminal's colour codes, which other programs print."""
    return _COLOR.sub("", text)


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
