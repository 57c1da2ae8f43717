"""Few rows of choices in which every two values of different names meet.

Defects of composition mostly lie between two choices; all pairs fit into about as many rows as the two longest lists of
values have pairs, where all combinations would be millions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Choices = Mapping[str, Sequence[Any]]  # by name; the first value is the default
Pair = tuple[tuple[str, Any], tuple[str, Any]]

_DRAWS = 20  # rows drawn for each one that is taken


def pairs_of(row: Row, names: Sequence[str]) -> set[Pair]:
    """Every two values of a row, in the order of `names`."""
    return {((one, row[one]), (other, row[other])) for one, other in itertools.combinations(names, 2)}


def possible_pairs(choices: Choices, allowed: Callable[[Row], bool]) -> list[Pair]:
    """Every two values of different names that are allowed together when all others are the defaults."""
    default = {name: values[0] for name, values in choices.items()}
    return [
        ((one, first), (other, second))
        for one, other in itertools.combinations(choices, 2)
        for first, second in itertools.product(choices[one], choices[other])
        if allowed(default | {one: first, other: second})
    ]


def pairwise(choices: Choices, allowed: Callable[[Row], bool], seed: int) -> list[Row]:
    """Allowed rows that together hold every possible pair, the same for the same seed.

    Greedy: a row begins with a pair that has not met, and each further name takes the value that meets most new pairs;
    of some such rows, drawn in different orders of the names, the one with most is taken. `allowed` must allow the
    defaults beside whatever it allows beside them.
    """
    chance = random.Random(seed)
    names, missing, rows = list(choices), dict.fromkeys(possible_pairs(choices, allowed)), []
    while missing:
        drawn = [_row(dict(next(iter(missing))), choices, allowed, missing, chance) for _ in range(_DRAWS)]
        rows.append(max(drawn, key=lambda row: len(pairs_of(row, names) & missing.keys())))
        for pair in pairs_of(rows[-1], names):
            missing.pop(pair, None)
    return rows


def _row(
    chosen: Row, choices: Choices, allowed: Callable[[Row], bool], missing: Mapping[Pair, None], chance: random.Random
) -> Row:
    """`chosen`, completed name by name in an order of chance."""
    default = {name: values[0] for name, values in choices.items()}
    for name in chance.sample(list(choices), len(choices)):
        if name not in chosen:
            values = [value for value in choices[name] if allowed(default | chosen | {name: value})]
            gains = [_gain(name, value, chosen, choices, missing) for value in values]
            chosen[name] = chance.choice([v for v, gain in zip(values, gains, strict=True) if gain == max(gains)])
    return {name: chosen[name] for name in choices}


def _gain(name: str, value: Any, chosen: Row, choices: Choices, missing: Mapping[Pair, None]) -> int:
    """How many pairs that have not met yet the value would bring together with what is chosen."""
    names = [key for key in choices if key in chosen or key == name]
    return len(pairs_of(chosen | {name: value}, names) & missing.keys())
