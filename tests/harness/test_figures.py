"""Figures: found by file name, every trial in its place, a footer that explains what is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

import harness.report.figures
from harness.records.record import Record
from harness.report.figures import all_figures, render, save_figure
from harness.report.results import Row, rows_of
from harness.report.variants import setups_of
from tests.harness.synthetic_records import H200, cpu_sweep, gpu_sweep, levers, record, traced


def rows_for(records: list[Record], task: str) -> list[Row]:
    [group] = [group for group in setups_of(rows_of(records)) if group[0]["task"] == task]
    return group


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def bars(figure: Figure) -> int:
    return sum(len(container) for ax in figure.axes for container in ax.containers if hasattr(container, "patches"))


def test_every_module_of_the_package_is_a_figure() -> None:
    files = {path.stem for path in Path(harness.report.figures.__file__).parent.glob("[!_]*.py")}
    assert set(all_figures()) == files
    places = [figure.place for figure in all_figures().values()]
    assert places == sorted(places)


@pytest.mark.parametrize("task", ["train", "attention"])
@pytest.mark.parametrize("sweep", [cpu_sweep, gpu_sweep])
def test_every_applicable_figure_explains_itself(sweep: Callable[[], list[Record]], task: str) -> None:
    rows = rows_for(sweep(), task)
    drawn = {name: figure.draw(rows) for name, figure in all_figures().items() if figure.applies(rows)}
    assert drawn
    for name, figure in drawn.items():
        footer = " ".join(" ".join(texts(figure)).split())
        assert "n = 3 measured steps" in footer, name
        assert "in one round" in footer, name
        assert "=" in footer or "Median" in footer, name


@pytest.mark.parametrize("sweep", [cpu_sweep, gpu_sweep])
def test_peak_and_ceiling_stand_where_a_gpu_has_them_and_nowhere_else(sweep: Callable[[], list[Record]]) -> None:
    on_gpu = sweep is gpu_sweep
    for task in ("train", "attention"):
        rows = rows_for(sweep(), task)
        for name, drawing in all_figures().items():
            if drawing.applies(rows):
                said = " ".join(" ".join(texts(drawing.draw(rows))).split())
                belongs = on_gpu and name in ("mfu", "attention_speed")
                assert ("peak: 989 TFLOP/s" in said) == ("Peak: 989 TFLOP/s" in said) == belongs, name
                assert ("ceiling" in said) == belongs, name
                if belongs:
                    assert "measured 2026-11-20" in said, name


def test_a_missing_bar_carries_its_status() -> None:
    rows = rows_for(cpu_sweep(), "train")
    figure = all_figures()["throughput"].draw(rows)
    assert bars(figure) == 16
    assert texts(figure).count("refused") == 1
    assert texts(figure).count("oom") == 1


def test_each_parallel_size_has_a_panel_and_each_length_a_group() -> None:
    figure = all_figures()["throughput"].draw(rows_for(cpu_sweep(), "train"))
    assert [ax.get_title() for ax in figure.axes] == ["CP 1", "CP 2", "CP 4"]
    assert [[tick.get_text() for tick in ax.get_xticklabels()] for ax in figure.axes] == [["1k", "2k"]] * 3


def test_only_what_was_planned_takes_room() -> None:
    methods = ("burst", "ring", "ulysses", "megatron_cp", "torch_cp")
    many = [record(cp_size=2, seq_len=length, method=method) for length in (1024, 2048) for method in methods]
    figure = all_figures()["throughput"].draw(rows_of([record(cp_size=1), *many]))
    lengths = [[tick.get_text() for tick in ax.get_xticklabels()] for ax in figure.axes]
    assert lengths == [["1k"], ["1k", "2k"]]
    figure.draw_without_rendering()
    inches = [ax.get_window_extent().width for ax in figure.axes]
    bars_wide = [ax.get_xlim()[1] - ax.get_xlim()[0] for ax in figure.axes]
    assert inches[0] / bars_wide[0] == pytest.approx(inches[1] / bars_wide[1], rel=0.1)


def test_a_wide_spread_stays_inside_its_panel() -> None:
    restless = record(seconds=1.0)
    assert restless.measurement is not None
    restless.measurement.step_seconds = [0.2, 1.0, 3.0]
    figure = all_figures()["throughput"].draw(rows_of([restless, record(method="ring", seconds=1.0)]))
    [ax] = figure.axes
    whiskers = [path.vertices[:, 1].max() for line in ax.collections for path in line.get_paths()]
    assert max(bar.get_height() for bar in ax.patches) < max(whiskers) < ax.get_ylim()[1]


def test_without_any_number_no_figure_applies() -> None:
    rows = rows_of([record(status="refused"), record(status="oom", task="attention")])
    assert not any(figure.applies(group) for group in setups_of(rows) for figure in all_figures().values())


def test_attention_is_in_milliseconds_on_a_cpu_and_in_tflops_on_a_gpu() -> None:
    attention = all_figures()["attention_speed"]
    assert any("ms" in text for text in texts(attention.draw(rows_for(cpu_sweep(), "attention"))))
    assert "TFLOP/s per GPU" in texts(attention.draw(rows_for(gpu_sweep(), "attention")))


def test_utilisation_is_drawn_only_where_a_peak_is_known() -> None:
    mfu = all_figures()["mfu"]
    assert not mfu.applies(rows_for(cpu_sweep(), "train"))
    assert mfu.applies(rows_for(gpu_sweep(), "train"))


def test_three_lengths_make_lines_on_a_logarithmic_axis() -> None:
    figure = all_figures()["throughput"].draw(rows_for(gpu_sweep(), "train"))
    assert not bars(figure)
    for ax in figure.axes:
        assert ax.get_xscale() == "log"
        assert [tick.get_text() for tick in ax.get_xticklabels()] == ["32k", "64k", "128k", "256k"]
    single = figure.axes[0]  # CP 1: two lengths were measured, two ended out of memory
    drawn = {tuple(line.get_xdata()) for line in single.get_lines() if len(line.get_xdata()) > 1}
    assert drawn == {(32768, 65536, 131072)}
    assert [text.get_text() for text in single.texts].count("oom") == 2  # of two kernels, at 256k


def test_two_lengths_make_bars_that_stand_on_zero() -> None:
    figure = all_figures()["throughput"].draw(rows_for(cpu_sweep(), "train"))
    assert bars(figure) == 16
    assert all(ax.get_ylim()[0] == 0 for ax in figure.axes)


def test_one_trial_alone_has_no_figure_but_of_its_traced_step() -> None:
    for one in (record(gpu=H200, dtype="bf16"), record(task="attention", gpu=H200, dtype="bf16", cp_size=2)):
        assert [name for name, figure in all_figures().items() if figure.applies(rows_of([one]))] == []
    assert [name for name, figure in all_figures().items() if figure.applies(rows_of([traced()]))] == ["time_breakdown"]


def test_no_two_figures_of_one_length_say_the_same() -> None:
    """MFU is proportional to tokens/s there; and memory against speed shows both."""
    methods = rows_of([record(method=method, gpu=H200, dtype="bf16") for method in ("burst", "ulysses")])
    applying = {name for name, figure in all_figures().items() if figure.applies(methods)}
    assert "mfu" in applying
    assert "throughput" not in applying
    sweep = rows_of(levers())
    assert {name for name, figure in all_figures().items() if figure.applies(sweep)} == {"memory_time", "loss"}


def test_a_trial_is_not_compared_with_itself() -> None:
    loss = all_figures()["loss"]
    assert not loss.applies(rows_of([record(seq_len=1024 * n) for n in (1, 2, 4)]))
    pair = rows_of([record(), record(method="ring")])
    assert loss.applies(pair)
    upper, lower = loss.draw(pair).axes
    assert len(upper.get_lines()) == 2
    assert len([line for line in lower.get_lines() if len(line.get_xdata()) == 4]) == 1  # the reference has none


def test_loss_curves_show_every_trial_and_name_the_missing_ones() -> None:
    figure = all_figures()["loss"].draw(rows_for(cpu_sweep(), "train"))
    upper = figure.axes[:2]
    assert [len(ax.get_lines()) for ax in upper] == [8, 8]
    assert any("ulysses, CP 4 at 1k (refused)" in " ".join(text.split()) for text in texts(figure))


def test_many_parallel_sizes_wrap_onto_further_lines() -> None:
    rows = rows_of([record(cp_size=2**power) for power in range(6)])
    visible = [ax for ax in all_figures()["throughput"].draw(rows).axes if ax.get_visible()]
    assert [ax.get_title() for ax in visible] == [f"CP {2**power}" for power in range(6)]


def test_equal_data_gives_equal_bytes(tmp_path: Path) -> None:
    rows = rows_of([record(), record(method="ring")])
    draw = all_figures()["throughput"].draw
    for kind in ("png", "pdf", "svg"):
        assert render(draw(rows), kind) == render(draw(rows), kind), kind


def test_files_are_whole_and_of_their_kind(tmp_path: Path) -> None:
    figure = all_figures()["throughput"].draw(rows_of([record()]))
    (png,) = [path for path in save_figure(figure, tmp_path / "a.b", ["png", "pdf"]) if path.suffix == ".png"]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert len(png.read_bytes()) > 1000
    assert (tmp_path / "a.b.pdf").read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b.pdf", "a.b.png", "a.b.tex"]
