"""A figure's numbers side by side: matching, verdicts, drawing; hardware is never mixed without a word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.text import Text

from cluster.files.document import Node
from harness.metrics.hardware import hardware_named
from harness.plan.predict import Prediction
from harness.records.record import write_record
from harness.report.figures import render
from harness.report.results import row_of
from harness.reproduce.beside import beside, list_table, points_table, verdict
from harness.reproduce.drawing import OriginLook, draw_reproduction, name_of
from harness.reproduce.entries import published_entries
from harness.reproduce.figures import paper_figures
from harness.reproduce.measured import Run, runs_in
from harness.reproduce.predicted import PREDICTOR, predicted_entries, predicted_words
from harness.spec.models import read_model
from tests.harness.synthetic_records import H200, record

A800 = "NVIDIA A800-SXM4-80GB"
E2E = paper_figures()["e2e_main"]
FOURTEEN = read_model(Node("14b", "here"), Path())
SPEED = "tokens_per_gpu_per_second"


def trial(gpu: str, seconds: float, **changes):
    values = {
        "model": FOURTEEN, "experiment": "e2e_main", "dtype": "bf16", "gpu": gpu, "seq_len": 1 << 20, "cp_size": 32,
        "settings": "as_published", "method": "burst",
    }  # fmt: skip
    return record(seconds=seconds, **values | changes)


def run_of(*records) -> Run:
    rows = tuple((row_of(each, "run"), Path("run") / each.trial_id) for each in records)
    return Run(path=Path("run"), rows=rows, bad=())


def seconds_for(speed: float, tokens: int = 1 << 20, ranks: int = 32) -> float:
    """Of a step; synthetic records have three steps whose median is 1.04 times the first."""
    return tokens / speed / ranks / 1.04


def texts(figure) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.findobj(Text)).split())


def test_the_verdict_follows_the_distance_on_the_same_set_up_and_gpu() -> None:
    close, far = trial(A800, seconds_for(120.0)), trial(A800, seconds_for(60.0))
    said, why = verdict(beside(E2E, [run_of(close)]))
    assert said == "partly"
    assert "1 of 2 measured within 10%" in why, "the speed is close, the synthetic memory is not"
    assert verdict(beside(E2E, [run_of(far)]))[0] == "not"
    assert verdict(beside(E2E, [run_of(trial(H200, seconds_for(118.0)))]))[0] == "not comparable"
    assert verdict(beside(E2E, []))[0] == "not"


def test_a_ratio_stands_only_where_the_gpu_is_the_same() -> None:
    table = points_table(beside(E2E, [run_of(trial(A800, seconds_for(118.36)), trial(H200, seconds_for(500.0)))]))
    headers = [column.header for column in table.columns]
    ratio, on = headers.index("measured ÷ published"), headers.index("on")
    by_gpu = {
        row[on]: row[ratio] for row in table.rows if row[headers.index("metric")].startswith("tokens") and row[on]
    }
    assert by_gpu[A800] == pytest.approx(1.0, rel=1e-3)
    assert by_gpu[H200] is None


def test_a_trial_that_auto_solved_by_exchanging_heads_is_no_point_of_the_ring() -> None:
    one = trial(H200, seconds_for(500.0))
    heads = replace(
        one, measurement=replace(one.measurement, chosen={"schedule": "ulysses", "exchange": "copy_engine"})
    )
    [entry] = beside(E2E, [run_of(heads)]).measured
    assert entry.series == "burst (auto: ulysses, copy engine)"
    ring = replace(one, measurement=replace(one.measurement, chosen={"schedule": "ring", "exchange": "relay"}))
    assert [entry.series for entry in beside(E2E, [run_of(ring)]).measured] == ["Burst-Ring"]


def test_trials_of_another_experiment_are_no_part_of_a_figure() -> None:
    assert not beside(E2E, [run_of(trial(A800, 1.0, experiment="quickstart"))]).measured


def test_a_trial_without_a_number_is_shown_by_its_status() -> None:
    lost = trial(A800, 1.0, status="oom", reason="rank 0: out of memory")
    found = beside(E2E, [run_of(lost)])
    assert [entry.status for entry in found.measured] == ["oom"]
    assert any("oom" in map(str, row) for row in points_table(found).rows)


def test_every_series_of_a_figure_carries_its_hardware_and_a_shared_panel_is_noted() -> None:
    found = beside(E2E, [run_of(trial(H200, seconds_for(500.0)), trial(H200, seconds_for(400.0), settings="equal"))])
    names = {name_of(entry) for entry in found.entries}
    assert {"Burst-Ring · A800-80GB, published", "Burst-Ring · H200, measured, as published settings"} <= names
    figure = draw_reproduction(found, SPEED)
    assert figure is not None
    said = texts(figure)
    assert "GPUs of several kinds share the panel 14b, 32 GPUs: A800-80GB, H200." in said
    assert "the paper's own figures were not read" in said


def test_published_bars_are_hatched_measured_solid_and_predicted_outlined() -> None:
    predicted = predicted_entries(E2E, "paper", hardware_named("a800"))
    found = beside(E2E, [run_of(trial(A800, seconds_for(118.0)))], predicted)
    figure = draw_reproduction(found, "peak_memory_gib", PREDICTOR.name)
    assert figure is not None
    legend = figure.legends[0]
    names = [text.get_text().replace("\n", " ") for text in legend.get_texts()]
    looks = dict(zip(names, legend.get_patches(), strict=True))
    published = looks["Burst-Ring · A800-80GB, published"]
    measured = looks["Burst-Ring · A800-80GB, measured, as published settings"]
    outlined = looks["Burst-Ring · A800-80GB, predicted, as published settings"]
    assert published.get_hatch()
    assert not measured.get_hatch()
    assert not outlined.get_hatch()
    white = (1.0, 1.0, 1.0, 1.0)
    assert measured.get_facecolor() != white
    assert outlined.get_facecolor() == published.get_facecolor() == white
    assert "linestyle" in OriginLook(colour="#000000", origin="predicted").bar, "dashes"
    assert "linestyle" not in OriginLook(colour="#000000", origin="published").bar
    assert PREDICTOR.name in texts(figure)


def test_a_predictor_needs_a_name_and_one_function() -> None:
    class Half:
        name = "half a second, one GiB"

        def predict(self, settings, hardware):
            return Prediction(seconds=0.5, gpu_gib=1.0, reserved_gib=None, host_gib=None)

    entries = predicted_entries(E2E, "smoke", hardware_named("h100"), Half())
    assert entries
    for entry in entries:
        assert entry.values == {SPEED: pytest.approx(512 / 0.5 / 2), "peak_memory_gib": 1.0}
        assert entry.origin == "predicted"
    words = predicted_words(E2E, entries)
    assert words == f"{len(entries)} speeds, {len(entries)} memory"
    assert "simulated" in PREDICTOR.name


def test_a_paper_gets_a_narrow_form_with_the_notes_as_its_caption() -> None:
    drawn = draw_reproduction(beside(E2E, []), SPEED)
    assert drawn is not None
    assert render(drawn, "pdf").startswith(b"%PDF-")
    assert "the paper's own figures were not read" in drawn.caption


@pytest.mark.parametrize("name", list(paper_figures()))
def test_every_figure_is_drawn_from_published_numbers_alone(name: str) -> None:
    figure = paper_figures()[name]
    found = beside(figure, [])
    drawn = [draw_reproduction(found, metric) for metric in figure.shows]
    assert all(drawn)
    assert len(published_entries(figure)) == len(found.published)
    assert points_table(found).rows


def test_the_list_has_a_line_for_every_figure() -> None:
    found = [(beside(figure, []), "") for figure in paper_figures().values()]
    table = list_table(found, "predicted: nothing")
    assert [row[0] for row in table.rows] == list(paper_figures())
    verdicts = {row[0]: row[-2] for row in table.rows}
    assert verdicts["attention_share_analytic"] == "reproduced"
    assert verdicts["e2e_main"] == "not"


def test_a_record_whose_commit_is_lost_answers_nothing(tmp_path: Path) -> None:
    kept, lost = trial(H200, 1.0), trial(H200, 2.0, method="ring")
    for one in (kept, lost):
        write_record(tmp_path / "trials" / one.trial_id, one)
    assert [len(run.rows) for run in runs_in([tmp_path])] == [2]
    (tmp_path / "provenance.yaml").write_text(
        f"reasons: [{{about: lost_commit, says: it is in no history, trials: [{lost.trial_id}]}}]"
    )
    [run] = runs_in([tmp_path])
    assert [row["trial_id"] for row, _ in run.rows] == [kept.trial_id]
