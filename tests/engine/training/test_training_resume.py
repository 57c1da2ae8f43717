"""A run that was stopped goes on as if nothing had happened, on these ranks or on others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.training.training_runs import SHAPE, config, curve, order, several
from tests.ranks import run_on_ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[Path, list[dict]]:
    """Two context-parallel ranks: six steps at once, then three and, resumed, three more."""
    folder = tmp_path_factory.mktemp("runs")
    whole, parts = str(folder / "whole"), str(folder / "parts")
    six = config(cp_size=2)
    starts = [(whole, order(six), None), (parts, order(six), 3), (parts, order(six, resume=True), None)]
    return folder, run_on_ranks(2, several, str(folder / "cache"), starts)[0]


def test_a_resumed_run_repeats_the_loss_curve_and_the_parameters_bit_for_bit(two_ranks) -> None:
    _, (whole, first, second) = two_ranks
    assert (first["finished"], first["steps_done"]) == (False, 3)
    assert (second["finished"], second["steps_done"], second["notes"]) == (True, 6, [])
    assert [line[0] for line in curve(whole)] == [1, 2, 3, 4, 5, 6]
    assert curve(second) == curve(whole)
    assert curve(second, "evaluation") == curve(whole, "evaluation")
    assert second["parameters"] == whole["parameters"]


def test_evaluation_comes_before_the_first_step_when_due_and_at_the_end(two_ranks) -> None:
    _, (whole, *_) = two_ranks
    assert [line[0] for line in curve(whole, "evaluation")] == [0, 3, 6]
    first, *_, last = curve(whole, "evaluation")
    assert last[2] < first[2]


def test_the_newest_checkpoints_stay_and_the_pointer_names_the_last(two_ranks) -> None:
    folder, _ = two_ranks
    directory = folder / "parts" / "checkpoints"
    assert sorted(path.name for path in directory.iterdir()) == ["latest", "step-00000004", "step-00000006"]
    assert (directory / "latest").read_text() == "step-00000006\n"


def from_step_4(folder: Path, name: str) -> str:
    """A copy of the two-rank run as it was after step 4."""
    import shutil

    copy = folder / name
    shutil.copytree(folder / "parts", copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    return str(copy)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [(1, {}), (4, {"world_size": 4, "cp_size": 2, "batch_size": 1}), (2, {"world_size": 2, "batch_size": 1})],
)
def test_a_run_goes_on_with_other_ranks(two_ranks, ranks: int, changes: dict) -> None:
    folder, (whole, *_) = two_ranks
    run = from_step_4(folder, f"elsewhere{ranks}")
    starts = [(run, order(config(**changes), resume=True), None)]
    [elsewhere] = run_on_ranks(ranks, several, str(folder / "cache"), starts)[0]
    found, expected = curve(elsewhere), curve(whole)
    assert found[:4] == expected[:4]
    for line, truth in zip(found[4:], expected[4:], strict=True):
        assert line[:2] == truth[:2]
        assert line[2:] == pytest.approx(truth[2:], rel=2e-5)
    assert curve(elsewhere, "evaluation")[-1][2] == pytest.approx(curve(whole, "evaluation")[-1][2], rel=2e-5)


def test_what_would_change_the_run_is_refused_and_what_only_changes_its_course_is_not(two_ranks) -> None:
    folder, _ = two_ranks
    run = from_step_4(folder, "changed")
    other_text = folder / "other.txt"
    other_text.write_text("other words, " * 2500)
    cases = [
        config(seq_len=16),
        config(batch_size=4),
        config(seed=1),
        config(data=str(other_text)),
        config(model=replace(SHAPE, layers=1)),
        config(steps=5, learning_rate=0.002),
    ]
    starts = [(run, order(case, resume=True), None) for case in cases]
    *refused, allowed = run_on_ranks(1, several, str(folder / "cache"), starts)[0]
    expected = [
        "seq_len 32, and the run now says 16",
        "sequences per step (batch_size x gradient_accumulation x replicas) 2, and the run now says 4",
        "seed 0, and the run now says 1",
        "and the run now says",
        "model.layers 2, and the run now says 1",
    ]
    for result, words in zip(refused, expected, strict=True):
        assert result["refused"].startswith("checkpoint step-00000004 cannot be gone on from: it was made with")
        assert words in result["refused"]
    assert "data of sha256" in refused[3]["refused"]
    assert allowed["steps_done"] == 5
