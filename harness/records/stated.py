"""`provenance.yaml` of a run: what its records cannot say themselves, and why, in words that tables repeat.

    command: burst run experiments/quickstart.yaml --scale gpu      # or a list of {trials, command}
    reasons:
      - trials: ["train-*"]                                         # globs of trial ids; left out: all
        about: [driver, gpu]
        says: measured before records kept the driver and the identity of GPUs
    machines:                                                       # of a run that moved; the first that names a round
      - {trials: ["train-*"], rounds: [1], machine: first}

The file is optional. It is written by hand, so it is read strictly: an unknown key is an error that names the nearest.
In a packed run the same keys stand in the header (`packed.py`). `caveats_of` adds what a record shows itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from cluster.files.reader import Node, Text, build, check_keys, read_yaml
from engine.measurement import ALLOCATION_RETRIES, UNCHECKED, WARM_UP
from engine.reader import Meta
from engine.settings import SETTLED_WITHIN
from harness.base.errors import UsageError
from harness.records.provenance import DIRTY
from harness.records.record import Record

T = TypeVar("T")

PROVENANCE_FILE = "provenance.yaml"
ONE_ROUND = "one round"
TWO_ROUNDS = "two rounds"
ONE_STEP = "one step"

_STEADY = 0.005  # from the first to the last step of a round

# By NVML's names: reasons that say a GPU was too hot or its supply too weak, unlike the power cap of normal work.
_FAULTS = frozenset({"hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"})

# What a reason excuses. `lost_commit`: no history holds the commit, so that no claim may rest on the record.
# `trials`: those of the plan that left no record. `conditions` excuses nothing and is what a reader has to know, as of
# a host that was shared.
About = Literal[
    "commit", "lost_commit", "command", "rounds", "samples", "gpu", "driver", "hosts", "software", "paths", "trials",
    "conditions",
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

    @property
    def only_of_lacking(self) -> bool:
        """Whether it is about trials without a record alone."""
        return self.about == ("trials",)


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


def caveats_of(record: Record, stated: StatedProvenance) -> list[str]:
    """Sentences without full stops, each once: first what the record shows, then what provenance.yaml states."""
    reasons = (one.says for one in stated.reasons_of(record.trial_id) if not one.only_of_lacking)
    return list(dict.fromkeys([*_shown_by(record), *reasons, *_machines_of(record, stated)]))


def _machines_of(record: Record, stated: StatedProvenance) -> list[str]:
    """Which rounds ran on which machine, as one sentence; nothing where provenance.yaml names no machine."""
    rounds = [one.number for one in record.rounds] or [1]  # a record from before there were rounds holds the first
    by_machine: dict[str, list[int]] = {}
    for number in rounds:
        if machine := stated.machine(record.trial_id, number):
            by_machine.setdefault(machine, []).append(number)
    if not by_machine:
        return []
    if len(by_machine) == 1:
        return [f"ran on {next(iter(by_machine))}"]
    places = [
        f"{'rounds' if len(numbers) > 1 else 'round'} {' and '.join(map(str, numbers))} on {machine}"
        for machine, numbers in by_machine.items()
    ]
    return [f"not all rounds ran on one machine: {', '.join(places)}"]


def _shown_by(record: Record) -> list[str]:
    found = []
    if record.commit.endswith(DIRTY):
        found.append("the code differed from its commit")
    measured = record.measurement
    if record.status != "ok" or measured is None:
        return found
    if why := measured.extra.get(UNCHECKED):
        found.append(f"not compared with float64 ({why})")
    if len(record.step_seconds_by_round) == 1:
        found.append(ONE_ROUND)
    if len(record.step_seconds_by_round) == 2:
        found.append(TWO_ROUNDS)
    if change := _change_within_rounds(record.step_seconds_by_round):
        longer = "longer" if change > 0 else "shorter"
        found.append(
            f"steps still changed: in every round the last took {abs(change):.1%} {longer} than the first or more"
        )
    if (warm_up := measured.extra.get(WARM_UP)) is not None and not warm_up["settled"]:
        found.append(f"no two warm-up steps in a row took the same time within {SETTLED_WITHIN:.0%}")
    if len(measured.step_seconds) == 1:
        found.append(ONE_STEP)
    profile = measured.extra.get("profile")
    if profile is not None and profile["of"] == "measured_step":
        found.append("a measured step is the traced one")
    if retries := measured.extra.get(ALLOCATION_RETRIES):
        found.append(
            f"a GPU's memory ran out {max(retries)} times in the measured steps: it freed cached blocks and waited"
        )
    if record.reason:  # of an ok record: what went wrong after its figures were there
        found.append(record.reason)
    states = [*measured.gpus_before, *measured.gpus_after]
    states += [one for part in record.rounds for one in (*part.gpus_before, *part.gpus_after)]
    if faults := sorted(_FAULTS & {reason for one in states for reason in one.throttle or ()}):
        found.append(f"GPU clocks were lowered ({', '.join(faults)})")
    return found


def _change_within_rounds(rounds: Sequence[Sequence[float]]) -> float:
    """By how much the last step of a round differs from its first, as a share of the first: the smallest change of all
    rounds, where each has one of more than _STEADY in the same direction; else 0. One round shows no such pattern."""
    changes = [steps[-1] / steps[0] - 1 for steps in rounds]
    if len(rounds) < 2 or not (min(changes) > _STEADY or max(changes) < -_STEADY):
        return 0.0
    return min(changes, key=abs)
