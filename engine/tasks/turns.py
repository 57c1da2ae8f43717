"""Trials that one set of ranks runs in turn, so that the ranks are started once.

Launcher and ranks share a directory: `<turn>.json` names the trial of a turn and how many ranks it has, the first ones;
the others wait for the next turn. `<turn>.rank<r>` says that rank r has finished the trial. Files, because waiting for
one depends neither on other ranks nor on the process groups of a trial.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from engine.measurement import write_json

VARIABLE = "BURST_TURNS"  # in the environment of ranks that wait for further trials: the directory
POLL_SECONDS = 0.01  # a thousandth of the time of starting a rank
IDLE_POLL_SECONDS = 0.1  # of a rank that waits while others measure: ten short looks a second


class Given(NamedTuple):
    """The trial of a turn."""

    trial_dir: Path
    ranks: int  # that run it, from rank 0 on


class Turns:
    """The directory, for launcher and ranks. Turns count from 1."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def named_in(cls, environment: Mapping[str, str]) -> Turns | None:
        """The turns of a rank with this environment; None for a rank that has one trial only."""
        return cls(Path(environment[VARIABLE])) if environment.get(VARIABLE) else None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make a rank wait for further trials here."""
        return {VARIABLE: str(self._directory)}

    def give(self, turn: int, trial_dir: Path, ranks: int) -> None:
        """Give the trial in `trial_dir` to the first `ranks` ranks; the others have no part in this turn."""
        write_json(self._directory / f"{turn}.json", {"trial_dir": str(trial_dir.absolute()), "ranks": ranks})

    def through(self, turn: int) -> set[int]:
        """Ranks that have finished the trial of this turn without an error."""
        return {int(path.suffix.removeprefix(".rank")) for path in self._directory.glob(f"{turn}.rank*")}

    def wait(self, turn: int, poll_seconds: float = POLL_SECONDS) -> Given:
        """This turn's trial, as soon as it is given. The launcher ends a rank that waits."""
        path = self._directory / f"{turn}.json"
        while not path.exists():
            time.sleep(poll_seconds)
        given = json.loads(path.read_text(encoding="utf-8"))
        return Given(trial_dir=Path(given["trial_dir"]), ranks=given["ranks"])

    def finish(self, turn: int, rank: int) -> None:
        """Record that this rank has finished the trial of this turn."""
        os.close(os.open(self._directory / f"{turn}.rank{rank}", os.O_WRONLY | os.O_CREAT, 0o644))
