"""What `make test` leaves to `make test-all`: cases that repeat a promise at other sizes, or take long to keep it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """These cases of a parametrised test run in `make test-all` alone. A tuple is one case of several arguments."""
    return [pytest.param(*_values(case), marks=pytest.mark.slow) for case in cases]


def combinations(axes: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrises a test by every combination of values: `{"ranks, nodes": [(4, 2)], "layout": LAYOUTS}`.

    `make test` runs few of them, in which every value of every axis occurs; the others are slow.
    """
    quick = {tuple(number % len(values) for values in axes.values()) for number in range(max(map(len, axes.values())))}
    cases = []
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        chosen = [values[place] for place, values in zip(places, axes.values(), strict=True)]
        marks = () if places in quick else (pytest.mark.slow,)
        cases.append(pytest.param(*itertools.chain.from_iterable(map(_values, chosen)), marks=marks))
    return pytest.mark.parametrize(", ".join(axes), cases)


def _values(case: Any) -> Sequence[Any]:
    return case if isinstance(case, tuple) else (case,)
