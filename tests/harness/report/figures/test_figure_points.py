"""Points of figures: whiskers, pooling, and many records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.records.record import Record
from harness.report.drawing.looks import MAX_SERIES, method_colour
from harness.report.drawing.points import MAX_GROUPS, MAX_PANELS, SeriesPoint, groups_of, laid_out
from harness.report.drawing.sheet import Sheet
from harness.report.figures import shown_of
from harness.report.figures.by_length import MAX_BARS
from harness.report.results import Row, rows_of
from tests.harness.report.figures.drawn import sheet_of, tips
from tests.harness.synthetic_records import H200, in_rounds, record


def point_of(*records: Record) -> SeriesPoint:
    return SeriesPoint(series="", seq_len=1024, rows=rows_of(records))


def test_a_whisker_is_the_interval_over_rounds_where_there_are_several() -> None:
    point = point_of(in_rounds(record(), [0.20, 0.21], [0.24, 0.22], [0.21, 0.23]))
    [row] = point.rows
    assert point.whisker("step_seconds_median") == (row["step_seconds_low"], row["step_seconds_high"])
    assert point.whisker("tokens_per_gpu_per_second") == pytest.approx(
        (row["tokens_per_gpu_per_second_low"], row["tokens_per_gpu_per_second_high"])
    )


def test_with_one_round_it_is_the_interquartile_range_and_of_one_step_there_is_none() -> None:
    point = point_of(in_rounds(record(), [0.18, 0.20, 0.22]))
    assert point.whisker("step_seconds_median") == pytest.approx((0.19, 0.21))
    assert point_of(in_rounds(record(), [0.2])).whisker("step_seconds_median") is None


def test_of_two_rounds_it_joins_their_values() -> None:
    point = point_of(in_rounds(record(), [0.20], [0.24]))
    assert point.whisker("step_seconds_median") == (0.20, 0.24)


@pytest.mark.parametrize("lengths", [1, 3])  # bars, lines
def test_a_whisker_that_no_axis_should_hold_is_not_drawn(lengths: int) -> None:
    sizes = [1024 << power for power in range(lengths)]
    calm = [record(method="ring", seq_len=size, gpu=H200) for size in sizes]
    wild = [in_rounds(record(seq_len=size, gpu=H200), [0.1], [0.2], [4.0]) for size in sizes]
    marks = tips(sheet_of("speed", rows_of([*calm, *wild])))
    assert [" to " in mark for mark in marks if mark.startswith("burst")] == [False] * lengths
    assert [" to " in mark for mark in marks if mark.startswith("ring")] == [True] * lengths


def test_of_several_trials_at_a_point_it_is_their_range() -> None:
    point = point_of(*(record(seed=seed, seconds=seconds) for seed, seconds in enumerate((0.1, 0.2, 0.4))))
    values = sorted(row["step_seconds_median"] for row in point.rows)
    assert point.value("step_seconds_median") == values[1]
    assert point.whisker("step_seconds_median") == (values[0], values[2])


def test_the_note_says_which_whiskers_were_drawn() -> None:
    def note(records: list[Record]) -> str:
        return sheet_of("speed", rows_of(records)).note

    rounds = [in_rounds(record(method=method), [0.2, 0.21], [0.22, 0.23], [0.2, 0.2]) for method in ("burst", "ring")]
    two = [in_rounds(record(method=method), [0.2, 0.21], [0.22, 0.23]) for method in ("burst", "ring")]
    assert "Whiskers: both values of two rounds." in note(two)
    assert "Whiskers: 95% interval of the median over rounds." in note(rounds)
    assert "in 3 rounds" in note(rounds)
    one = [record(), record(method="ring")]
    assert "Whiskers: interquartile range of the measured steps." in note(one)
    assert "in one round" in note(one)
    assert "interquartile range of the measured steps where there is one round" in note([rounds[0], one[1]])
    seeds = [record(seed=seed, method=method) for seed in (0, 1) for method in ("burst", "ring")]
    assert "Whiskers: range of the trials at a point." in note(seeds)


def many_rows(count: int) -> list[Row]:
    """Rows of a sweep of everything: methods, settings, lengths, sizes, seeds; some without a number."""
    one_of_each = rows_of(
        [
            record(
                method=method, gpu=H200, dtype="bf16", seq_len=1024 * 2**power, cp_size=cp_size, status=status,
                seconds=0.1 * (1 + power),
            )
            for method in ("burst", "ring", "ulysses", "megatron_cp")
            for power in range(8)
            for cp_size in (1, 2, 4, 8, 16)
            for status in ("ok", "ok", "oom")
        ]
    )  # fmt: skip
    rows = []
    for number in range(count):
        row, round_trip = dict(one_of_each[number % len(one_of_each)]), number // len(one_of_each)
        changes = {"seed": round_trip, "mlp_tiles": 1 + round_trip, "world_size": row["cp_size"] * (1 + round_trip % 8)}
        rows.append({**row, **changes})
    return rows


def test_ten_thousand_trials_make_figures_of_a_readable_size() -> None:
    """Counted, not timed: what is drawn depends on series, panels and lengths, not on the number of records."""
    rows = many_rows(10_000)
    shown = {name: one for name, one in shown_of(rows).items() if isinstance(one, Sheet)}
    assert {"speed", "speed_memory"} <= set(shown)
    for name, sheet in shown.items():
        # Of one length and size there are few enough to draw each.
        assert name == "speed_memory" or "results.csv has every trial" in sheet.note, name
        assert len(tips(sheet)) <= MAX_BARS, name
    layout = laid_out(rows)
    assert len(layout.looks) <= MAX_SERIES
    assert any("Pooled over mlp_tiles (" in note for note in layout.notes)
    assert any(f"{MAX_PANELS} of" in note for note in layout.notes)


def test_methods_stay_apart_when_settings_are_pooled() -> None:
    methods = ("burst", "ring", "ulysses", "megatron_cp")
    assert {look.colour for look in laid_out(many_rows(2_000)).looks.values()} == set(map(method_colour, methods))


def test_of_many_setups_those_with_the_most_trials_are_drawn() -> None:
    shapes = [replace(record().settings.model, name=f"shape{number:02}") for number in range(30)]
    rows = rows_of(
        [record(model=shape, seq_len=1024 * n) for place, shape in enumerate(shapes) for n in range(1, 3 + place % 2)]
    )
    groups = groups_of(rows)
    assert len(groups) == MAX_GROUPS
    assert {len(group) for group in groups} == {3}
    assert all("18 more set-ups" in group.note for group in groups)
    assert "18 more set-ups" in sheet_of("speed", groups[0]).note
