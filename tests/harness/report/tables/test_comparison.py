"""Methods at equal points: each beside the best other one, with an interval and a verdict where there are rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.records.record import Record
from harness.report.results import rows_of
from harness.report.speedup import rounds_of, speedup
from harness.report.tables.comparison import comparison_table
from harness.report.tables.table import to_csv
from harness.report.tables.trials import CPU_TIMES, results_table
from tests.harness.report.tables.test_report_tables import as_dicts
from tests.harness.synthetic_records import H200, around, cpu_sweep, gpu_sweep, record


def compared(*records, baseline=None):
    table = comparison_table(rows_of(records), baseline)
    assert table is not None
    return as_dicts(table), table


def test_ours_is_put_beside_every_other_method_the_fastest_first() -> None:
    trials = [record(method=method, rounds=around(seconds)) for method, seconds in
              (("burst", 0.1), ("megatron_cp", 0.3), ("ulysses", 0.15), ("ring", 0.4))]  # fmt: skip
    lines, table = compared(*trials)
    assert [line["beside"] for line in lines] == ["ulysses", "megatron_cp", "ring"]
    assert {line["method"] for line in lines} == {"burst"}
    assert lines[0]["times as fast"] == pytest.approx(1.5, rel=0.02)
    assert lines[0]["interval"].low <= lines[0]["times as fast"] <= lines[0]["interval"].high
    assert lines[0]["verdict"] == "faster"
    assert table.title == "Methods at equal settings"


def test_the_order_of_the_others_is_that_of_every_point() -> None:
    trials = []
    for seq_len, seconds in ((1024, (0.1, 0.2, 0.3)), (2048, (0.1, 0.3, 0.2))):
        trials += [record(method=method, seq_len=seq_len, seconds=one)
                   for method, one in zip(("burst", "ring", "ulysses"), seconds, strict=True)]  # fmt: skip
    lines, _ = compared(*trials)
    assert [line["beside"] for line in lines] == ["ring", "ulysses", "ulysses", "ring"]


def test_without_ours_the_best_method_is_put_beside_the_others() -> None:
    trials = [record(method="ulysses", seconds=0.2), record(method="ring", seconds=0.1),
              record(method="megatron_cp", seconds=0.4), record(status="oom")]  # fmt: skip
    lines, _ = compared(*trials)
    assert {line["method"] for line in lines} == {"ring"}
    assert [line["beside"] for line in lines] == ["ulysses", "megatron_cp", "burst"]
    assert lines[0]["times as fast"] == pytest.approx(2.0)
    assert lines[2]["tok/s/rank beside"] == "oom"
    assert lines[2]["verdict"] is None


def test_with_one_round_there_is_a_ratio_and_no_interval_and_the_table_says_why() -> None:
    [line], table = compared(record(seconds=0.1), record(method="ring", seconds=0.3))
    assert line["times as fast"] == pytest.approx(3.0)
    assert "interval" not in line
    assert line["verdict"] == "not distinguishable (one round)"
    assert "With fewer than 3 rounds there is no interval" in table.note
    _, table = compared(record(rounds=around(0.1)), record(method="ring", rounds=around(0.3)))
    assert "With fewer than" not in table.note


def test_a_difference_within_the_noise_of_rounds_is_not_distinguishable() -> None:
    ours = [[0.100, 0.101], [0.104, 0.105], [0.098, 0.099]]
    theirs = [[0.102, 0.103], [0.099, 0.100], [0.104, 0.105]]
    [line], _ = compared(record(rounds=ours), record(method="ring", rounds=theirs))
    assert line["verdict"] == "not distinguishable"
    assert line["interval"].low < 1 < line["interval"].high


def test_rounds_of_one_run_are_drawn_in_pairs_where_both_methods_ran_in_the_same_ones() -> None:
    # Round 2 is slow for both: only in pairs are 2% told apart from a round's own 10%.
    ours = [[0.100, 0.1001], [0.110, 0.1101], [0.100, 0.1001], [0.105, 0.1051]]
    theirs = [[1.02 * step for step in steps] for steps in ours]
    [line], _ = compared(record(rounds=ours), record(method="ring", rounds=theirs))
    assert line["verdict"] == "faster"
    [line], _ = compared(record(rounds=ours), record(method="ring", rounds=[*theirs[:3], [], theirs[3]]))
    assert line["verdict"] == "not distinguishable"


def at_hours(trial: Record, *hours: int) -> Record:
    """The trial with rounds that started at these hours."""
    starts = [f"2026-01-02T{hour:02}:00:00+00:00" if hour else "" for hour in hours]
    rounds = [replace(one, started_at=start) for one, start in zip(trial.rounds, starts, strict=True)]
    return replace(trial, rounds=rounds)


@pytest.mark.parametrize(
    ("ours", "theirs", "together"),
    [
        ((1, 3, 5), (2, 4, 6), True),
        ((2, 3, 6), (1, 4, 5), True),  # each round in an order of its own
        ((1, 1, 1), (1, 1, 1), True),  # rounds shorter than what the clock tells
        ((1, 3, 15), (2, 4, 16), True),  # resumed between rounds, or a round added
        ((1, 3, 15), (2, 14, 16), True),  # resumed within the second one
        ((1, 7, 5), (2, 8, 6), True),  # both ran their second round again
        ((0, 0, 0), (7, 8, 9), True),  # no record of when
        ((1, 3, 5), (7, 8, 9), False),  # one side ran again
        ((7, 8, 9), (1, 3, 5), False),
        ((1, 3, 5), (2, 7, 6), False),  # of one side the second round alone
    ],
)
def test_rounds_are_pairs_only_where_both_sides_ran_them_together(ours, theirs, together) -> None:
    one, other = record(rounds=around(0.1)), record(method="ring", rounds=around(0.3))
    found = speedup(rows_of([at_hours(one, *ours)]), rows_of([at_hours(other, *theirs)]))
    assert found is not None
    assert (found.paired, found.later) == (together, not together)
    assert found.text == ("faster" if together else "faster; one side ran later")


def test_a_seed_that_was_added_later_was_measured_in_pairs_too() -> None:
    hours = {("burst", 0): (1, 3), ("ring", 0): (2, 4), ("burst", 1): (5, 7), ("ring", 1): (6, 8)}
    rounds = [[0.1], [0.2]]
    rows = {key: rows_of([at_hours(record(method=key[0], seed=key[1], rounds=rounds), *hours[key])]) for key in hours}
    together = speedup([*rows["burst", 0], *rows["burst", 1]], [*rows["ring", 0], *rows["ring", 1]])
    assert together is not None
    assert together.paired
    alone = speedup([*rows["burst", 0], *rows["burst", 1]], rows["ring", 0])
    assert alone is not None
    assert alone.later


def test_a_baseline_that_is_named_is_what_every_other_method_is_put_beside() -> None:
    trials = [record(seconds=0.1), record(method="megatron_cp", seconds=0.3), record(method="ulysses", seconds=0.2)]
    lines, table = compared(*trials, baseline="megatron_cp")
    assert [(line["method"], line["beside"]) for line in lines] == [
        ("burst", "megatron_cp"),
        ("ulysses", "megatron_cp"),
    ]
    assert [line["times as fast"] for line in lines] == pytest.approx([3.0, 1.5])
    assert table.title == "Methods against megatron_cp"
    lines, _ = compared(*trials, baseline="a method of another run")
    assert [line["beside"] for line in lines] == ["ulysses", "megatron_cp"]


def test_no_ratio_is_formed_across_runs_or_settings_or_with_itself() -> None:
    other = record(method="megatron_cp")
    assert comparison_table([*rows_of([record()], run="a"), *rows_of([other], run="b")]) is None
    assert comparison_table(rows_of([record(schedule="ring"), other])) is None
    assert comparison_table(rows_of([record(), record(seq_len=2048), record(seed=1)])) is None


def test_a_point_where_no_method_gave_a_number_is_no_line() -> None:
    assert comparison_table(rows_of([record(status="oom"), record(method="ring", status="oom")])) is None
    [line], _ = compared(record(), record(method="ring", status="oom"))
    assert line["tok/s/rank beside"] == "oom"
    assert not {"times as fast", "verdict"} & line.keys()


def test_seeds_are_pooled_by_their_median() -> None:
    trials = [record(seed=seed, seconds=seconds) for seed, seconds in enumerate((0.1, 0.2, 0.9))]
    [line], _ = compared(*trials, *(record(method="megatron_cp", seed=seed, seconds=0.4) for seed in range(3)))
    assert line["times as fast"] == pytest.approx(2.0)
    assert line["verdict"] == "not distinguishable (one round)"  # seeds of one round shared its clocks


def test_trials_with_other_numbers_of_steps_are_compared() -> None:
    from engine.settings import Steps

    [line], _ = compared(record(steps=Steps(measured=2)), record(method="ring", steps=Steps(measured=7)))
    assert line["beside"] == "ring"


def test_different_commits_in_one_line_are_said() -> None:
    later = record(method="ring")
    later.commit = "fedcba9"
    _, table = compared(record(), later)
    assert "1 point compares records of different commits" in table.note


def test_rounds_keep_their_numbers_where_one_gave_no_figure() -> None:
    [row] = rows_of([record(rounds=[[0.1], [], [0.3, 0.2]])])
    assert rounds_of([row]) == {1: [0.1], 3: [0.3, 0.2]}
    assert rounds_of(rows_of([record(status="oom")])) == {}
    assert speedup([row], rows_of([record(status="oom")])) is None


def test_models_and_masks_tell_lines_apart() -> None:
    trials = [record(method=method, mask=mask) for mask in ("causal", "full") for method in ("burst", "ring")]
    lines, _ = compared(*trials)
    assert [line["mask"] for line in lines] == ["causal", "full"]


def test_on_a_cpu_the_table_says_what_its_times_do_not_tell() -> None:
    table = compared(*cpu_sweep())[1]
    assert CPU_TIMES in table.note
    assert "/GPU" not in table.note + "".join(column.header for column in table.columns)
    assert CPU_TIMES not in compared(*gpu_sweep())[1].note


def test_the_table_of_all_trials_has_rounds_and_the_interval_of_the_median() -> None:
    table = results_table(rows_of([record(gpu=H200, rounds=around(0.2)), record(method="ring", gpu=H200)]))
    measured, single = as_dicts(table)
    assert (measured["n"], measured["rounds"], single["rounds"]) == (9, 3, 1)
    low, high = measured["interval ms"].low, measured["interval ms"].high
    assert low < measured["step ms"] < high
    assert single["interval ms"] is None
    texts = dict(zip((column.header for column in table.columns), table.texts()[0], strict=True))
    assert texts["interval ms"] == f"{1e3 * low:.0f} to {1e3 * high:.0f}"
    assert texts["tok/s/GPU"] == "5,100"
    assert f"{low} to {high}" in to_csv(table)
    assert "interval = 95% interval of the median step" in table.note
    assert "No trial has three rounds, so there are no intervals" in results_table(rows_of([record()])).note


def test_two_rounds_are_two_values_in_every_table() -> None:
    trials = [record(gpu=H200, rounds=[[0.2], [0.1]]), record(method="ring", gpu=H200, rounds=[[0.3], [0.2]])]
    [line], table = compared(*trials)
    texts = dict(zip((column.header for column in table.columns), table.texts()[0], strict=True))
    assert texts["interval"] == "1.5 and 2.0"
    assert line["verdict"] == "faster in both rounds"
    every = results_table(rows_of(trials))
    assert as_dicts(every)[0]["interval ms"] == (0.2, 0.1)
    assert "200 and 100" in every.texts()[0]
    assert "0.2 and 0.1" in to_csv(every)


def test_an_interval_too_wide_to_tell_anything_says_so() -> None:
    wild = record(rounds=[[0.1], [0.2], [2.0]])
    _, table = compared(wild, record(method="ring", rounds=around(0.3)))
    assert "too wide" in table.texts()[0]
    assert any("too wide" in line for line in results_table(rows_of([wild])).texts())


def test_a_round_on_two_machines_is_left_out_and_said() -> None:
    rows = rows_of([record(rounds=around(0.1)), record(method="ring", rounds=around(0.2))])
    rows[1]["machines"] = [replace(rows[1]["machines"][0], stated=name) for name in ("", "other", "")]
    found = speedup(rows[:1], rows[1:])
    assert (found.apart, found.rounds) == ((2,), 2)
    assert found.text == "faster in both rounds; round 2 ran on two machines"
    rows[1]["machines"] = [replace(rows[1]["machines"][0], stated="other")] * 3
    nothing_in_common = speedup(rows[:1], rows[1:])
    assert (nothing_in_common.apart, nothing_in_common.rounds) == ((1, 2, 3), 3)


def test_caveats_of_a_row_are_shown_where_there_are_any() -> None:
    several = record(rounds=[[1.0, 1.001], [1.01, 1.0], [1.0, 1.0]])
    assert "caveats" not in {column.header for column in results_table(rows_of([several])).columns}
    rows = rows_of([several, record(method="ring")])
    assert [line["caveats"] for line in as_dicts(results_table(rows))] == [None, "one round"]
