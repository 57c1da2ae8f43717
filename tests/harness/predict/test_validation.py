"""The prediction beside the published rows: what is fitted, what is held out, and how far off it is."""

from __future__ import annotations

import csv
from collections import Counter

from harness.metrics.hardware import hardware_named
from harness.predict.published_rows import ATTENTION, REFERENCE, TRAINING, configurations, published_times
from harness.predict.speeds import FITTED
from harness.predict.validation import FIT, HELD_OUT, SPLIT_FILE, compare, median_error, side_of, split
from harness.predict.validation_table import BEGIN, END, PAGE, TABLE_FILE, summary, table_rows


def test_every_published_time_is_a_configuration_or_says_why_not() -> None:
    with REFERENCE.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] in (TRAINING, *ATTENTION) and row["value"]]
    found = published_times()
    assert len(found) == len(rows)
    assert all((row.configuration is None) == bool(row.reason) for row in found)
    left_out = Counter(row.reason for row in found if row.reason)
    assert sum(left_out.values()) < 0.2 * len(found), left_out


def test_the_committed_split_lists_every_configuration_once_on_the_side_that_its_hash_says() -> None:
    with SPLIT_FILE.open(encoding="utf-8", newline="") as file:
        listed = list(csv.DictReader(file))
    names = [row["configuration"] for row in listed]
    assert sorted(names) == sorted(configuration.name for configuration, _ in configurations())
    assert all(row["side"] == side_of(row["configuration"]) for row in listed)
    assert split().keys() == set(names)
    share = Counter(row["side"] for row in listed)[FIT] / len(listed)
    assert 0.4 < share < 0.6


def test_eight_constants_of_the_gpu_type_are_fitted_and_none_of_a_method() -> None:
    assert len(FITTED) == 8
    a800 = hardware_named("a800")
    assert set(FITTED) <= set(a800.speeds)
    assert "fitted" in a800.sources["speeds"]


def test_held_out_configurations_are_predicted_within_the_aims() -> None:
    held_out = [row for row in compare() if row.side == HELD_OUT]
    end_to_end = [row for row in held_out if row.end_to_end]
    assert len(end_to_end) >= 20
    assert median_error(end_to_end) < 0.10
    others = [row for row in held_out if not row.end_to_end]
    assert len(others) >= 60
    assert median_error(others) < 0.20


def test_the_committed_table_is_what_the_prediction_gives_today() -> None:
    with TABLE_FILE.open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == table_rows()
    assert PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip() == summary()
