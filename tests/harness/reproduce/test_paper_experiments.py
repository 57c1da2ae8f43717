"""experiments/paper: one file per figure, each with every scale, and the smoke scale runs on two cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.settings import TrialSettings
from harness.machine.this_machine import Machine
from harness.metrics.hardware import hardware_named
from harness.plan.matrix import asked_for, plan
from harness.reproduce.figures import EXPERIMENTS_DIR, PaperFigure, paper_figures
from harness.reproduce.predicted import trials_of
from harness.spec.experiment import load_experiment

FIGURES = list(paper_figures().values())
SCALES = ("paper", "node", "one_gpu", "smoke")
LAPTOP = Machine(hostname="laptop", device="cpu", cores=2, memory_gib=16)


def asked(figure: PaperFigure, scale: str) -> list[TrialSettings]:
    """Settings of a scale's trials. What the planner chooses for them changes neither sizes nor methods, and takes
    long."""
    return asked_for(load_experiment(figure.experiment, scale))


def named(figure: PaperFigure) -> str:
    return figure.name


def test_every_experiment_of_the_paper_belongs_to_a_figure_and_every_figure_has_one() -> None:
    assert {path.stem for path in EXPERIMENTS_DIR.glob("*.yaml")} == set(paper_figures())


@pytest.mark.parametrize("figure", FIGURES, ids=named)
def test_an_experiment_names_the_figures_reference_and_has_every_scale(figure: PaperFigure) -> None:
    for scale in SCALES:
        experiment = load_experiment(figure.experiment, scale)
        assert experiment.reference == {"paper": figure.reference}
        assert experiment.name == figure.name


@pytest.mark.parametrize("figure", FIGURES, ids=named)
def test_all_trials_of_the_smoke_scale_can_run_without_a_gpu(figure: PaperFigure) -> None:
    trials = plan(load_experiment(figure.experiment, "smoke"), LAPTOP)
    assert {trial.unsupported_reason for trial in trials} == {None}
    assert len(trials) <= 10


@pytest.mark.parametrize("figure", FIGURES, ids=named)
def test_the_one_gpu_scale_needs_one_gpu_and_the_node_scale_at_most_eight(figure: PaperFigure) -> None:
    alone = trials_of(figure, "one_gpu", hardware_named("h200"))
    assert {trial.settings.world_size for trial in alone} == {1}
    assert max(settings.world_size for settings in asked(figure, "node")) <= 8
    assert {trial.unsupported_reason for trial in alone} == {None}


@pytest.mark.parametrize("figure", [figure for figure in FIGURES if not figure.computed], ids=named)
def test_the_paper_scale_plans_every_published_point_that_has_a_series(figure: PaperFigure) -> None:
    from harness.reproduce.points import predicted_entry, published_entries

    planned = {
        (entry.series, *entry.setup)
        for settings in asked(figure, "paper")
        for entry in [predicted_entry(figure, settings, "A800", {})]
    }
    published = {(entry.series, *entry.setup) for entry in published_entries(figure) if entry.values}
    assert published
    assert published <= planned


@pytest.mark.parametrize("figure", [figure for figure in FIGURES if not figure.computed], ids=named)
def test_every_method_is_planned_equal_and_as_published(figure: PaperFigure) -> None:
    by_method: dict[str, set[str]] = {}
    for settings in asked(figure, "paper"):
        by_method.setdefault(settings.method, set()).add(settings.settings)
    assert set(map(frozenset, by_method.values())) == {frozenset({"equal", "as_published"})}


def test_the_ablation_is_cumulative() -> None:
    rows = {
        (each.schedule, each.backward, each.lm_head_fusion, each.checkpoint.tail)
        for each in asked(paper_figures()["ablation"], "paper")
    }
    assert rows == {
        ("ring", "key_value", False, 0),
        ("ring", "query", False, 0),
        ("double_ring", "query", False, 0),
        ("double_ring", "query", True, 0),
        ("double_ring", "query", True, 0.5),
        ("double_ring", "query", True, 1),
    }


def test_the_files_of_the_paper_lie_beside_the_code() -> None:
    assert Path(__file__).parents[3] / "experiments" / "paper" == EXPERIMENTS_DIR
