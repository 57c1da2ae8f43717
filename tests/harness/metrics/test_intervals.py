"""Intervals from rounds hold the true value about as often as they say, and there are none below three rounds."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from harness.metrics.intervals import (
    CONFIDENCE,
    Ratio,
    TwoRounds,
    _student,
    median_interval,
    median_ratio,
    medians_of_two,
)

TRIES = 300


def sample(generator: random.Random, rounds: int, steps: int, median: float = 1.0) -> list[list[float]]:
    """Steps that differ by 0.5%, in rounds that differ by 1%."""
    levels = [generator.gauss(math.log(median), 0.01) for _ in range(rounds)]
    return [[math.exp(generator.gauss(level, 0.005)) for _ in range(steps)] for level in levels]


@pytest.mark.parametrize("rounds", [3, 5])
@pytest.mark.parametrize("steps", [1, 10])
def test_an_interval_holds_the_true_median_about_as_often_as_it_says(rounds, steps):
    generator = random.Random(1)
    found = [median_interval(sample(generator, rounds, steps)) for _ in range(TRIES)]
    held = sum(one.low <= 1 <= one.high for one in found) / TRIES
    assert held >= CONFIDENCE - 0.07


def test_steps_taken_as_independent_would_hold_it_far_less_often():
    # What the interval corrects: that of 30 independent steps is narrower than that of 3 rounds of 10.
    generator = random.Random(1)
    for _ in range(20):
        rounds = sample(generator, 3, 10)
        alone = [[step] for one in rounds for step in one]
        together, apart = median_interval(rounds), median_interval(alone)
        assert together.high - together.low > apart.high - apart.low


@pytest.mark.parametrize("paired", [True, False])
def test_equal_methods_are_rarely_told_apart(paired):
    generator = random.Random(2)
    tries = TRIES if paired else TRIES // 5
    verdicts = [
        median_ratio(sample(generator, 3, 5), sample(generator, 3, 5), paired=paired).verdict() for _ in range(tries)
    ]
    assert verdicts.count("not distinguishable") / tries >= CONFIDENCE - 0.07


def test_a_difference_beyond_the_noise_is_found_in_its_direction():
    generator = random.Random(3)
    ours, theirs = sample(generator, 3, 5), sample(generator, 3, 5, median=1.3)
    assert median_ratio(ours, theirs, paired=True).verdict() == "faster"
    assert median_ratio(theirs, ours, paired=True).verdict() == "slower"
    assert median_ratio(theirs, ours, paired=True).verdict(tolerance=0.5) == "not distinguishable"


def test_pairs_of_rounds_tell_apart_what_rounds_alone_do_not():
    # Every round is slow or fast as a whole, and the candidate 2% faster in each.
    levels = (1.0, 1.3, 0.8)
    ours, theirs = [[0.98 * level] * 3 for level in levels], [[level] * 3 for level in levels]
    assert median_ratio(ours, theirs, paired=True).verdict() == "faster"
    assert median_ratio(ours, theirs, paired=False).verdict() == "not distinguishable"


def test_one_round_has_no_interval_and_no_verdict():
    assert median_interval([[1.0, 1.1, 1.2]]) is None
    alone = median_ratio([[2.0]], [[1.0], [1.0]], paired=False)
    assert alone == Ratio(value=2.0, interval=None)
    assert alone.verdict() == "not distinguishable"


def test_two_rounds_have_two_values_and_no_interval():
    ours, theirs = [[1.0, 1.0], [1.1, 1.1]], [[2.0, 2.0], [2.0, 2.0]]
    assert median_interval(ours) is None
    assert medians_of_two(ours) == (1.0, 1.1)
    assert medians_of_two([[1.0]]) is medians_of_two([[1.0]] * 3) is None
    pairs = median_ratio(ours, theirs, paired=True)
    assert pairs == Ratio(value=1.05 / 2, interval=None, by_round=TwoRounds(0.5, 0.55))
    apart = median_ratio([[2.0], [2.2], [2.4]], [[1.0], [0.8]], paired=False)  # no pairs: the extremes
    assert (apart.interval, apart.by_round) == (None, (2.0, 2.4 / 0.8))


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [((0.1, 0.1), "faster in both rounds"), ((1.5, 1.2), "slower in both rounds"), ((0.9, 1.1), "not distinguishable"),
     ((0.97, 0.9), "not distinguishable")],
)  # fmt: skip
def test_two_rounds_say_no_more_than_what_happened_in_both(seconds, verdict):
    found = median_ratio([[one] for one in seconds], [[1.0], [1.0]], paired=True)
    assert found.verdict(tolerance=0.05) == verdict


def test_equal_records_give_equal_intervals():
    rounds = sample(random.Random(4), 8, 5)
    assert median_interval(rounds) == median_interval(rounds)


def test_the_value_lies_in_its_interval():
    generator = random.Random(5)
    for rounds in (3, 7):
        found = sample(generator, rounds, 3)
        interval = median_interval(found)
        assert interval.low <= statistics.median(step for one in found for step in one) <= interval.high


@pytest.mark.parametrize(("degrees", "expected"), [(1, 12.706), (10, 2.228), (11, 2.201), (30, 2.042), (1000, 1.962)])
def test_the_points_of_students_distribution_are_those_of_the_tables(degrees, expected):
    assert _student(degrees) == pytest.approx(expected, rel=2e-3)
