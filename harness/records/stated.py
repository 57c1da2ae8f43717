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
from typing import Annotated, Literal, TypeVar

from cluster.files.reader import Node, Text, build, check_keys, read_yaml
from engine.reader import Meta
from harness.base.errors import UsageError

T = TypeVar("T")

PROVENANCE_FILE = "provenance.yaml"

# What a reason excuses. `lost_commit`: no history holds the commit, so that no claim may rest on the record.
# `conditions` excuses nothing and is what a reader has to know, as of a host that was shared.
About = Literal[
    "commit", "lost_commit", "command", "rounds", "samples", "gpu", "driver", "hosts", "software", "paths", "conditions"
]  # fmt: skip
_LISTS = ("trials", "about", "rounds")
_ListOf = Meta(min_length=1, description="at least one, in a list or by itself")


@dataclass(frozen=True, kw_only=True, slots=True)
class _OfTrials:
    """An entry that holds for some records."""

    trials: Annotated[tuple[Text, ...], _ListOf] = ("*",)  # globs of trial ids

    def names(self, trial_id: str) -> bool:
        return any(fnmatchcase(trial_id, glob) for glob in self.trials)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureReason(_OfTrials):
    """Why some records cannot pass a check of `burst verify`."""

    says: Text  # one sentence without a full stop
    about: Annotated[tuple[About, ...], _ListOf]

    def __post_init__(self) -> None:
        object.__setattr__(self, "says", " ".join(self.says.split()))  # a folded text of several lines is one


@dataclass(frozen=True, kw_only=True, slots=True)
class TypedCommand(_OfTrials):
    """The command that made some records, as it was typed."""

    command: Text

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", " ".join(self.command.split()))


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineOfRounds(_OfTrials):
    """The machine that some rounds of some records ran on, by a name that the file gives it."""

    machine: Text
    rounds: Annotated[tuple[Annotated[int, Meta(ge=1, description="a round's number, from 1")], ...], _ListOf]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedProvenance:
    """The whole of a `provenance.yaml`; empty where there is none."""

    commands: tuple[TypedCommand, ...] = ()
    reasons: tuple[FailureReason, ...] = ()
    machines: tuple[MachineOfRounds, ...] = ()

    def command(self, trial_id: str) -> str | None:
        """The command that made this record: of the first entry that names it."""
        return next((one.command for one in self.commands if one.names(trial_id)), None)

    def machine(self, trial_id: str, number: int) -> str:
        """The machine of a round: of the first entry that names it; empty where nothing is stated."""
        found = (one.machine for one in self.machines if number in one.rounds and one.names(trial_id))
        return next(found, "")

    def reasons_of(self, trial_id: str) -> list[FailureReason]:
        """All reasons stated for this record, in their order."""
        return [one for one in self.reasons if one.names(trial_id)]

    def reason(self, trial_id: str, about: About) -> str | None:
        """Why this record cannot say what `about` names; None where nothing is stated."""
        return next((one.says for one in self.reasons_of(trial_id) if about in one.about), None)


NOTHING_STATED = StatedProvenance()


def stated_in(run_dir: Path) -> StatedProvenance:
    """What `run_dir`/provenance.yaml states; nothing where there is no such file. Raises UsageError for a bad one."""
    path = run_dir / PROVENANCE_FILE
    if not os.path.lexists(path):
        return NOTHING_STATED
    return stated_of(read_yaml(path, PROVENANCE_FILE))


def stated_of(document: Node) -> StatedProvenance:
    """What a `provenance.yaml`, or that part of a packed run's header, states. Raises UsageError for a bad one."""
    entries = document.mapping(PROVENANCE_FILE)
    check_keys(entries, ("command", "reasons", "machines"), PROVENANCE_FILE)
    command = entries.get("command")
    if command is not None and not isinstance(command.value, list):
        commands: tuple[TypedCommand, ...] = (build(TypedCommand, Node({"command": command}, command.place)),)
    else:
        commands = _all(TypedCommand, command, "command")
    return StatedProvenance(
        commands=commands,
        reasons=_all(FailureReason, entries.get("reasons"), "reasons"),
        machines=_all(MachineOfRounds, entries.get("machines"), "machines"),
    )


def _all(cls: type[T], node: Node | None, what: str) -> tuple[T, ...]:
    """The entries of a list. Where one takes a list, a single value stands for a list of one."""
    if node is None:
        return ()
    if not isinstance(node.value, list):
        raise UsageError(f"{node.place}: {what} is {node.describe()}; expected a list")
    found = []
    for item in node.value:
        entries = item.mapping(f"an entry of {what}")
        listed = {key: Node(each.items(), each.place) for key, each in entries.items() if key in _LISTS}
        found.append(build(cls, Node(entries | listed, item.place), what))
    return tuple(found)
