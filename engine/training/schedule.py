"""The learning rate of a step: a pure function, so that a resumed run needs no state to go on with it."""

from __future__ import annotations

import math

from engine.training.config import Schedule


def learning_rate(step: int, steps: int, peak: float, schedule: Schedule) -> float:
    """Learning rate of `step`, counted from 0, of `steps`.

    Warm-up step w of W has peak x (w + 1) / W, so no step is lost to a rate of 0; the last step of all has
    peak x minimum.
    """
    assert 0 <= step < steps, (step, steps)
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    after = steps - schedule.warmup
    passed = (step + 1 - schedule.warmup) / after
    lowest = peak * schedule.minimum
    return lowest + (peak - lowest) * (1 + math.cos(math.pi * passed)) / 2
