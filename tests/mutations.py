"""Damaged files by seed: real files with one thing that a tired hand, an editor or a copy may have changed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

_VALUES = (
    "yes", "012", "1:30", "2026-11-24", "text", "1.5", "-1", "0", "[1, 2]", "{a: 1}", "", "''", "true", "1e999", ".nan",
    "99999999999999999999", "64k", "[]", "{}", "'1'", "&a [*a]", "!!python/name:os.system", "fp16", "~", "@x", "[1, 2",
)  # fmt: skip
_KEY = re.compile(r"^(\s*(?:- )?\{?)([A-Za-z_.]+)(:)", re.MULTILINE)
_VALUE = re.compile(r"([A-Za-z_.]+: )([^\s,{}\[\]#][^,{}\[\]#\n]*)")
_LINE = re.compile(r"^[ -]*[A-Za-z_.]+:.*\n", re.MULTILINE)

Mutation = Callable[[str, random.Random], str]


def _typing_error(word: str, chance: random.Random) -> str:
    at = chance.randrange(len(word))
    return chance.choice((word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:], word[:at] + "x" + word[at:]))


def _key(text: str, chance: random.Random) -> str:
    found = chance.choice(list(_KEY.finditer(text)))
    return text[: found.start(2)] + _typing_error(found[2], chance) + text[found.end(2) :]


def _value(text: str, chance: random.Random) -> str:
    found = chance.choice(list(_VALUE.finditer(text)))
    return text[: found.start(2)] + chance.choice(_VALUES) + text[found.end(2) :]


def _misspelt_value(text: str, chance: random.Random) -> str:
    found = chance.choice(list(_VALUE.finditer(text)))
    return text[: found.start(2)] + _typing_error(found[2].strip(), chance) + text[found.end(2) :]


def _line(text: str, chance: random.Random, become: Callable[[str], str]) -> str:
    found = chance.choice(list(_LINE.finditer(text)))
    return text[: found.start()] + become(found[0]) + text[found.end() :]


def _one_character(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text))
    return text[:at] + chance.choice("{}[]:'\"\t\0\x1b&*%@é\n") + text[at + 1 :]


_MUTATIONS: tuple[tuple[Mutation, int], ...] = (
    (_key, 5),
    (_value, 6),
    (_misspelt_value, 3),
    (lambda text, chance: _line(text, chance, lambda line: line * 2), 1),  # twice
    (lambda text, chance: _line(text, chance, lambda _: ""), 2),  # left out
    (lambda text, chance: _line(text, chance, lambda line: "\t" + line.lstrip()), 1),
    (lambda text, chance: _line(text, chance, lambda line: " " + line), 1),
    (lambda text, chance: text[: chance.randrange(len(text))], 1),  # cut off
    (_one_character, 2),
)


def mutated(texts: Sequence[str], number: int, seed: int) -> list[str]:
    """`number` damaged texts, the same ones for the same seed; none equals one of `texts`."""
    chance = random.Random(seed)
    mutations, weights = zip(*_MUTATIONS, strict=True)
    found: list[str] = []
    while len(found) < number:
        text = chance.choice(texts)
        changed = chance.choices(mutations, weights)[0](text, chance)
        if changed not in texts:
            found.append(changed)
    return found
