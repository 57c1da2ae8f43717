"""Figures: found by file name, every trial in its place, titles no stronger than the intervals, sentences for ties."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import harness.report.figures
from engine.settings import Steps
from harness.records.record import Record
from harness.report.drawing.sheet import Sheet
from harness.report.figures import all_figures, render, shown_of
from harness.report.figures.loss import MAX_CURVES
from harness.report.results import Row, rows_of
from harness.report.variants import setups_of
from tests.harness.report.figures.drawn import SVG, said, sheet_of, texts, tips
from tests.harness.synthetic_records import H200, around, cpu_sweep, gpu_sweep, in_rounds, record, traced, with_memory


def rows_for(records: list[Record], task: str) -> list[Row]:
    [group] = [group for group in setups_of(rows_of(records)) if group[0]["task"] == task]
    return group


def on_gpu(method: str = "burst", seconds: float = 1.0, **changes: object) -> Record:
    return record(method=method, gpu=H200, dtype="bf16", rounds=around(seconds), **changes)  # type: ignore[arg-type]


def apart(*methods: tuple[str, float], lengths: tuple[int, ...] = (1024,)) -> list[Row]:
    """Trials on a GPU in three rounds: seconds by method, growing with the length."""
    return rows_of([on_gpu(name, seconds * n / 1024, seq_len=n) for name, seconds in methods for n in lengths])


def test_every_module_of_the_package_defines_figures_and_no_two_have_one_name() -> None:
    modules = Path(harness.report.figures.__file__).parent.glob("[!_]*.py")
    names = [name for path in modules for name in import_module(f"harness.report.figures.{path.stem}").FIGURES]
    assert sorted(all_figures()) == sorted(names)
    assert set(names) == {"speed", "memory", "bytes_sent", "speed_memory", "loss", "time_breakdown"}


@pytest.mark.parametrize("task", ["train", "attention"])
@pytest.mark.parametrize("sweep", [cpu_sweep, gpu_sweep])
def test_every_figure_explains_itself(sweep: Callable[[], list[Record]], task: str) -> None:
    drawn = {name: shown for name, shown in shown_of(rows_for(sweep(), task)).items() if isinstance(shown, Sheet)}
    assert "speed" in drawn
    for name, sheet in drawn.items():
        assert "n = 3 measured steps" in sheet.note, name
        assert "in one round" in sheet.note, name
        assert "=" in sheet.note or "Median" in sheet.note, name
        assert sheet.title in said(sheet), name
        assert sheet.about in said(sheet), name


def test_on_a_cpu_no_speed_comes_first_and_nothing_says_gpu() -> None:
    for task in ("train", "attention"):
        shown = shown_of(rows_for(cpu_sweep(), task))
        assert list(shown)[-1] == "speed"
        for one in shown.values():
            if isinstance(one, Sheet):
                assert "per GPU" not in said(one).split("Without a number")[0].partition(" = ")[0], one.title
    assert next(iter(shown_of(rows_for(gpu_sweep(), "train")))) == "speed"


def test_peak_and_ceiling_stand_where_a_gpu_has_them_and_nowhere_else() -> None:
    attention = sheet_of("speed", rows_for(gpu_sweep(), "attention"))
    assert "Peak: 989 TFLOP/s" in attention.note
    assert "measured 2026-11-20" in attention.note
    assert "TFLOP/s per GPU" in texts(attention)
    for rows in (rows_for(cpu_sweep(), "attention"), rows_for(gpu_sweep(), "train")):
        assert "eiling" not in sheet_of("speed", rows).note


def test_a_missing_bar_carries_its_status() -> None:
    sheet = sheet_of("speed", rows_for(cpu_sweep(), "train"))
    assert texts(sheet).count("refused") == 1
    assert texts(sheet).count("oom") == 1
    assert len(tips(sheet)) == 16


def test_the_best_bar_stands_first_and_what_has_no_value_last() -> None:
    rows = [
        *apart(("ring", 3.0), ("burst", 1.0), ("ulysses", 2.0)),
        *rows_of([record(method="torch_cp", status="oom", gpu=H200, dtype="bf16")]),
    ]
    order = [text for text in texts(sheet_of("speed", rows)) if text in ("ring", "burst", "ulysses", "torch_cp")]
    assert order == ["burst", "ulysses", "ring", "torch_cp"]


@pytest.mark.parametrize("lengths", [(1024,), (1024, 2048, 4096)])
def test_every_mark_shows_its_name_and_values_on_hover(lengths: tuple[int, ...]) -> None:
    rows = apart(("burst", 1.0), ("ulysses", 2.0), lengths=lengths)
    marks = tips(sheet_of("speed", rows))
    assert len(marks) == len(rows)
    assert all("tokens/s per GPU" in mark and "(" in mark for mark in marks)
    assert {mark.partition(",")[0] for mark in marks} == {"burst", "ulysses"}


def test_three_lengths_make_lines_with_their_names_and_fewer_make_bars() -> None:
    lines = sheet_of("speed", apart(("burst", 1.0), ("ulysses", 2.0), lengths=(1024, 2048, 4096)))
    assert {"1K", "2K", "4K", "burst", "ulysses"} <= set(texts(lines))
    assert texts(lines).count("burst") == 1
    bars = sheet_of("speed", apart(("burst", 1.0), ("ulysses", 2.0), lengths=(1024, 2048)))
    assert texts(bars).count("burst") == 2
    assert {"1K tokens", "2K tokens"} <= set(texts(bars))


def test_a_line_says_where_its_trials_ended_without_a_number() -> None:
    rows = apart(("burst", 1.0), ("ulysses", 2.0), lengths=(1024, 2048, 4096))
    lost = rows_of([record(method="ulysses", gpu=H200, dtype="bf16", seq_len=8192, status="oom")])
    sheet = sheet_of("speed", [*rows, *lost])
    assert "oom" in texts(sheet)
    assert "ulysses: oom" in tips(sheet)
    assert "Without a number: ulysses at 8K (oom)." in sheet.note


# Titles.


@pytest.mark.parametrize(
    ("other", "title"),
    [
        (1.3, "burst is 1.30 times as fast as ulysses, 1K tokens"),
        (0.7, "burst is 0.70 times as fast as ulysses, 1K tokens"),
        (1.0, "no difference between burst and ulysses, 1K tokens"),
    ],
)
def test_a_title_says_what_the_interval_of_the_ratio_allows(other: float, title: str) -> None:
    rows = apart(("burst", 1.0), ("ulysses", other), ("ring", 4.0))
    assert sheet_of("speed", rows).title == f"Training: {title}"


def test_a_title_over_lengths_holds_the_ends_of_all_intervals() -> None:
    fast, slow = apart(("burst", 1.0), ("ulysses", 1.2)), apart(("burst", 2.0), ("ulysses", 2.8))
    for row in slow:
        row["seq_len"] = 2048
    title = sheet_of("speed", [*fast, *slow]).title
    assert title == "Training: burst is 1.20 to 1.40 times as fast as ulysses, 1K to 2K tokens"


def test_without_rounds_a_title_claims_nothing() -> None:
    rows = rows_of(
        [
            record(method=name, seconds=seconds, gpu=H200, dtype="bf16")
            for name, seconds in (("burst", 1.0), ("ulysses", 1.2))
        ]
    )
    assert sheet_of("speed", rows).title == "Training: burst at 1.20 times the speed of ulysses in one round, 1K tokens"


def test_a_title_counts_where_the_winner_changes() -> None:
    ahead, behind = apart(("burst", 1.0), ("ulysses", 1.2)), apart(("burst", 2.0), ("ulysses", 1.8))
    for row in behind:
        row["seq_len"] = 2048
    assert sheet_of("speed", [*ahead, *behind]).title.endswith(
        "faster at 1 and slower at 1 of 2 points, 1K to 2K tokens"
    )


def test_burst_is_never_the_best_other_of_burst() -> None:
    rows = rows_of([on_gpu(seconds=1.0), on_gpu(seconds=1.1, mlp_tiles=8), on_gpu("ulysses", 1.5)])
    assert "as fast as ulysses" in sheet_of("speed", rows).title
    alone = rows_of([on_gpu(seconds=1.0), on_gpu(seconds=1.1, mlp_tiles=8)])
    assert sheet_of("speed", alone).title.startswith(
        "Training: burst, mlp_tiles 1 is 1.10 times as fast as burst, mlp_tiles 8"
    )


# Sentences.


def test_bars_that_are_equal_within_their_intervals_are_one_sentence() -> None:
    noise = {"burst": (1.0, 1.01, 0.99), "ulysses": (1.01, 0.99, 1.0), "ring": (0.99, 1.0, 1.01)}
    rows = rows_of(
        [
            in_rounds(record(method=name, gpu=H200, dtype="bf16"), *([one] for one in each))
            for name, each in noise.items()
        ]
    )
    shown = all_figures()["speed"].draw(rows)
    assert isinstance(shown, str)
    assert shown.startswith("No difference in speed between burst, ring and ulysses: ")
    slower = apart(("megatron_cp", 1.3))
    assert isinstance(all_figures()["speed"].draw([*rows, *slower]), Sheet)


def test_speeds_that_nothing_tells_apart_but_that_differ_are_drawn() -> None:
    wild = [
        in_rounds(record(method=name, gpu=H200, dtype="bf16"), [1.0], [scale], [2.0])
        for name, scale in (("burst", 1.1), ("ring", 1.9))
    ]
    assert isinstance(all_figures()["speed"].draw(rows_of(wild)), Sheet)


def test_equal_memory_and_equal_bytes_are_sentences() -> None:
    rows = rows_of([with_memory(20 + 0.1 * n, 1.0, method=name, cp_size=2) for n, name in enumerate(("burst", "ring"))])
    assert (
        all_figures()["memory"].draw(rows)
        == "All 2 take the same peak memory within 3%: 20.0 to 20.1 GiB per GPU, 1K tokens."
    )
    assert str(all_figures()["bytes_sent"].draw(rows)).startswith(
        "Attention sends 2.00 MiB per GPU and step whatever the method"
    )
    rows[1]["peak_memory_gib"], rows[1]["sent_gib_per_gpu"] = 30.0, rows[1]["sent_gib_per_gpu"] * 2
    assert sheet_of("memory", rows).title == "Peak memory: 20.0 GiB with burst to 30.0 with ring, 1K tokens"
    assert sheet_of("bytes_sent", rows).title == "Attention sends 2.00 times as much with ring as with burst"


def test_loss_curves_that_coincide_are_one_sentence_and_others_a_figure() -> None:
    agreeing = rows_of([record(), record(method="ring", drift=1e-7)])
    shown = all_figures()["loss"].draw(agreeing)
    assert isinstance(shown, str)
    assert shown.startswith("The loss curves of 2 trials coincide: losses and gradient norms differ by at most 1.0e-07")
    sheet = sheet_of("loss", rows_of([record(), record(method="ring", drift=1e-3)]))
    assert sheet.title == "Loss: 1 of 1 trials differ by more than 1e-04, ring by 1.0e-03 relative"
    assert "limit 1e-04" in texts(sheet)
    assert all_figures()["loss"].draw(rows_of([record(seq_len=1024 * n) for n in (1, 2, 4)])) is None


def test_the_name_of_a_curve_stands_beside_its_end() -> None:
    sheet = sheet_of("loss", rows_of([record(steps=Steps(warmup=1, measured=9))]))  # the loss ends at 2.1
    marks = ElementTree.fromstring(render(sheet, "svg")).iter(f"{SVG}text")
    heights = {"".join(mark.itertext()): float(mark.attrib["y"]) for mark in marks}
    assert heights["2.5"] < heights["burst"] < heights["2.0"]  # from the top


def test_of_a_hundred_steps_the_curves_are_drawn_although_they_coincide() -> None:
    for measured in (99, 100):
        steps = Steps(warmup=1, measured=measured)
        pair = [
            record(steps=steps, dtype="bf16", linear_dtype="float8", drift=1e-3),
            record(steps=steps, dtype="bf16"),
            record(dtype="bf16", seq_len=2048),
        ]
        shown = all_figures()["loss"].draw(rows_of(pair))
        words = "The loss curves of 2 trials coincide: losses differ by at most 1.0e-03 relative (bf16, 1K tokens)."
        if measured < 100:
            assert shown == words
            continue
        assert isinstance(shown, Sheet)
        assert shown.title.endswith("in 101 steps")
        assert shown.note.startswith(words)
        drawn = [tip.partition(": ")[0] for tip in tips(shown)]
        assert drawn == ["burst, linear_dtype float8, 1K tokens", "burst, linear_dtype same, 1K tokens"]


def test_narrow_numbers_that_lie_apart_are_held_to_no_limit() -> None:
    narrow = [
        record(steps=Steps(warmup=1, measured=99), dtype="bf16", method=method, drift=drift)
        for method, drift in (("burst", 0.0), ("ring", 0.02))
    ]
    sheet = sheet_of("loss", rows_of(narrow))
    assert "limit 1e-04" not in texts(sheet)
    assert sheet.title == "Loss: losses differ, ring by 2.0e-02 relative"


def long_rows(**losses: list[float]) -> list[Row]:
    """One row for each series of 200 losses, by its kernel; `float8` multiplies in float8 with kernel fa4."""
    rows = rows_of(
        record(
            steps=Steps(warmup=0, measured=len(values)), dtype="bf16",
            kernel="fa4" if name == "float8" else name, linear_dtype="float8" if name == "float8" else "same",
        )
        for name, values in losses.items()
    )  # fmt: skip
    for row in rows:
        row["loss_by_step"] = losses["float8" if row["linear_dtype"] == "float8" else row["kernel"]]
    return rows


def test_of_long_runs_in_narrow_numbers_the_means_are_drawn_beside_the_run_of_most_alike_settings() -> None:
    ends_lower = [2.0] * 50 + [2.06] * 20 + [1.92] * 30 + [1.0] * 100
    rows = long_rows(cudnn=[2.0] * 100 + [1.01] * 100, fa4=[2.0] * 100 + [1.0] * 100, float8=ends_lower)
    for order in (rows, rows[::-1]):
        sheet = sheet_of("loss", order)
        assert sheet.title == "Mean loss of 20 steps: burst, linear_dtype float8 up to 4.0% below burst"
        assert "from 2.00 to a mean of 1.00; single losses of burst, linear_dtype float8 lie up to 4.0%" in sheet.note
        assert tips(sheet) == ["burst: 0 to 0", "burst, linear_dtype float8: 0 to 0", "burst, kernel cudnn: 0 to 1"]


def test_points_of_means_begin_where_the_first_window_ends() -> None:
    sheet = sheet_of("loss", long_rows(fa4=[1.0] * 200, float8=[1.1] * 20 + [1.0] * 180))
    zero, float8 = sheet.plot.keywords["lines"]  # type: ignore[attr-defined]
    assert [spot.at for spot in zero.spots] == [spot.at for spot in float8.spots] == list(range(20, 201))
    assert [spot.value for spot in float8.spots[:21]] == pytest.approx([10 - n / 2 for n in range(21)])
    assert {spot.value for spot in zero.spots} == {0.0}


def test_the_mean_that_the_title_names_is_drawn_whatever_is_left_out() -> None:
    rows = [
        row | {"seq_len": row["seq_len"] * factor, "trial_id": f"{row['trial_id']}-{factor}"}
        for factor in range(1, 9)
        for row in long_rows(fa4=[1.0] * 200, float8=[1.0 + factor / 100] * 200)
    ]
    sheet = sheet_of("loss", rows)
    assert sheet.title.startswith("Mean loss of 20 steps: burst, linear_dtype float8, 8K tokens up to 8.0% above")
    assert len(tips(sheet)) == MAX_CURVES
    assert "burst, linear_dtype float8, 8K tokens: 8 to 8" in tips(sheet)


def test_a_short_trial_and_losses_of_zero_leave_the_means_alone() -> None:
    long = long_rows(fa4=[1.0] * 200, float8=[1.02] * 200)
    short = rows_of([record(dtype="bf16", seq_len=2048, method=name) for name in ("burst", "ring")])
    assert sheet_of("loss", [*long, *short]).title.startswith("Mean loss of 20 steps: burst, linear_dtype float8")
    nothing = all_figures()["loss"].draw(long_rows(fa4=[0.0] * 200, float8=[0.0] * 100 + [0.5] * 100))
    assert isinstance(nothing, Sheet)
    assert nothing.title.startswith("Loss: losses differ")


def test_without_any_number_nothing_is_shown_and_of_one_trial_its_traced_step_alone() -> None:
    rows = rows_of([record(status="refused"), record(status="oom", task="attention")])
    assert [shown_of(group) for group in setups_of(rows)] == [{}, {}]
    for one in (record(gpu=H200, dtype="bf16"), record(task="attention", gpu=H200, dtype="bf16")):
        assert shown_of(rows_of([one])) == {}
    assert list(shown_of(rows_of([traced()]))) == ["time_breakdown"]


def test_the_categories_of_a_traced_step_are_sorted_and_add_up_to_it() -> None:
    sheet = sheet_of("time_breakdown", rows_of([traced(2.0), traced(3.0, method="ring")]))
    assert sheet.title == "Attention backward takes 45% of a step of 3.00 s at ring"
    shares = [float(tip.rpartition(": ")[2].partition("%")[0]) for tip in tips(sheet)]
    assert sum(shares) == pytest.approx(200, abs=0.5)
    assert shares[:3] == [45.0, 30.0, 20.0]
    assert "optimizer" not in said(sheet)  # took no time


def test_masks_share_a_figure_from_three_on() -> None:
    masks = ("causal", "full", "sliding_window:15")
    rows = rows_of([record(task="attention", mask=mask, kernel=one) for mask in masks for one in ("cpu", "reference")])
    sheet = sheet_of("speed", rows)
    assert set(masks) <= set(texts(sheet))
    assert "3 masks" in sheet.about


def test_models_and_weak_baselines_are_told_from_each_other() -> None:
    rows = rows_of(
        [
            on_gpu("megatron_cp", 1.2),
            on_gpu("burst", 1.0),
            replace(on_gpu("megatron_lm_upstream", 1.0), system="Megatron-LM"),
        ]
    )
    sheet = sheet_of("speed", rows)
    assert "megatron_cp †" in texts(sheet)
    assert "† Native" in sheet.note
