"""Intervals of medians and of their ratios, from rounds: how much of a difference is more than noise.

There is an interval from ROUNDS_FOR_INTERVAL rounds on, and "beyond the noise" is said only with one. Of two rounds the
two values are shown: as ends of an interval that should hold 95% they would hold the true value far less often.

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
from typing import Literal, NamedTuple, TypeVar

CONFIDENCE = 0.95
ROUNDS_FOR_INTERVAL = 3
_TOO_WIDE = 10.0  # upper end over lower: such an interval says only that nothing is known
DRAWS = 2000  # of rounds, where there are too many combinations to take each once
_ALL_COMBINATIONS_UP_TO = 5  # rounds: 5 ** 5 = 3125
_SEED = 20250924  # the same records give the same interval

_T = TypeVar("_T")

Rounds = Sequence[Sequence[float]]  # measured values, one sequence per round
Verdict = Literal["faster", "slower", "faster in both rounds", "slower in both rounds", "not distinguishable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """95% of such intervals hold the true value."""

    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float]:
        """The lower and the upper end."""
        return self.low, self.high

    @property
    def too_wide(self) -> bool:
        """Whether it is so wide that its ends are not worth a number, and no axis should hold them."""
        return self.high > _TOO_WIDE * self.low

    def scaled(self, factor: float) -> Interval:
        """The interval of `factor` times the value."""
        return Interval(low=factor * self.low, high=factor * self.high)

    def inverse_times(self, factor: float) -> Interval:
        """The interval of `factor` over the value, as a speed's from that of a time."""
        return Interval(low=factor / self.high, high=factor / self.low)


class TwoRounds(NamedTuple):
    """What each of two rounds gave, which is shown in the place of an interval."""

    first: float
    second: float

    @property
    def ends(self) -> tuple[float, float]:
        """The smaller and the larger value."""
        return min(self), max(self)

    def scaled(self, factor: float) -> TwoRounds:
        """`factor` times each."""
        return TwoRounds(factor * self.first, factor * self.second)

    def inverse_times(self, factor: float) -> TwoRounds:
        """`factor` over each."""
        return TwoRounds(factor / self.first, factor / self.second)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """A ratio of two medians; without an interval where a side has fewer than ROUNDS_FOR_INTERVAL rounds.

    `by_round`: where a side has two rounds, the ratio of each pair of rounds, or, of rounds that are no pairs, the
    smallest and the largest ratio of a round of each side.
    """

    value: float
    interval: Interval | None
    by_round: TwoRounds | None = None

    @property
    def spread(self) -> Interval | TwoRounds | None:
        """The interval, or what two rounds gave; None with a single round."""
        return self.interval or self.by_round

    def verdict(self, tolerance: float = 0.0) -> Verdict:
        """Of a ratio of times (candidate over reference): whether it lies beyond 1 +- `tolerance` with its interval,
        or in both of two rounds, which is no statement about the noise."""
        if self.by_round is not None:
            if max(self.by_round) < 1 - tolerance:
                return "faster in both rounds"
            return "slower in both rounds" if min(self.by_round) > 1 + tolerance else "not distinguishable"
        if self.interval is None:
            return "not distinguishable"
        if self.interval.high < 1 - tolerance:
            return "faster"
        return "slower" if self.interval.low > 1 + tolerance else "not distinguishable"


def median_interval(rounds: Rounds) -> Interval | None:
    """Interval of the median over all steps; None for fewer than ROUNDS_FOR_INTERVAL rounds."""
    if len(rounds) < ROUNDS_FOR_INTERVAL:
        return None
    return _interval(_pooled_median(rounds), _drawn_values(rounds, _pooled_median), len(rounds))


def medians_of_two(rounds: Rounds) -> TwoRounds | None:
    """The median of each of two rounds; None for another number of them."""
    return TwoRounds(*map(statistics.median, rounds)) if len(rounds) == 2 else None


def median_ratio(candidate: Rounds, reference: Rounds, *, paired: bool) -> Ratio:
    """Median of all steps of `candidate` over that of `reference`.

    `paired`: round i of both ran in round i of one run, so that what slows a whole round down cancels out; rounds are
    then drawn together, and must be equally many.
    """
    value = _pooled_median(candidate) / _pooled_median(reference)
    assert not paired or len(candidate) == len(reference), (len(candidate), len(reference))
    fewest = min(len(candidate), len(reference))
    if fewest < ROUNDS_FOR_INTERVAL:
        return Ratio(
            value=value, interval=None, by_round=_by_round(candidate, reference, paired) if fewest == 2 else None
        )
    if paired:
        drawn = _drawn_values(list(zip(candidate, reference, strict=True)), _ratio_of_pairs)
    else:
        ours, theirs = _drawn_values(candidate, _pooled_median), _drawn_values(reference, _pooled_median)
        generator = random.Random(_SEED)  # noqa: S311 - draws of a bootstrap
        drawn = [generator.choice(ours) / generator.choice(theirs) for _ in range(DRAWS)]
    return Ratio(value=value, interval=_interval(value, drawn, fewest))


def _by_round(candidate: Rounds, reference: Rounds, paired: bool) -> TwoRounds:
    ours, theirs = (list(map(statistics.median, rounds)) for rounds in (candidate, reference))
    if paired:
        return TwoRounds(*(one / other for one, other in zip(ours, theirs, strict=True)))
    return TwoRounds(min(ours) / max(theirs), max(ours) / min(theirs))


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
