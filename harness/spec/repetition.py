"""How often a run repeats its trials: in rounds, and how precise a trial's median is to be.

No part of a trial's settings or its id: a run that is resumed with more rounds adds them to the same records.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROUNDS = 1000  # of a trial, whatever its interval: more are a mistake
BUDGET_SECONDS = 600.0  # of a trial whose experiment gives an interval and no budget


@dataclass(frozen=True, kw_only=True, slots=True)
class Repetition:
    """Keys of an experiment's `steps` that decide in how many rounds its trials run.

    After `rounds` rounds, a trial whose 95% interval of the median step is wider than +-`interval` of the median runs
    in further ones, until it is narrower or its rounds have taken `budget_seconds`.
    """

    rounds: int = 1
    interval: float = 0.0  # a fraction, such as 0.01; 0: no bound
    budget_seconds: float = BUDGET_SECONDS  # wall time of one trial over all its rounds

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= MAX_ROUNDS:
            raise ValueError(f"steps.rounds is {self.rounds}; expected a number from 1 to {MAX_ROUNDS}")
        if not 0 <= self.interval < 1:
            raise ValueError(
                f"steps.interval is {self.interval:g}; expected a fraction of the median from 0 (no bound) to below 1, "
                "such as 0.01"
            )
        if self.budget_seconds <= 0:
            raise ValueError(f"steps.budget_seconds is {self.budget_seconds:g}; expected seconds above 0")

    def __str__(self) -> str:
        """In words, for a reader of a plan."""
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        if not self.interval:
            return rounds
        return (
            f"{rounds}, then more until the interval of the median is within ±{100 * self.interval:g}% or a trial has "
            f"taken {self.budget_seconds:g} s"
        )
