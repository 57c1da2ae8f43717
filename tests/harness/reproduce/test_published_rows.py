"""Published numbers: read strictly, every one placed in a figure or said to be left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.base.errors import UsageError
from harness.predict.published import COLUMNS, only, published_rows, read_published
from harness.reproduce.figures import figure_named, paper_figures, read_figures, without_figure
from harness.reproduce.points import gpu_text, published_entries, same_hardware
from harness.spec.references import paper_experiments

HEADER = ",".join(COLUMNS)
ROW = "e2e_main,f,32,4,A800-80GB,7b,2097152,Megatron,peak_memory_gib,{value},{unit},sheet"


def test_every_row_of_the_file_is_read_with_the_line_it_stands_in() -> None:
    rows = published_rows()
    assert len(rows) == 1160
    assert rows[0].line == 2
    assert all((row.value is None) == (row.unit == "oom") for row in rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", ":1: found the columns a, b; expected experiment, figure"),
        (f"{HEADER}\nx,y\n", ":2: found 2 cells; expected 12"),
        (f"{HEADER}\n{ROW.format(value='many', unit='GiB')}\n", ":2: could not convert string to float: 'many'"),
        (f"{HEADER}\n{ROW.format(value='', unit='GiB')}\n", ":2: the value is empty and the unit is 'GiB'"),
    ],
)
def test_a_wrong_file_of_numbers_gives_one_sentence_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "reference.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_published(path)
    assert f"{path}{message}" in str(caught.value)


def test_every_published_experiment_has_a_figure_or_a_reason_why_not() -> None:
    shown = {figure.reference for figure in paper_figures().values()}
    assert shown | set(without_figure()) == set(paper_experiments())
    assert not shown & set(without_figure())


@pytest.mark.parametrize("name", list(paper_figures()))
def test_every_method_of_a_figure_has_a_series_or_a_reason_why_not(name: str) -> None:
    figure = figure_named(name)
    unexplained = {
        row.method for row in figure.rows() if figure.series_of(row.method) is None
        and not figure.why_left_out(row.method)
    }  # fmt: skip
    assert not unexplained
    assert published_entries(figure)


def test_the_cp_size_in_a_published_name_is_part_of_the_set_up() -> None:
    figure = figure_named("single_node")
    series = figure.series_of("burst-sl-ckpt [sp=4]")
    assert series is not None
    assert (series.name, series.cp_size) == ("burst-sl-ckpt", 4)
    assert figure.series_of("burst [sp unstated]") is None
    assert figure.why_left_out("burst [sp unstated]") == "the CP size is not stated"


def test_one_number_is_found_by_its_columns_and_two_are_an_error() -> None:
    rows = [row for row in published_rows() if row.experiment == "cp_scaling"]
    assert only(rows, metric="tokens_per_gpu_per_second", gpus=8).value == 393.44
    with pytest.raises(LookupError):
        only(rows, metric="tokens_per_gpu_per_second")
    with pytest.raises(LookupError):
        only(rows, metric="tokens_per_gpu_per_second", gpus=3)


def test_an_unknown_figure_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"unknown figure ablatoin; did you mean ablation\?"):
        figure_named("ablatoin")


def test_a_figure_of_an_unknown_reference_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "figures.yaml"
    path.write_text("figures:\n  one: {title: T, reference: sprase, shows: [mfu], series: {}}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r":2: figure one: unknown reference sprase; did you mean sparse\?"):
        read_figures(path)


def test_names_of_one_gpu_by_sheet_file_and_driver_are_the_same() -> None:
    assert same_hardware("A800-80GB", "NVIDIA A800-SXM4-80GB")
    assert same_hardware("A800-80GB", "NVIDIA A800 80 GB")
    assert same_hardware("NVIDIA H200", "NVIDIA H200 SXM 141 GB")
    assert not same_hardware("A800-80GB", "NVIDIA A100-SXM4-80GB")
    assert not same_hardware("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    assert gpu_text("cpu") == "cpu"
