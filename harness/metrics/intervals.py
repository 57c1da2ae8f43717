"""Intervals of medians and of their ratios, from rounds: how much of a difference is more than noise.

Steps of one round share processes, clocks and neighbours, so whole rounds are resampled: a cluster bootstrap
(Davison and Hinkley, Bootstrap Methods and their Application, section 3.8). A bootstrap of a few rounds is too narrow:
its deviations are widened by t / z x sqrt(R / (R - 1)) for R rounds, after Hesterberg, What Teachers Should Know About
the Bootstrap (2015), section 3.2; for normal data the interval of a mean is then Student's. A test counts how often
intervals hold the true value.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

CONFIDENCE = 0.95
DRAWS = 2000  # of rounds, where there are too many combinations to take each once
_ALL_COMBINATIONS_UP_TO = 5  # rounds: 5 ** 5 = 3125
_SEED = 20250924  # the same records give the same interval

_T = TypeVar("_T")

Rounds = Sequence[Sequence[float]]  # measured values, one sequence per round
Verdict = Literal["faster", "slower", "not distinguishable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """95% of such intervals hold the true value."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """A ratio of two medians; `interval` is None where a side has a single round."""

    value: float
    interval: Interval | None

    def verdict(self, tolerance: float = 0.0) -> Verdict:
        """Of a ratio of times (candidate over reference): whether it lies beyond 1 +- `tolerance` with its interval."""
        if self.interval is None:
            return "not distinguishable"
        if self.interval.high < 1 - tolerance:
            return "faster"
        return "slower" if self.interval.low > 1 + tolerance else "not distinguishable"


def median_interval(rounds: Rounds) -> Interval | None:
    """Interval of the median over all steps; None for fewer than two rounds."""
    if len(rounds) < 2:
        return None
    return _interval(_pooled_median(rounds), _drawn_values(rounds, _pooled_median), len(rounds))


def median_ratio(candidate: Rounds, reference: Rounds, *, paired: bool) -> Ratio:
    """Median of all steps of `candidate` over that of `reference`.

    `paired`: round i of both ran in round i of one run, so that what slows a whole round down cancels out; rounds are
    then drawn together, and must be equally many.
    """
    value = _pooled_median(candidate) / _pooled_median(reference)
    if min(len(candidate), len(reference)) < 2:
        return Ratio(value=value, interval=None)
    if paired:
        assert len(candidate) == len(reference), (len(candidate), len(reference))
        drawn = _drawn_values(list(zip(candidate, reference, strict=True)), _ratio_of_pairs)
    else:
        ours, theirs = _drawn_values(candidate, _pooled_median), _drawn_values(reference, _pooled_median)
        generator = random.Random(_SEED)  # noqa: S311 - draws of a bootstrap
        drawn = [generator.choice(ours) / generator.choice(theirs) for _ in range(DRAWS)]
    return Ratio(value=value, interval=_interval(value, drawn, min(len(candidate), len(reference))))


def _pooled_median(rounds: Rounds) -> float:
    return statistics.median(itertools.chain.from_iterable(rounds))


def _ratio_of_pairs(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    return _pooled_median([one for one, _ in pairs]) / _pooled_median([other for _, other in pairs])


def _drawn_values(rounds: Sequence[_T], value: Callable[[Sequence[_T]], float]) -> list[float]:
    """`value` of as many rounds with replacement, again and again: of every combination once, or of DRAWS of them.

    The order of rounds does not change their value, so that of each choice is computed once, and stands in the list as
    often as the choice can be ordered.
    """
    if len(rounds) > _ALL_COMBINATIONS_UP_TO:
        generator = random.Random(_SEED)  # noqa: S311 - draws of a bootstrap
        return [value(generator.choices(rounds, k=len(rounds))) for _ in range(DRAWS)]
    values = []
    for chosen in itertools.combinations_with_replacement(range(len(rounds)), len(rounds)):
        repeats = (chosen.count(place) for place in set(chosen))
        orders = math.factorial(len(chosen)) // math.prod(map(math.factorial, repeats))
        values += [value([rounds[place] for place in chosen])] * orders
    return values


def _interval(value: float, drawn: Iterable[float], rounds: int) -> Interval:
    """The percentiles of what was drawn, widened for few rounds; on a logarithmic scale, since times are positive."""
    deviations = sorted(math.log(one / value) for one in drawn)
    tail = (1 - CONFIDENCE) / 2
    wider = _student(rounds - 1) / _NORMAL * math.sqrt(rounds / (rounds - 1))
    low, high = _percentile(deviations, tail), _percentile(deviations, 1 - tail)
    return Interval(low=value * math.exp(wider * min(low, 0.0)), high=value * math.exp(wider * max(high, 0.0)))


def _percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values, with linear interpolation."""
    place = share * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


_NORMAL = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 97.5%, for 1 to 10 degrees


def _student(degrees: int) -> float:
    """The 97.5% point of Student's t; beyond the table by Cornish and Fisher's expansion, exact to 0.1%."""
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
