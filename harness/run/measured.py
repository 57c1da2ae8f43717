"""What a trial that has ended measured, and what its end then counts as."""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from engine.measurement import Measurement, read_measurement
from engine.method import Method
from engine.profile.timeline import breakdown_of
from engine.profile.unfinished import PROFILE, TRACE_FILE, cut_off
from harness.launch import Outcome
from harness.records.record import Record

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


def completed(record: Record, trial_dir: Path) -> Record:
    """The record of a trial that the user stopped: ok where its figures were on disk by then, else as it is."""
    how = f"{record.status}: {record.reason.partition(';')[0]}"
    found = _left_before_the_trace(trial_dir, how) if record.status == "interrupted" else None
    if found is None:
        return record
    return dataclasses.replace(record, status="ok", reason=f"measured, and then {how}", measurement=found)


def _before_the_trace(outcome: Outcome, trial_dir: Path) -> tuple[Outcome, Measurement | None]:
    """Of a trial that did not end well: what the engine's worker left before it turned to a trace.

    Nothing yet where the user stopped the run, which ends with that trial; see `completed`.
    """
    how = f"{outcome.status}: {outcome.reason}"
    found = None if outcome.status == "interrupted" else _left_before_the_trace(trial_dir, how)
    if found is None:
        return outcome, None
    return dataclasses.replace(outcome, status="ok", reason=f"measured, and then {how}"), found


def _left_before_the_trace(trial_dir: Path, how: str) -> Measurement | None:
    """Figures of a trial that was only to be traced when it ended as `how` says, with what its trace tells."""
    try:
        found = read_measurement(trial_dir)
    except _UNREADABLE:
        return None
    if PROFILE not in found.extra:  # the worker ends with the measurement, so that something else is wrong
        return None
    profile = cut_off(found.extra[PROFILE], how)
    found.extra[PROFILE] = profile | (_of_rank_0(trial_dir) if "span_seconds" not in profile else {})
    return found


def _of_rank_0(trial_dir: Path) -> dict[str, Any]:
    """The breakdown of the trace that rank 0 left before the ranks compared theirs; empty where it left none."""
    try:
        events = json.loads(gzip.decompress((trial_dir / TRACE_FILE).read_bytes()))["traceEvents"]
        breakdown = breakdown_of(events)
    except (*_UNREADABLE, EOFError, zlib.error):
        return {}
    return {"on": breakdown.on, "rank": 0, "span_seconds": breakdown.span_seconds, "seconds": dict(breakdown.seconds)}
