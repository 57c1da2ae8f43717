"""What a plan of `checkpoint: auto` was expected to take: made by the planner, kept in the trial's record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a plan was expected to take, as its record holds it. Bytes are of one rank, by the model alone."""

    words: str  # what was chosen, and why
    fits: bool  # whether the planner expected it to
    budget_bytes: int | None  # None: unknown
    allocated_bytes: int
    reserved_bytes: int
    host_bytes: int
    added_seconds: float  # of a step, by repeated work and copies
    step_seconds: float | None = None  # of a step, as `burst predict` says; None where it says nothing
    correction: float = 1.0  # that earlier trials of this machine and shape gave
