"""Points of figures: whiskers, pooling, traded memory, traced steps, and many records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.text import Text

from engine.settings import Checkpoint
from harness.records.record import Record
from harness.report.drawing.looks import MAX_SERIES, method_colour
from harness.report.drawing.points import MAX_GROUPS, MAX_PANELS, Point, groups_of, laid_out
from harness.report.figures import all_figures
from harness.report.results import Row, rows_of
from tests.harness.synthetic_records import H200, in_rounds, levers, record, traced, with_memory


def said(figure: Figure) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.findobj(Text)).split())


def point_of(*records: Record) -> Point:
    return Point(series="", seq_len=1024, rows=rows_of(records))


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
def test_a_whisker_that_the_axis_does_not_follow_is_clipped_and_says_too_wide(lengths: int) -> None:
    draw = all_figures()["throughput"].draw
    sizes = [1024 << power for power in range(lengths)]
    calm = [record(method="ring", seq_len=size) for size in sizes]
    wild = [in_rounds(record(seq_len=size), [0.1], [0.2], [4.0]) for size in sizes]
    figure = draw(rows_of([*calm, *wild]))
    assert said(figure).count("too wide") == lengths
    values = [row["tokens_per_gpu_per_second"] for row in rows_of([*calm, *wild])]
    assert figure.axes[0].get_ylim()[1] < 2 * max(values)
    assert "too wide" not in said(draw(rows_of(calm)))


def test_of_several_trials_at_a_point_it_is_their_range() -> None:
    point = point_of(*(record(seed=seed, seconds=seconds) for seed, seconds in enumerate((0.1, 0.2, 0.4))))
    values = sorted(row["step_seconds_median"] for row in point.rows)
    assert point.value("step_seconds_median") == values[1]
    assert point.whisker("step_seconds_median") == (values[0], values[2])


def test_the_footer_says_which_whiskers_were_drawn() -> None:
    draw = all_figures()["throughput"].draw
    rounds = [in_rounds(record(method=method), [0.2, 0.21], [0.22, 0.23], [0.2, 0.2]) for method in ("burst", "ring")]
    two = [in_rounds(record(method=method), [0.2, 0.21], [0.22, 0.23]) for method in ("burst", "ring")]
    assert "Whiskers: both values of two rounds." in said(draw(rows_of(two)))
    assert "Whiskers: 95% interval of the median over rounds." in said(draw(rows_of(rounds)))
    assert "in 3 rounds" in said(draw(rows_of(rounds)))
    one = rows_of([record(), record(method="ring")])
    assert "Whiskers: interquartile range of the measured steps." in said(draw(one))
    assert "in one round" in said(draw(one))
    mixed = rows_of([rounds[0], record(method="ring")])
    assert "interquartile range of the measured steps where there is one round" in said(draw(mixed))
    seeds = rows_of([record(seed=seed, method=method) for seed in (0, 1) for method in ("burst", "ring")])
    assert "Whiskers: range of the trials at a point." in said(draw(seeds))


def test_memory_against_time_marks_the_frontier_and_nothing_else() -> None:
    figure = all_figures()["memory_time"].draw(rows_of(levers()))
    [ax] = figure.axes
    [ring] = [line for line in ax.get_lines() if line.get_markersize() == 10]
    assert sorted(ring.get_xdata()) == [10, 15, 20]  # 16 GiB at 1.4 s is beaten by 15 GiB at 1.2 s
    assert "Pareto frontier" in said(figure)


def test_a_sweep_of_one_number_is_one_line_with_its_values() -> None:
    tails = (0.0, 0.5, 1.0)
    rows = rows_of([with_memory(10 + 4 * tail, 2 - tail, checkpoint=Checkpoint(every=1, tail=tail)) for tail in tails])
    [ax] = all_figures()["memory_time"].draw(rows).axes
    assert [10, 12, 14] in [list(line.get_xdata()) for line in ax.get_lines()]
    assert [text.get_text() for text in ax.texts] == ["tail 0.0", "tail 0.5", "tail 1.0"]


def test_over_several_lengths_a_line_joins_each_configuration() -> None:
    configurations: list[tuple[float, Callable[[int], Record]]] = [
        (1.0, lambda length: with_memory(length / 1024, length / 1024, seq_len=length)),
        (0.6, lambda length: with_memory(0.6 * length / 1024, 1.1 * length / 1024, seq_len=length, mlp_tiles=8)),
        (0.5, lambda length: with_memory(0.5 * length / 1024, 1.3 * length / 1024, seq_len=length, mlp_tiles=16)),
    ]
    rows = rows_of([make(length) for _, make in configurations for length in (8192, 16384, 32768)])
    drawing = all_figures()["memory_time"]
    assert drawing.applies(rows)
    [ax] = drawing.draw(rows).axes
    lines = {tuple(round(x, 2) for x in line.get_xdata()) for line in ax.get_lines()}
    for share, _ in configurations:
        assert tuple(round(share * gib, 2) for gib in (8, 16, 32)) in lines


def test_equal_memory_is_no_choice() -> None:
    drawing = all_figures()["memory_time"]
    assert not drawing.applies(rows_of([with_memory(20, 1 + n, mlp_tiles=2**n) for n in range(4)]))
    assert not drawing.applies(rows_of([with_memory(20 + n, 1, task="attention", mlp_tiles=2**n) for n in range(4)]))


def test_the_categories_of_a_traced_step_add_up_to_it() -> None:
    rows = rows_of([traced(2.0), traced(3.0, method="ring")])
    figure = all_figures()["time_breakdown"].draw(rows)
    absolute, shares = figure.axes
    for ax, totals in ((absolute, [2.0, 3.0]), (shares, [100, 100])):
        widths = [0.0, 0.0]
        for patch in ax.patches:
            widths[round(patch.get_y() + patch.get_height() / 2)] += patch.get_width()
        assert widths == pytest.approx(totals)
    assert "attention backward" in said(figure)
    assert "optimizer" not in said(figure)  # took no time


def test_one_traced_step_is_a_bar_for_each_category() -> None:
    figure = all_figures()["time_breakdown"].draw(rows_of([traced(2.0, seq_len=2048)]))
    [ax] = figure.axes
    assert sorted(patch.get_width() for patch in ax.patches) == pytest.approx([0.002, 0.098, 0.4, 0.6, 0.9])
    assert "2.00 s at 2k" in said(figure)
    assert "0.900 s · 45.0%" in said(figure)


def test_masks_share_a_figure_from_three_on() -> None:
    def rows(*masks: str) -> list[Row]:
        return rows_of(
            [record(task="attention", mask=mask, kernel=kernel) for mask in masks for kernel in ("cpu", "reference")]
        )

    assert len(groups_of(rows("causal", "full"))) == 2
    [group] = groups_of(rows("causal", "full", "sliding_window:15"))
    figure = all_figures()["attention_speed"].draw(group)
    assert {ax.get_title() for ax in figure.axes} == {"causal", "full", "sliding_window:15"}
    assert "3 masks" in said(figure)


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
        changes = {
            "seed": round_trip,
            "mlp_tiles": 1 + round_trip,
            "world_size": row["cp_size"] * (1 + round_trip % 8),
        }
        rows.append({**row, **changes})
    return rows


def drawn(figure: Figure) -> list[Artist]:
    return [artist for ax in figure.axes for artist in (*ax.lines, *ax.patches, *ax.collections, *ax.texts)]


def test_ten_thousand_trials_make_figures_of_a_readable_size() -> None:
    """Counted, not timed: what is drawn depends on series, panels and lengths, not on the number of records."""
    rows = many_rows(10_000)
    sizes = {}
    for name, drawing in all_figures().items():
        if drawing.applies(rows):
            figure = drawing.draw(rows)
            sizes[name] = (len([ax for ax in figure.axes if ax.get_visible()]), len(drawn(figure)))
            assert "results.csv has every trial" in said(figure), name
    assert {"throughput", "mfu", "loss", "peak_memory"} <= set(sizes)
    assert max(panels for panels, _ in sizes.values()) <= MAX_PANELS
    assert max(artists for _, artists in sizes.values()) <= MAX_PANELS * MAX_SERIES * 6, sizes
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
    assert "18 more set-ups" in said(all_figures()["throughput"].draw(groups[0]))
