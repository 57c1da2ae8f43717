"""Digits of a number: those that its interval supports, and never an interval that excludes 1 shown as reaching it."""

from __future__ import annotations

import pytest

from harness.metrics.intervals import Interval, TwoRounds
from harness.report.digits import MeasuredNumber, ratio_spread_text, ratio_text, spread_text, supported
from harness.report.results import cell


def between(low: float, high: float) -> Interval:
    return Interval(low=low, high=high)


@pytest.mark.parametrize(
    ("value", "spread", "text"),
    [
        (17023.0, between(16968, 17144), "17,000"),
        (17023.0, between(17021, 17025), "17,020"),  # four digits are enough
        (162229.0, TwoRounds(161820, 162637), "162,200"),
        (0.012345, between(0.0121, 0.0126), "0.0123"),
        (99.96, None, "100"),
        (12.345, None, "12.3"),
        (1234567.8, None, "1,230,000"),
        (0.0, None, "0"),
        (7.0, between(1.0, 60.0), "7.0"),  # however wide, two digits
        (7.5e-7, None, "7.5e-07"),
        (5.0, between(5.0, 5.0), "5.000"),
    ],
)
def test_a_number_has_the_digits_that_its_interval_supports(value, spread, text) -> None:
    assert supported()(MeasuredNumber(value, spread)) == text


def test_a_scale_moves_the_digits_and_files_keep_all_of_them() -> None:
    seconds = MeasuredNumber(0.208123456, between(0.2070, 0.2092))
    assert supported(1e3)(seconds) == "208"
    assert cell(seconds) == "0.208123456"
    assert seconds * 2 == pytest.approx(0.416246912)


@pytest.mark.parametrize(
    ("value", "spread", "ratio", "text"),
    [
        (1.1563, between(1.144, 1.168), "1.16", "1.14 to 1.17"),
        (1.0031, between(1.0020, 1.0060), "1.003", "1.002 to 1.006"),
        (1.0120, between(1.0004, 1.0240), "1.0120", "1.0004 to 1.0240"),  # excludes 1, and is seen to
        (1.002, between(0.98, 1.02), "1.00", "0.98 to 1.02"),
        (1.09, TwoRounds(1.1001, 1.0799), "1.09", "1.10 and 1.08"),
        (1.5, between(0.1, 30.0), "1.5", "too wide"),
    ],
)
def test_a_ratio_and_its_interval_have_the_same_digits(value, spread, ratio, text) -> None:
    assert ratio_text(value, spread) == ratio
    assert ratio_spread_text(spread) == text


def test_a_ratio_without_an_interval_has_a_digit_more_near_1() -> None:
    assert (ratio_text(1.16), ratio_text(1.03), ratio_text(0.97)) == ("1.16", "1.030", "0.970")


def test_a_form_that_is_given_is_used() -> None:
    assert spread_text(between(1.0, 2.0), "{:.3f}".format) == "1.000 to 2.000"
