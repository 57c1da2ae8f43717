"""A figure's numbers side by side: matching, verdicts, drawing; hardware is never mixed without a word."""

from __future__ import annotations

import collections
import csv
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.files.reader import Node
from harness.metrics.flops import counted_flops, tokens_per_step, work_of
from harness.predict.published import configuration_of
from harness.records.record import RecordPlace, write_record
from harness.report.drawing.sheet import SCREEN
from harness.report.figures import render
from harness.report.results import row_of
from harness.reproduce.comparison import beside, list_table, points_table, verdict
from harness.reproduce.drawing import draw_reproduction, name_of
from harness.reproduce.figures import METRICS, paper_figures
from harness.reproduce.points import MeasuredRun, published_entries, published_points, runs_in
from harness.reproduce.predicted import PREDICTOR, predicted_for_paper, predicted_words
from harness.spec.models import read_model
from harness.spec.references import PAPER_DIR
from harness.spec.table import values_for
from tests.harness.report.figures.drawn import said
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


def run_of(*records) -> MeasuredRun:
    rows = tuple((row_of(each, "run"), RecordPlace(Path(each.trial_id))) for each in records)
    return MeasuredRun(path=Path("run"), rows=rows, bad=())


def seconds_for(speed: float, tokens: int = 1 << 20, ranks: int = 32) -> float:
    """Of a step; synthetic records have three steps whose median is 1.04 times the first."""
    return tokens / speed / ranks / 1.04


def test_the_verdict_follows_the_distance_on_the_same_set_up_and_gpu() -> None:
    close, far = trial(A800, seconds_for(120.0)), trial(A800, seconds_for(60.0))
    said, why = verdict(beside(E2E, [run_of(close)]))
    assert said == "partly"
    assert "1 of 2 measured within 10%" in why, "the speed is close, the synthetic memory is not"
    assert verdict(beside(E2E, [run_of(far)]))[0] == "not"
    assert verdict(beside(E2E, [run_of(trial(H200, seconds_for(118.0)))]))[0] == "not comparable"
    assert verdict(beside(E2E, [])) == ("not run", "no record of ours yet")


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


@pytest.mark.parametrize(
    "changes", [{"gpu": "cpu"}, {"gpu": None}, {"model": read_model(Node("tiny", "here"), Path())}]
)
def test_a_smoke_run_is_no_point_of_a_figure(changes: dict) -> None:
    """On a CPU, or with the small model on a GPU: beside a trial that is one."""
    smoke, whole = trial(**{"gpu": A800, "seconds": 1.0} | changes), trial(H200, seconds_for(500.0))
    found = beside(E2E, [run_of(smoke, whole)])
    assert [entry.hardware for entry in found.measured] == [H200]
    assert (found.smoke, verdict(found)[0]) == (1, "not comparable")
    alone = beside(E2E, [run_of(smoke)])
    assert not alone.measured
    assert verdict(alone)[0] == "not run"


def test_the_labels_that_the_sheet_of_sparse_attention_swaps_are_swapped_back_with_a_note() -> None:
    """393.44 is the causal row of the scaling table, so it is the balanced one."""
    found = {entry.series: entry for entry in published_entries(paper_figures()["sparse"])}
    assert found["Causal w. workload balance"].values == {SPEED: 393.44}
    assert found["Mask impl"].values == {SPEED: 227.58}
    assert all("swapped back" in found[name].note for name in ("Causal w. workload balance", "Mask impl"))


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
    assert "GPUs of several kinds share 14b, 32 GPUs: A800-80GB, H200." in figure.note
    assert "the paper's own figures were not read" in figure.note
    assert "Burst-Ring · H200, measured, as published settings" in said(figure)


def test_published_bars_are_hatched_measured_solid_and_predicted_outlined() -> None:
    found = beside(E2E, [run_of(trial(A800, seconds_for(118.0)))], predicted_for_paper(E2E))
    figure = draw_reproduction(found, "peak_memory_gib", PREDICTOR)
    assert figure is not None
    page = figure.drawn(SCREEN)
    bars = {page.tips[str(bar.get_gid())][0].rpartition(", 14b,")[0]: bar for bar in page.figure.axes[0].patches}
    published = bars["Burst-Ring · A800-80GB, published"]
    measured = bars["Burst-Ring · A800-80GB, measured, as published settings"]
    outlined = bars["Burst-Ring · A800-80GB, predicted"]
    assert published.get_hatch()
    assert not measured.get_hatch()
    assert not outlined.get_hatch()
    assert [bar.get_facecolor()[3] for bar in (published, measured, outlined)] == [0.0, 1.0, 0.0]
    assert published.get_linestyle() == "-" != outlined.get_linestyle()
    assert PREDICTOR in figure.note


def committed(name: str, value: str) -> dict[tuple[str, str], float]:
    """A column of a table of results/paper by configuration and metric."""
    with (PAPER_DIR / name).open(encoding="utf-8", newline="") as file:
        return {(row["configuration"], row.get("metric", "memory")): float(row[value]) for row in csv.DictReader(file)}


def test_what_is_drawn_beside_a_published_bar_is_what_the_committed_tables_predict_of_its_row() -> None:
    times, memory = committed("predicted.csv", "predicted_seconds"), committed("predicted_memory.csv", "predicted_gib")
    compared = collections.Counter()
    for figure in paper_figures().values():
        drawn = [entry for entry in predicted_for_paper(figure) if not entry.settings]
        assert len({(entry.series, entry.setup) for entry in drawn}) == len(drawn), figure.name
        rows = {(point.series, point.setup): row for point, row in published_points(figure)}
        for entry in drawn:
            configuration, _ = configuration_of(rows[entry.series, entry.setup])
            assert configuration is not None
            settings = configuration.settings
            attention = settings.task == "attention"
            key = (configuration.name, "forward_backward_ms" if attention else SPEED)
            if key not in times:  # the sheet has a rate of this point, and no time
                compared["rate alone"] += 1
                continue
            seconds = times[key]
            work = counted_flops(settings, work_of(settings)) / settings.world_size
            expected = {
                SPEED: tokens_per_step(settings) / settings.world_size / seconds,
                "forward_backward_ms": 1e3 * seconds,
                "tflops_per_gpu": work / seconds / 1e12,
            }
            if (configuration.name, "memory") in memory:
                expected["peak_memory_gib"] = memory[configuration.name, "memory"]
            for metric in entry.values.keys() & expected.keys():
                assert entry.values[metric] == pytest.approx(expected[metric], rel=6e-4), (figure.name, entry)
                compared[metric] += 1
    assert compared["rate alone"] <= 6
    assert compared[SPEED] > 100
    assert compared["peak_memory_gib"] > 15
    assert compared["tflops_per_gpu"] > 15


def test_a_prediction_stands_beside_the_bar_of_its_own_checkpointing() -> None:
    """LoongTrain's bars keep attention's outputs; what exp.sh sets (sele_ckpt=0) is a row of its own."""
    points = {
        (entry.origin, entry.series, entry.model): entry.values[SPEED]
        for entry in beside(E2E, [], predicted_for_paper(E2E)).entries
        if entry.gpus == 32 and entry.settings == "" and SPEED in entry.values
    }
    for model, kept, without in (("7b", 87.98, 73.43), ("14b", 99.73, 79.15)):
        assert points["published", "LoongTrain-USP", model] == kept
        assert points["published", "LoongTrain-USP w/o sele-ckpt", model] == without
    assert points["predicted", "LoongTrain-USP", "7b"] == pytest.approx(96.8, abs=0.1)
    assert points["predicted", "LoongTrain-USP w/o sele-ckpt", "7b"] == pytest.approx(76.8, abs=0.1)
    published = values_for("loongtrain_usp", "as_published", frozenset())
    assert published["checkpoint.tail"] == 0.0
    series = {entry.series for entry in predicted_for_paper(E2E) if entry.settings == "as_published"}
    assert "Burst-Ring" not in series, "the row stands for it already"


@pytest.mark.parametrize("name", list(paper_figures()))
def test_the_list_counts_the_values_that_a_figure_is_drawn_with(name: str) -> None:
    figure = paper_figures()[name]
    drawn = predicted_for_paper(figure)
    counted = {metric: sum(metric in entry.values for entry in drawn) for metric in figure.shows}
    words = [f"{count} {METRICS[metric].predicted}" for metric, count in counted.items() if count]
    assert predicted_words(figure) == (", ".join(words) or "none needed")


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
    assert verdicts["e2e_main"] == "not run"


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
