"""What a trial that has ended measured, and what its end then counts as."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from engine.measurement import Measurement, read_measurement
from engine.method import Method
from engine.profile.unfinished import PROFILE, cut_off
from harness.launch import Outcome

_UNREADABLE = (OSError, ValueError, KeyError, TypeError)


def measured(outcome: Outcome, method: Method, trial_dir: Path) -> tuple[Outcome, Measurement | None]:
    """The outcome as it is recorded, and the figures where it is ok.

    A trial that left no numbers has failed, however well it ended. One that had them on disk and was only to be traced
    is ok, however badly that ended: the reason tells. `trial_dir` holds what this attempt left and nothing older.
    """
    if outcome.status != "ok":
        return _before_the_trace(outcome, trial_dir)
    try:
        return outcome, method.read(trial_dir)
    except _UNREADABLE as error:
        reason = f"all ranks ended well, but no measurement could be read ({error}); see logs/rank0.log"
        return dataclasses.replace(outcome, status="failed", reason=reason), None


def _before_the_trace(outcome: Outcome, trial_dir: Path) -> tuple[Outcome, Measurement | None]:
    """Of a trial that did not end well: what the engine's worker left before it turned to a trace.

    Nothing where the user stopped the run, which goes on with that trial.
    """
    if outcome.status == "interrupted":
        return outcome, None
    try:
        found = read_measurement(trial_dir)
    except _UNREADABLE:
        return outcome, None
    if PROFILE not in found.extra:  # the worker ends with the measurement, so that something else is wrong
        return outcome, None
    how = f"{outcome.status}: {outcome.reason}"
    found.extra[PROFILE] = cut_off(found.extra[PROFILE], how)
    return dataclasses.replace(outcome, status="ok", reason=f"measured, and then {how}"), found
