"""The learning rate of every step, exhaustively for small runs."""

from __future__ import annotations

import math

import pytest

from engine.training.config import Schedule, learning_rate


def rates(steps: int, **schedule: float) -> list[float]:
    return [learning_rate(step, steps, 2.0, Schedule(**schedule)) for step in range(steps)]


def test_the_rate_rises_linearly_to_its_peak_and_falls_along_a_cosine() -> None:
    found = rates(8, warmup=4, minimum=0.5)
    assert found[:4] == [0.5, 1.0, 1.5, 2.0]
    expected = [1.0 + (1 + math.cos(math.pi * part)) / 2 for part in (0.25, 0.5, 0.75, 1.0)]
    assert found[4:] == pytest.approx(expected)
    assert found[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("steps", range(1, 12))
@pytest.mark.parametrize("minimum", [0.0, 0.1, 1.0])
def test_no_rate_leaves_its_bounds_and_after_the_warm_up_none_rises(steps: int, minimum: float) -> None:
    for warmup in range(steps + 1):
        found = rates(steps, warmup=warmup, minimum=minimum)
        assert all(0 < rate <= 2.0 or (minimum == 0 and rate >= 0) for rate in found)
        falling = found[max(0, warmup - 1) :]
        assert falling == sorted(falling, reverse=True)
        assert found[-1] == pytest.approx(2.0 if warmup == steps else 2.0 * minimum)
