"""`provenance.yaml` of a run: what its records cannot say themselves, and why, in words that tables repeat.

    command: burst run experiments/quickstart.yaml --scale gpu      # or a list of {trials, command}
    reasons:
      - trials: ["train-*"]                                         # globs of trial ids; left out: all
        about: [driver, gpu]
        says: measured before records kept the driver and the identity of GPUs
    machines:                                                       # of a run that moved; the first that names a round
      - {trials: ["train-*"], rounds: [1], machine: first}

The file is optional. It is written by hand, so it is read strictly: an unknown key is an error that names the nearest.
In a packed run the same keys stand in the header (`packed.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, get_args

from cluster.files.errors import nearest
from cluster.files.reader import Node, read_yaml
from harness.base.errors import UsageError

PROVENANCE_FILE = "provenance.yaml"

# What a reason excuses. `lost_commit`: no history holds the commit, so that no claim may rest on the record.
# `id`: the digest in the id is not that of the settings as they are named today; no figure depends on it.
# `conditions` excuses nothing and is what a reader has to know, as of a host that was shared.
About = Literal[
    "id", "commit", "lost_commit", "command", "rounds", "samples", "gpu", "driver", "hosts", "software", "paths",
    "conditions",
]  # fmt: skip
_ABOUT: tuple[About, ...] = get_args(About)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why some records cannot pass a check of `burst verify`."""

    says: str  # one sentence without a full stop
    about: tuple[About, ...]
    trials: tuple[str, ...] = ("*",)  # globs of trial ids

    def names(self, trial_id: str) -> bool:
        return any(fnmatchcase(trial_id, glob) for glob in self.trials)


@dataclass(frozen=True, kw_only=True, slots=True)
class TypedCommand:
    """The command that made some records, as it was typed."""

    command: str
    trials: tuple[str, ...] = ("*",)

    def names(self, trial_id: str) -> bool:
        return any(fnmatchcase(trial_id, glob) for glob in self.trials)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnMachine:
    """The machine that some rounds of some records ran on, by a name that the file gives it."""

    machine: str
    rounds: tuple[int, ...]
    trials: tuple[str, ...] = ("*",)

    def names(self, trial_id: str) -> bool:
        return any(fnmatchcase(trial_id, glob) for glob in self.trials)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """The whole of a `provenance.yaml`; empty where there is none."""

    commands: tuple[TypedCommand, ...] = ()
    reasons: tuple[Reason, ...] = ()
    machines: tuple[OnMachine, ...] = ()

    def command(self, trial_id: str) -> str | None:
        """The command that made this record: of the first entry that names it."""
        return next((one.command for one in self.commands if one.names(trial_id)), None)

    def machine(self, trial_id: str, number: int) -> str:
        """The machine of a round: of the first entry that names it; empty where nothing is stated."""
        found = (one.machine for one in self.machines if number in one.rounds and one.names(trial_id))
        return next(found, "")

    def reasons_of(self, trial_id: str) -> list[Reason]:
        """All reasons stated for this record, in their order."""
        return [one for one in self.reasons if one.names(trial_id)]

    def reason(self, trial_id: str, about: About) -> str | None:
        """Why this record cannot say what `about` names; None where nothing is stated."""
        return next((one.says for one in self.reasons_of(trial_id) if about in one.about), None)


NOTHING_STATED = Stated()


def stated_in(run_dir: Path) -> Stated:
    """What `run_dir`/provenance.yaml states; nothing where there is no such file. Raises UsageError for a bad one."""
    path = run_dir / PROVENANCE_FILE
    if not os.path.lexists(path):
        return NOTHING_STATED
    return stated_of(read_yaml(path, PROVENANCE_FILE))


def stated_of(document: Node) -> Stated:
    """What a `provenance.yaml`, or that part of a packed run's header, states. Raises UsageError for a bad one."""
    entries = document.mapping(PROVENANCE_FILE)
    _check(entries, ("command", "reasons", "machines"), PROVENANCE_FILE)
    return Stated(
        commands=_commands(entries["command"]) if "command" in entries else (),
        reasons=tuple(map(_reason, _list(entries["reasons"], "reasons"))) if "reasons" in entries else (),
        machines=tuple(map(_on_machine, _list(entries["machines"], "machines"))) if "machines" in entries else (),
    )


def _commands(node: Node) -> tuple[TypedCommand, ...]:
    if not isinstance(node.value, list):
        return (TypedCommand(command=_text(node, "command")),)
    found = []
    for item in node.value:
        entries = item.mapping("an entry of command")
        _check(entries, ("trials", "command"), "an entry of command", required=("command",), place=item.place)
        found.append(TypedCommand(command=_text(entries["command"], "command"), trials=_trials(entries)))
    return tuple(found)


def _reason(node: Node) -> Reason:
    entries = node.mapping("a reason")
    _check(entries, ("trials", "says", "about"), "a reason", required=("says", "about"), place=node.place)
    about = tuple(_about(item) for item in entries["about"].items())
    if not about:
        raise UsageError(f"{entries['about'].place}: about is an empty list; name what the reason is about")
    return Reason(says=_text(entries["says"], "says"), about=about, trials=_trials(entries))


def _on_machine(node: Node) -> OnMachine:
    entries = node.mapping("an entry of machines")
    known = ("trials", "rounds", "machine")
    _check(entries, known, "an entry of machines", required=("rounds", "machine"), place=node.place)
    rounds = []
    for item in entries["rounds"].items():
        if not isinstance(item.value, int) or isinstance(item.value, bool) or item.value < 1:
            raise UsageError(f"{item.place}: rounds is {item.describe()}; expected numbers of rounds from 1")
        rounds.append(item.value)
    if not rounds:
        raise UsageError(f"{entries['rounds'].place}: rounds is an empty list; name the rounds that ran there")
    machine = _text(entries["machine"], "machine")
    return OnMachine(machine=machine, rounds=tuple(rounds), trials=_trials(entries))


def _about(node: Node) -> About:
    word = _text(node, "about")
    for known in _ABOUT:
        if word == known:
            return known
    raise UsageError(f"{node.place}: about is {word!r}, which no check is about; {nearest(word, _ABOUT)}")


def _trials(entries: dict[str, Node]) -> tuple[str, ...]:
    if "trials" not in entries:
        return ("*",)
    found = tuple(_text(item, "trials") for item in entries["trials"].items())
    if not found:
        raise UsageError(f"{entries['trials'].place}: trials is an empty list; name trials, or leave it out for all")
    return found


def _list(node: Node, what: str) -> list[Node]:
    if not isinstance(node.value, list):
        raise UsageError(f"{node.place}: {what} is {node.describe()}; expected a list")
    return node.value


def _text(node: Node, label: str) -> str:
    """One line of text; a folded text of several lines is one."""
    if not isinstance(node.value, str) or not node.value.strip():
        raise UsageError(f"{node.place}: {label} is {node.describe()}; expected text")
    return " ".join(node.value.split())


def _check(
    entries: dict[str, Node], known: tuple[str, ...], what: str, *, required: tuple[str, ...] = (), place: str = ""
) -> None:
    for key, node in entries.items():
        if key not in known:
            raise UsageError(f"{node.place}: unknown key {key} in {what}; {nearest(key, known)}")
    if missing := [key for key in required if key not in entries]:
        raise UsageError(f"{place}: {what} lacks {', '.join(missing)}; add what is missing")
