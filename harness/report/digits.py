"""How many digits of a number are shown: those that its interval supports.

The last digit shown stands at the largest power of ten that is no wider than the interval: 1.1563 between 1.144 and
1.168 is `1.16`, 17,023 between 16,968 and 17,144 is `17,000`. Without an interval there are three digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from harness.metrics.intervals import Interval, TwoRounds

USUAL, LEAST, MOST = 3, 2, 4  # significant digits: without an interval, with a wide one, with a narrow one
TOO_WIDE = "too wide"

Spread = Interval | TwoRounds | None


class MeasuredNumber(float):
    """A number that knows its interval, or what each of two rounds gave. Files keep all digits, as of any float."""

    spread: Spread

    def __new__(cls, value: float, spread: Spread = None) -> MeasuredNumber:
        made = super().__new__(cls, value)
        made.spread = spread
        return made


def measured(value: float | None, spread: Spread = None) -> MeasuredNumber | None:
    """The number with its interval; None where there is none."""
    return None if value is None else MeasuredNumber(value, spread)


def decimals_of(value: float, spread: Spread = None) -> int:
    """After how many decimals `value` is rounded; negative where tens or hundreds are not supported either."""
    if value == 0:
        return 0
    first = int(f"{value:.{USUAL - 1}e}".split("e")[1])  # after rounding: 99.96 is 1.00e2
    if spread is None:
        return USUAL - 1 - first
    low, high = spread.ends
    supported = -math.floor(math.log10(high - low)) if high > low else MOST
    return min(max(supported, LEAST - 1 - first), MOST - 1 - first)


def rounded(number: float, decimals: int) -> str:
    """`number` rounded to so many decimals, thousands with a comma: 17,000, 1.16, 0.0123; tiny ones as 1.2e-07."""
    number = round(number, decimals) + 0.0  # no -0
    if number and abs(number) < 1e-4:
        return f"{number:.1e}"
    return f"{number:,.{max(0, decimals)}f}"


def supported(scale: float = 1.0) -> Callable[[float], str]:
    """Prints a number x `scale` with the digits that its interval supports."""

    def form(value: float) -> str:
        spread = getattr(value, "spread", None)
        scaled = spread.scaled(scale) if spread is not None else None
        return rounded(value * scale, decimals_of(value * scale, scaled))

    return form


def spread_text(spread: Interval | TwoRounds, form: Callable[[float], str] | None = None) -> str:
    """An interval as `1.02 to 1.05`, what two rounds gave as `1.08 and 1.10`; by default with its own digits."""
    if isinstance(spread, Interval) and spread.too_wide:
        return TOO_WIDE
    if form is None:
        low, high = spread.ends
        decimals = decimals_of((low + high) / 2, spread)

        def form(number: float) -> str:
            return rounded(number, decimals)

    return (
        " and ".join(map(form, spread))
        if isinstance(spread, TwoRounds)
        else f"{form(spread.low)} to {form(spread.high)}"
    )


def ratio_text(value: float, spread: Spread = None) -> str:
    """A ratio such as 1.16; near 1 with a digit more. No end of an interval is rounded on to 1."""
    return rounded(value, _ratio_decimals(value, getattr(value, "spread", None) if spread is None else spread))


def ratio_spread_text(spread: Interval | TwoRounds) -> str:
    """The interval of a ratio with the ratio's digits: `1.14 to 1.17`, never `1.00 to 1.02` for one that excludes 1."""
    low, high = spread.ends
    decimals = _ratio_decimals((low + high) / 2, spread)
    return spread_text(spread, lambda number: rounded(number, decimals))


def _ratio_decimals(value: float, spread: Spread) -> int:
    if spread is None:
        return 2 if abs(value - 1) >= 0.05 else 3
    decimals = decimals_of(value, spread)
    while decimals < MOST and any(end != 1 and round(end, decimals) == 1 for end in spread.ends):
        decimals += 1
    return decimals
