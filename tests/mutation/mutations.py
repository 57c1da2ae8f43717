"""Damaged files by seed: real files with one thing that a tired hand, an editor or a copy may have changed."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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


_JSON_VALUES: tuple[object, ...] = (
    None, True, -1, 0, 1.5, 10**30, 1e308, float("nan"), float("inf"), "", "text", "../up", "\ud800", "\x1b[2J", [], {},
    [1], ["a", None], {"a": 1}, [[[[]]]], {"__class__": "x"}, "2026-13-45T99:00:00", "x" * 5000,
)  # fmt: skip


def _json_damage(text: str, chance: random.Random) -> str:
    """One value of a JSON text, or one entry of a mapping, become another, come twice or go; JSON lines keep theirs."""
    lines = text.split("\n") if text.count("\n{") else [text]
    at = chance.choice([number for number, line in enumerate(lines) if line.strip()])
    value = json.loads(lines[at])
    owners: list[Any] = []

    def visit(one: Any) -> None:
        if isinstance(one, dict | list) and one:
            owners.append(one)
            for item in one.values() if isinstance(one, dict) else one:
                visit(item)

    visit(value)
    if not owners:
        return "[]"
    owner = chance.choice(owners)
    key = chance.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
    deed = chance.randrange(6)
    if deed == 0:
        del owner[key]
    elif deed == 1 and isinstance(owner, dict):
        owner[key + "x"] = owner.pop(key)
    elif deed == 1:
        owner.append(copy.deepcopy(owner[key]))
    else:
        owner[key] = chance.choice(_JSON_VALUES)
    lines[at] = json.dumps(value)
    return "\n".join(lines)


def _text_damage(text: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    at = chance.randrange(len(lines))
    return chance.choice((
        lambda: text[: chance.randrange(len(text) + 1)],  # cut off
        lambda: _one_character(text, chance) if text else "x",
        lambda: "".join([*lines[:at], *lines[at + 1 :]]),  # a line left out
        lambda: "".join([*lines[: at + 1], *lines[at:]]),  # or twice
        lambda: "".join(chance.sample(lines, len(lines))),
        lambda: "\ufeff" + text.replace("\n", "\r\n"),
        lambda: "",
        lambda: "[" * 5000,
    ))()  # fmt: skip


def _file_damage(path: Path, chance: random.Random) -> str:
    """Something else comes to stand where a file or a folder was."""
    deed = chance.choice(("gone", "a folder", "a pipe", "a link to nothing", "a link to itself", "a link to a device",
                          "bytes", "a file as a folder"))  # fmt: skip
    if deed == "a file as a folder":
        path = path.parent
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if deed == "a folder":
        path.mkdir()
    elif deed == "a pipe":
        os.mkfifo(path)
    elif deed.startswith("a link"):
        path.symlink_to(
            {"nothing": "gone", "itself": path.name, "a device": "/dev/zero"}[deed.removeprefix("a link to ")]
        )
    elif deed != "gone":
        path.write_bytes(chance.randbytes(200))
    return f"{path.name}: {deed}"


def damage(folder: Path, chance: random.Random) -> str:
    """Change one file below a folder as a full disk, an editor, a copy or a stranger may; returns what was done."""
    path = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".png"))
    if chance.random() < 0.3:
        return _file_damage(path, chance)
    text = path.read_text(encoding="utf-8")
    become = _json_damage if path.suffix in (".json", ".jsonl") and chance.random() < 0.7 else _text_damage
    path.write_text(become(text, chance), encoding="utf-8", errors="surrogatepass", newline="")
    return f"{path.relative_to(folder)}: {become.__name__}"
