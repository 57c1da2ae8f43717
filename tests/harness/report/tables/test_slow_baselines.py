"""Native baselines below 0.97 of their originals' speed are marked in every table, figure and sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baselines.originals import ORIGINALS
from harness.metrics.intervals import Interval
from harness.records.record import Record, write_record
from harness.report.drawing.points import laid_out
from harness.report.headline import headline_of
from harness.report.page import figures_of, read_runs, report_tables, write_report
from harness.report.rankings import rankings_of
from harness.report.results import METHOD_ORDER, rows_of
from harness.report.speedup import LEAST, MARK, slow_baselines, slow_sentence
from harness.report.tables.table import to_latex
from harness.report.tables.trials import terminal_table
from harness.spec.methods import all_methods
from tests.harness.report.figures.drawn import texts
from tests.harness.synthetic_records import H200, LARGE, around, record


def trial(method: str, seconds: float, rounds: int = 3, **changes: Any) -> Record:
    """A measured trial on GPUs, of `rounds` rounds around `seconds`."""
    values: dict[str, Any] = {"model": LARGE, "dtype": "bf16", "gpu": H200, "cp_size": 4, "seq_len": 65536}
    return record(method=method, seconds=seconds, rounds=around(seconds, rounds), **values | changes)


def pair(seconds: float, **changes: Any) -> list[Record]:
    """`megatron_cp` at this time beside Megatron-LM itself at one second; `burst` is faster than both."""
    return [
        trial("burst", 0.8, **changes),
        trial("megatron_cp", seconds, **changes),
        trial("megatron_lm_upstream", 1.0, **changes),
    ]


def weak_methods(records: list[Record]) -> set[str]:
    rows = rows_of(records)
    weak = slow_baselines(rows)
    return {row["method"] for row in rows if id(row) in weak}


def test_every_native_form_with_a_real_system_names_registered_originals() -> None:
    methods = all_methods()
    natives = {name for name in methods if not name.endswith("_upstream")}
    assert natives - {"ring", "flash_attn", "flash_linear_attention"} <= set(ORIGINALS) <= natives | set(METHOD_ORDER)
    originals = {original.method for listed in ORIGINALS.values() for original in listed}
    assert originals <= {name for name in methods if name.endswith("_upstream")}


def test_a_form_slower_than_its_original_is_weak_with_its_ratio_and_interval() -> None:
    rows = rows_of(pair(1.25))
    weak = slow_baselines(rows)
    [form] = {id(form): form for form in weak.values()}.values()
    assert (form.native, form.original, round(form.found.value, 3)) == ("megatron_cp", "megatron_lm_upstream", 0.8)
    assert isinstance(form.found.spread, Interval)
    assert form.found.spread.low <= 0.8 <= form.found.spread.high
    assert re.fullmatch(
        r"† Native baseline below 0\.97 of its original's speed: megatron_cp 0\.80× \(0\.\d+ to 0\.\d+\) of "
        r"megatron_lm_upstream at 64k tokens, CP 4\.",
        slow_sentence(weak.values()),
        re.IGNORECASE,
    )


@pytest.mark.parametrize(("seconds", "weak"), [(1 / (LEAST - 0.005), True), (1 / (LEAST + 0.005), False), (0.5, False)])
def test_the_mark_begins_below_the_limit(seconds: float, weak: bool) -> None:
    assert weak_methods(pair(seconds)) == ({"megatron_cp"} if weak else set())


def test_one_round_is_marked_and_says_that_it_has_no_interval() -> None:
    rows = rows_of([trial("megatron_cp", 1.25, rounds=1), trial("megatron_lm_upstream", 1.0, rounds=1)])
    assert "0.80× (one round, no interval)" in slow_sentence(slow_baselines(rows).values())


@pytest.mark.parametrize(
    "change",
    [
        {"gradient_accumulation": 2},
        {"seq_len": 32768},
        {"cp_size": 2},
        {"experiment": "another"},
        {"settings": "tuned"},
    ],
)
def test_only_equal_settings_of_one_run_are_compared(change: dict[str, Any]) -> None:
    assert weak_methods([trial("megatron_cp", 1.25), trial("megatron_lm_upstream", 1.0, **change)]) == set()


def test_different_runs_are_not_compared() -> None:
    native, original = trial("megatron_cp", 1.25), trial("megatron_lm_upstream", 1.0)
    assert slow_baselines([*rows_of([native], "one"), *rows_of([original], "other")]) == {}


def test_times_on_a_cpu_mark_nothing() -> None:
    assert weak_methods([trial("megatron_cp", 1.25, gpu=""), trial("megatron_lm_upstream", 1.0, gpu="")]) == set()


def test_an_original_without_a_number_marks_nothing() -> None:
    lost = record(
        method="megatron_lm_upstream", status="oom", model=LARGE, dtype="bf16", gpu=H200, cp_size=4, seq_len=65536
    )
    assert weak_methods([trial("megatron_cp", 1.25), lost]) == set()


def test_both_set_ups_as_published_are_compared_although_values_differ() -> None:
    native = replace(
        trial("megatron_cp", 1.25, settings="as_published", lm_head_fusion=False),
        settings_from_table=["lm_head_fusion"],
    )
    assert weak_methods([native, trial("megatron_lm_upstream", 1.0, settings="as_published")]) == {"megatron_cp"}


@pytest.mark.parametrize(
    ("native", "schedule", "weak"),
    [
        ("loongtrain_double_ring", "double_ring", True),
        ("loongtrain_double_ring", "auto", True),
        ("loongtrain_double_ring", "usp", False),
        ("loongtrain_usp", "usp", True),
        ("loongtrain_usp", "double_ring", False),
    ],
)
def test_a_schedule_of_the_original_says_which_form_it_is(native: str, schedule: str, weak: bool) -> None:
    records = [trial(native, 1.25), trial("internevo_upstream", 1.0, schedule=schedule)]
    assert (weak_methods(records) == {native}) is weak


def test_every_table_with_the_form_marks_it_and_says_what_the_mark_means() -> None:
    rows = rows_of([*pair(1.25), *pair(2.5, seq_len=131072)])
    tables = {table.name: table for table in report_tables(rows)}
    for table in (tables["results"], tables["comparison"], tables["agreement"]):
        marked = [
            cell for line in table.rows for cell in line if isinstance(cell, str) and cell.startswith("megatron_cp")
        ]
        assert marked, table.name
        assert all(MARK in cell for cell in marked), table.name
        assert "Native baseline below 0.97" in table.note, table.name
    # At 128K the ratio is lower: one sentence for both points.
    assert "megatron_cp 0.40×" in tables["results"].note
    assert "the lowest of 2 points" in tables["results"].note
    assert r"\textdagger{}" in to_latex(tables["results"])


def test_a_form_that_is_the_best_is_marked_there() -> None:
    rows = rows_of([trial("megatron_cp", 1.25), trial("megatron_lm_upstream", 1.0), trial("ulysses", 2.0)])
    assert f"megatron_cp {MARK}" in [series.name for series in rankings_of(rows)[0].compared]


def test_the_comparison_marks_the_form_beside_its_original() -> None:
    comparison = next(table for table in report_tables(rows_of(pair(1.25))) if table.name == "comparison")
    headers = [column.header for column in comparison.columns]
    lines = {line[headers.index("beside")]: line for line in comparison.rows}
    assert {name for name in lines if MARK in name} == {f"megatron_cp {MARK}"}
    assert lines[f"megatron_cp {MARK}"][headers.index("times as fast")] == pytest.approx(1.25**2)  # burst beside it


def test_figures_mark_the_names_of_series_and_explain_it() -> None:
    rows = rows_of([one for seq_len in (32768, 65536, 131072) for one in pair(1.25, seq_len=seq_len)])
    layout = laid_out(rows)
    assert {name for name in layout.looks if MARK in name} == {f"megatron_cp {MARK}"}
    assert any(note.startswith(f"{MARK} Native baseline below") for note in layout.notes)
    plots, _ = figures_of(rows)
    assert plots
    for plot in plots:
        assert f"megatron_cp {MARK}" in texts(plot.figure), plot.name
        assert "Native baseline below 0.97" in plot.figure.note, plot.name


def test_a_strong_form_is_marked_nowhere() -> None:
    rows = rows_of(pair(1.0))
    for table in report_tables(rows):
        assert MARK not in str(table.rows) + table.note
    assert not [name for name in laid_out(rows).looks if MARK in name]
    assert not [sentence for sentence in headline_of(rows).sentences if MARK in sentence]


def test_the_headline_says_the_ratio_of_a_weak_form() -> None:
    records = [trial("burst", 1.5), trial("megatron_cp", 1.25), trial("megatron_lm_upstream", 1.3 * 0.9)]
    told = headline_of(rows_of(records)).sentences
    assert any(sentence.startswith(f"{MARK} Native baseline below 0.97") for sentence in told)


def test_the_page_and_the_terminal_show_the_mark(tmp_path: Path) -> None:
    for one in pair(1.25):
        write_record(tmp_path / "trials" / one.trial_id, one)
    page = write_report([tmp_path], tmp_path / "report", ["html", "md"]).read_text(encoding="utf-8")
    assert f"megatron_cp {MARK}" in page
    assert "of its original&#39;s speed" in page
    assert f"megatron_cp {MARK}" in (tmp_path / "report" / "tables" / "results.md").read_text(encoding="utf-8")
    _, rows = read_runs([tmp_path])
    assert "Native baseline below 0.97" in str(terminal_table(rows).caption)
