"""Ranges in names: `gpu[01-04]` stands for four nodes, and four nodes are written as `gpu[01-04]`.

Lists are read as Slurm writes them into SLURM_JOB_NODELIST: `gpu[01-04,07],login2,r[1-2]n[0-10:2]`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

MAX_EXPANSION = 10_000  # a mistyped range such as gpu[1-99999999] must not fill the memory

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?", re.ASCII)
_COMMA = re.compile(r",(?![^\[\]]*\])")  # outside brackets
_DIGITS = re.compile(r"([0-9]+)")


def split_list(names: str) -> list[str]:
    """The parts of a list with commas; a comma between brackets belongs to a range."""
    return _COMMA.split(names)


def expand(pattern: str) -> list[str]:
    """Names a pattern stands for: `gpu[01-03],head` is gpu01, gpu02, gpu03, head; zero padding is kept, several ranges
    of one name multiply, and `[0-10:2]` takes every second number.

    Raises ValueError for an empty, reversed or far too long range; text around the brackets is not checked.
    """
    names = [name for part in split_list(pattern) for name in _expand(part)]
    _check_count(len(names), pattern)
    return names


def is_range(text: str) -> bool:
    """Whether this, between two brackets, is a list of numbers and no IPv6 address."""
    return all(_RANGE.fullmatch(part) for part in text.split(","))


def fold(names: Sequence[str]) -> str | None:
    """The pattern that expands to exactly these names in this order; None when one range cannot express them.

    At most one number may differ between them: r1n01, r1n02 fold, r1n01, r2n02 do not.
    """
    split = [_DIGITS.split(name) for name in names]
    first = split[0]
    if any(len(tokens) != len(first) for tokens in split):
        return None
    varying = [at for at in range(len(first)) if any(tokens[at] != first[at] for tokens in split)]
    if not varying:
        return names[0] if len(names) == 1 else None
    if len(varying) > 1 or varying[0] % 2 == 0:  # the odd tokens are the numbers
        return None
    at = varying[0]
    return "".join(first[:at]) + f"[{_range([tokens[at] for tokens in split])}]" + "".join(first[at + 1 :])


def _expand(pattern: str) -> list[str]:
    """Names of one part of a list."""
    pieces: list[list[str]] = []
    end = 0
    for match in _BRACKETS.finditer(pattern):
        pieces += [[pattern[end : match.start()]], _numbers(match[1], pattern)]
        end = match.end()
    pieces.append([pattern[end:]])
    _check_count(math.prod(map(len, pieces)), pattern)
    return ["".join(parts) for parts in itertools.product(*pieces)]


def _range(numbers: Sequence[str]) -> str:
    """`01-03,07` of 01, 02, 03, 07: `_numbers` expands it to exactly these."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs and number == _successor(runs[-1]):
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _successor(run: Sequence[str]) -> str:
    """The number that continues a run; its padding is that of the run's first number."""
    width = len(run[0]) if run[0].startswith("0") else 0
    return str(int(run[-1]) + 1).zfill(width)


def _check_count(count: int, pattern: str) -> None:
    if count > MAX_EXPANSION:
        raise ValueError(f"{pattern!r} stands for {count} hosts; expected at most {MAX_EXPANSION}: check the range")


def _numbers(text: str, pattern: str) -> list[str]:
    """The numbers between two brackets: `01-03,07` is 01, 02, 03, 07."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise ValueError(f"{pattern!r} has the range [{text}]; expected numbers such as [01-04,07] or [0-10:2]")
        first, last, step = match[1], match[2] or match[1], int(match[3] or 1)
        if step == 0:
            raise ValueError(f"{pattern!r} has the step 0 in [{text}]; expected 1 or more")
        if int(last) < int(first):
            raise ValueError(f"{pattern!r} counts down from {first} to {last}; write [{last}-{first}]")
        if int(last) - int(first) >= MAX_EXPANSION:
            raise ValueError(f"{pattern!r} has a range of more than {MAX_EXPANSION} hosts: check the range")
        width = len(first) if first.startswith("0") or len(first) == len(last) else 0
        numbers += [str(number).zfill(width) for number in range(int(first), int(last) + 1, step)]
    return numbers
